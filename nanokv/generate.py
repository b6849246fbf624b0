"""One prompt: prefill, then decode a token at a time. Start reading here.

    cache = model.new_cache(capacity)
    logits = model.forward(prompt, cache)         # prefill: every prompt token at once
    while True:
        token = sampler.choose(logits, ...)       # greedy, or a draw
        logits = model.forward([token], cache)    # decode: one token; the cache holds the rest

Without a cache the last line becomes `model.forward(prompt + output, empty cache)`: the same logits, bit for bit, for a
cost that grows with the square of the length.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nanokv.backend import to_numpy
from nanokv.errors import CapacityError, UsageError
from nanokv.sampling import Sampler, SamplingParams, StopStrings, log_softmax
from nanokv.tokenizer import TokenStream

if TYPE_CHECKING:
    from nanokv.model import Model

CACHES = ("contiguous", "none")


@dataclass(frozen=True)
class Options:
    """What to generate besides the prompt. `stop` strings end the text and do not appear in it; `logprobs` K keeps the K
    best tokens of every step. Raises UsageError for a value out of its range."""

    max_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache: str = "contiguous"
    logprobs: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max-tokens {self.max_tokens} is out of range: it must be at least 1")
        if self.cache not in CACHES:
            raise UsageError(f"unknown cache {self.cache!r}: choose one of {', '.join(CACHES)}")
        if self.logprobs < 0:
            raise UsageError(f"logprobs {self.logprobs} is out of range: it must be 0 or more")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of one step, before penalty, temperature and filters: of the chosen token, and of the
    best ones in falling order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Generation:
    """One prompt's generation: iterate over it for pieces of text as they are made; the fields grow with it.

    `finish_reason` is None while it runs, then one of: "eos" (the model ended the text), "stop" (a stop string), "length"
    (max_tokens), "context" (the model has no position for another token), "interrupted" (the caller gave up).
    Times are in seconds; `decode_s` covers every token after the first.
    """

    model: "Model"
    prompt_tokens: list[int]
    options: Options
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cache_bytes: int = 0
    cache_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __post_init__(self) -> None:
        positions = self.model.config.num_positions
        if not self.prompt_tokens:
            raise UsageError("the prompt is empty: give at least one character")
        if len(self.prompt_tokens) > positions:
            raise CapacityError(f"the prompt has {len(self.prompt_tokens)} tokens, more than the model's {positions} positions")
        self._stream = TokenStream(self.model.tokenizer)
        self._stops = StopStrings(self.options.stop)

    def __iter__(self) -> Iterator[str]:
        if self.tokens or self.finish_reason:
            raise UsageError("this generation has already run: start a new one")
        sampler, stops = Sampler(self.options.sampling), self._stops
        for logits in self._steps():
            token = sampler.choose(logits, self.prompt_tokens + self.tokens)
            self.tokens.append(token)
            if self.options.logprobs:
                self.logprobs.append(top_logprobs(logits, token, self.options.logprobs))
            if token in self.model.eos_token_ids and not self.options.ignore_eos:
                self.finish_reason = "eos"
            else:
                yield self._show(stops.push(self._stream.push(token)))
                if stops.stopped:
                    self.finish_reason = "stop"
            if self.finish_reason:
                break
        yield self._flush()
        if self.finish_reason is None:
            self.finish_reason = "length" if len(self.tokens) == self.options.max_tokens else "context"

    def run(self) -> "Generation":
        """Generates to the end."""
        for _ in self:
            pass
        return self

    def interrupt(self) -> str:
        """Ends a generation that is not iterated any further; the text that was still held back."""
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
            "cache": {"kind": self.options.cache, "bytes": self.cache_bytes, "tokens": self.cache_tokens},
            "numerics": str(self.model.numerics),
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

    def _steps(self) -> Iterator[np.ndarray]:
        """The logits [V] for each next token, as long as the model has a position for it."""
        model, total = self.model, len(self.prompt_tokens) + self.options.max_tokens
        capacity = min(total, model.config.num_positions)
        count = capacity - len(self.prompt_tokens)  # tokens that can be made
        cached = self.options.cache != "none"
        cache = model.new_cache(capacity)
        feed: Sequence[int] = self.prompt_tokens
        for step in range(count):
            start = time.perf_counter()
            if not cached:
                feed = self.prompt_tokens + self.tokens
                cache = model.new_cache(len(feed))
            logits = to_numpy(model.forward(feed, cache, rows=slice(-1, None)))[0]
            elapsed = time.perf_counter() - start
            if step == 0:
                self.prefill_s = elapsed
            else:
                self.decode_s += elapsed
            if cached:
                self.cache_tokens, self.cache_bytes = cache.held, cache.used_bytes
            yield logits
            feed = self.tokens[-1:]


def top_logprobs(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """The `count` best of logits [V], equals by lower id, and the chosen token's own."""
    logprobs = log_softmax(logits)
    best = np.argsort(-logprobs, kind="stable")[:count]
    return TokenLogprobs(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))
