"""One prompt: prefill, then decode a token at a time. Start reading here.

    cache = model.new_cache(capacity)
    logits = model.forward(prompt, cache)         # prefill: every prompt token at once
    while True:
        token = sampler.choose(logits, ...)       # greedy, or a draw
        logits = model.forward([token], cache)    # decode: one token; the cache holds the rest

Without a cache the last line becomes `model.forward(prompt + output, empty cache)`: the same logits, bit for bit, for a
cost that grows with the square of the length.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nanokv.backend import to_numpy
from nanokv.errors import CapacityError, UsageError
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedCache
from nanokv.kv.spec import CacheSpec
from nanokv.sampling import Sampler, SamplingParams, StopStrings, log_softmax
from nanokv.tokenizer import TokenStream

if TYPE_CHECKING:
    from nanokv.model import Model


@dataclass(frozen=True)
class Options:
    """What to generate besides the prompt. `stop` strings end the text and do not appear in it; `logprobs` K keeps the K
    best tokens of every step. Raises UsageError for a value out of its range."""

    max_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max-tokens {self.max_tokens} is out of range: it must be at least 1")
        if self.logprobs < 0:
            raise UsageError(f"logprobs {self.logprobs} is out of range: it must be 0 or more")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of one step, before penalty, temperature and filters: of the chosen token, and of the
    best ones in falling order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Generation:
    """One prompt's generation: iterate over it for pieces of text as they are made; the fields grow with it.

    `finish_reason` is None while it runs, then one of: "eos" (the model ended the text), "stop" (a stop string), "length"
    (max_tokens), "context" (the model has no position for another token), "interrupted" (the caller gave up).
    Times are in seconds; `decode_s` covers every token after the first.
    """

    model: "Model"
    prompt_tokens: list[int]
    options: Options
    cache: CacheSpec = field(default_factory=CacheSpec)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cache_bytes: int = 0
    cache_tokens: int = 0
    cache_token_bytes: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __post_init__(self) -> None:
        positions = self.model.config.num_positions
        if not self.prompt_tokens:
            raise UsageError("the prompt is empty: give at least one character")
        if self.cache.endless:
            inside = self.cache.visibility.held(1 << 60)
            if inside > positions:
                raise UsageError(f"window and sinks make {inside} positions, more than the model's {positions}")
        elif len(self.prompt_tokens) > positions:
            raise CapacityError(f"the prompt has {len(self.prompt_tokens)} tokens, more than the model's {positions} positions")
        self.cache.codec(self.model.dtype, self.model.kv_backend)  # refuses what cannot be stored before anything is shown
        self._sampler = Sampler(self.options.sampling)
        self._stream = TokenStream(self.model.tokenizer, continues=len(self.prompt_tokens) > len(self.model.prefix))
        self._stops = StopStrings(self.options.stop)
        self._end_if_full()

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_tokens + self.tokens

    @property
    def longest(self) -> int:
        """Tokens that prompt and output can come to."""
        most = len(self.prompt_tokens) + self.options.max_tokens
        return most if self.cache.endless else min(most, self.model.config.num_positions)

    @property
    def takes_best(self) -> bool:
        """Whether it needs no logits, only which is the largest."""
        return self.options.sampling.takes_best and not self.options.logprobs

    def advance(self, logits: np.ndarray | int) -> str:
        """Chooses the next token from its logits [V], or takes the one given; the text that may now be shown."""
        if isinstance(logits, np.ndarray):
            token = self._sampler.choose(logits, self.all_tokens)
            if self.options.logprobs:
                self.logprobs.append(top_logprobs(logits, token, self.options.logprobs))
        else:
            token = logits
        self.tokens.append(token)
        if token in self.model.eos_token_ids and not self.options.ignore_eos:
            self.finish_reason = "eos"
            return self._flush()
        shown = self._show(self._stops.push(self._stream.push(token)))
        if self._stops.stopped:
            self.finish_reason = "stop"
            return shown
        self._end_if_full()
        return shown + self._flush() if self.finish_reason else shown

    def _end_if_full(self) -> None:
        if len(self.tokens) >= self.options.max_tokens:
            self.finish_reason = "length"
        elif len(self.prompt_tokens) + len(self.tokens) >= self.longest:
            self.finish_reason = "context"

    def __iter__(self) -> Iterator[str]:
        """Runs alone, in a cache of its own."""
        if self.tokens:
            raise UsageError("this generation has already run: start a new one")
        for logits in self._steps():
            yield self.advance(logits)

    def run(self) -> "Generation":
        """Generates to the end."""
        for _ in self:
            pass
        return self

    def note_cache(self, cache: ContiguousCache | PagedCache) -> None:
        """Remembers what the cache holds now."""
        self.cache_tokens, self.cache_bytes, self.cache_token_bytes = cache.held, cache.used_bytes, cache.bytes_per_token

    def spend(self, seconds: float) -> None:
        """Adds the time of a step to the prefill or the decoding."""
        if self.tokens:
            self.decode_s += seconds
        else:
            self.prefill_s += seconds

    def fork(self, options: Options) -> "Generation":
        """A generation that has come as far as this one and goes on with other options."""
        child = copy.copy(self)
        child.options, child.tokens, child.logprobs = options, list(self.tokens), list(self.logprobs)
        child._sampler = Sampler(options.sampling)
        child._stream, child._stops = copy.copy(self._stream), copy.copy(self._stops)
        return child

    def interrupt(self) -> str:
        """Ends a generation that is not iterated any further; the text that was still held back."""
        if self.finish_reason is None:
            self.finish_reason = "interrupted"
        return self._flush()

    def to_dict(self) -> dict[str, Any]:
        """As `generate --json` prints it."""
        steps = max(0, len(self.tokens) - 1)
        out: dict[str, Any] = {
            "model": self.model.name,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "cache": {"kind": self.cache.kind, "bytes": self.cache_bytes, "tokens": self.cache_tokens},
            "numerics": self.model.numerics.contract,
            "kernels": self.model.kernels,
            "backend": self.model.backend.name,
            "timing": {
                "prefill_s": self.prefill_s,
                "decode_s": self.decode_s,
                "decode_ms_per_token": self.decode_s / steps * 1e3 if steps else None,
            },
        }
        if self.options.logprobs:
            out["logprobs"] = [
                {"token": p.token, "logprob": p.logprob, "top": [list(pair) for pair in p.top]} for p in self.logprobs
            ]
        return out

    def _flush(self) -> str:
        """What was held back: the bytes of a cut character, the beginning of a stop string that never came."""
        if self._stops.stopped:
            return ""
        return self._show(self._stops.push(self._stream.finish()) + self._stops.finish())

    def _show(self, text: str) -> str:
        self.text += text
        return text

    def _steps(self) -> Iterator[np.ndarray | int]:
        """The logits [V] for each next token, or the best one where that is all it takes, until the generation ends."""
        model = self.model
        cached = self.cache.kind != "none"
        cache = model.new_cache(self.longest, self.cache)
        feed = self.prompt_tokens
        while self.finish_reason is None:
            start = time.perf_counter()
            if not cached:
                feed = self.all_tokens
                cache = model.new_cache(len(feed), self.cache)
            found = model.prefill_best(feed, cache) if self.takes_best else to_numpy(model.prefill(feed, cache))
            self.spend(time.perf_counter() - start)
            if cached:
                self.note_cache(cache)
            yield found
            feed = self.tokens[-1:]


def top_logprobs(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """The `count` best of logits [V], equals by lower id, and the chosen token's own."""
    logprobs = log_softmax(logits)
    best = np.argsort(-logprobs, kind="stable")[:count]
    return TokenLogprobs(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))
