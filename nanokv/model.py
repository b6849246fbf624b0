"""A loaded model: what `nanokv.load` gives."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nanokv.backend import NUMPY, Array, Backend, asking_for, to_numpy
from nanokv.errors import UsageError
from nanokv.generate import Generation, Options
from nanokv.kernels.choice import use_compiled
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedCache, PagedPool
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Batch, Cache, Visibility
from nanokv.models.convert import pool_kv_heads
from nanokv.models.families import Config, Params, module_for
from nanokv.numerics import COMPILED, EXACT, FAST, Numerics, compiled_kernels
from nanokv.sampling import SamplingParams
from nanokv.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanokv.models.decode_step import DecodeStep

SMALLER_KV = "or use a smaller KV format (--kv-dtype)"
PREFILL_STEP = 512  # tokens fed at once at most: bounds the memory of a prefill
LAST = slice(-1, None)


@dataclass(frozen=True)
class Model:
    """Weights, tokenizer, and where and how to compute. All state of a generation is in its cache. `prefix` are the ids that
    the model was trained to see before every text; `chat_template` turns a conversation into text (nanokv.chat)."""

    name: str
    params: Params
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int] = frozenset()
    backend: Backend = NUMPY
    numerics: Numerics = EXACT
    prefix: tuple[int, ...] = ()
    chat_template: str | None = None

    @property
    def config(self) -> Config:
        return self.params.config

    @property
    def dtype(self) -> np.dtype:
        return self.params.dtype

    def encode(self, text: str) -> list[int]:
        """Text -> token ids, the model's prefix before them. Names of control tokens in it are ordinary text."""
        return [*self.prefix, *self.tokenizer.encode(text)]

    def decode(self, tokens: Sequence[int], continues: bool = False) -> str:
        """Token ids -> text; bytes that are no UTF-8 become U+FFFD. `continues`: they follow others of the same text."""
        return self.tokenizer.decode(tokens, continues)

    def new_cache(self, capacity: int | None = None, spec: CacheSpec | None = None) -> ContiguousCache | PagedCache:
        """An empty cache for `capacity` tokens (the model's positions if not said), of the kind that `spec` describes.

        A paged one has a pool of its own, just large enough. Raises UsageError for a spec that cannot work here.
        """
        spec = spec or CacheSpec()
        capacity = self.config.num_positions if capacity is None else capacity
        if spec.kind == "paged":
            blocks = self.blocks_for(spec, capacity)
            return self.new_pool(blocks + 1, spec).new_sequence()
        with asking_for(f"a cache of {capacity} tokens", f"lower max-tokens, {SMALLER_KV}", self.backend.xp):
            return spec.contiguous(*self._kv_shape, capacity, self.dtype, self.kv_backend)

    def new_pool(self, num_blocks: int, spec: CacheSpec) -> PagedPool:
        """A pool of `num_blocks` blocks, the null block included."""
        what = f"a pool of {num_blocks} blocks of {spec.block_size} tokens"
        advice = f"use fewer blocks (fewer sequences or beams, lower max-tokens), {SMALLER_KV}"
        with asking_for(what, advice, self.backend.xp):
            return spec.pool(*self._kv_shape, num_blocks, self.dtype, self.kv_backend, self.name)

    @property
    def kv_backend(self) -> Backend:
        """Where caches keep keys and values: `backend`, through the card's kernels where those compute."""
        return replace(self.backend, kernels=self.numerics is COMPILED and self.backend.name == "cupy")

    @property
    def kernels(self) -> str:
        """What computes: "compiled", or the array library by name."""
        return str(COMPILED) if self.numerics is COMPILED else self.backend.name

    def blocks_for(self, spec: CacheSpec, tokens: int, step: int = PREFILL_STEP) -> int:
        """Blocks that one sequence of `tokens` tokens, fed at most `step` at once, can come to hold."""
        return spec.blocks_for(tokens, step, self.config.visibility())

    @property
    def _kv_shape(self) -> tuple[list[Visibility], int, int]:
        return self.config.visibility(), self.config.num_kv_heads, self.config.head_dim

    def forward(
        self, tokens: Sequence[int] | np.ndarray, cache: Cache | Batch, rows: slice | Sequence[int] = slice(None)
    ) -> Array:
        """Logits of the next token after each of `tokens` [R], which continue what `cache` holds -> [len(rows), V]."""
        with self._step(len(tokens)):
            step = self._decoded(tokens, cache)
            if step is None:
                return self._forward(tokens, cache, rows)
            logits = step.logits[: len(tokens)]
            logits = logits[rows].copy() if isinstance(rows, slice) else logits[self.backend.xp.asarray(np.asarray(rows))]
            cache.commit()
            return logits

    def best(
        self, tokens: Sequence[int] | np.ndarray, cache: Cache | Batch, rows: slice | Sequence[int] = slice(None)
    ) -> np.ndarray:
        """As forward(), but of each of `rows` the id with the largest logit alone, the lowest of equals: int [len(rows)] in
        host memory. It is chosen where the logits are, so that a card's kernels send nothing else back."""
        if not self.kv_backend.kernels:
            return to_numpy(self.forward(tokens, cache, rows)).argmax(axis=1)
        with self._step(len(tokens)):
            step = self._decoded(tokens, cache)
            if step is not None:
                chosen: np.ndarray = step.chosen.get()[: len(tokens)][rows]
                cache.commit()
                return chosen
            count = len(range(*rows.indices(len(tokens)))) if isinstance(rows, slice) else len(rows)
            there = self.backend.xp.empty((count,), dtype=np.int32)  # before the step, which then cannot fail half-way
            compiled_kernels(there).argmax(self._forward(tokens, cache, rows), there)
            return to_numpy(there)

    def _forward(self, tokens: Sequence[int] | np.ndarray, cache: Cache | Batch, rows: slice | Sequence[int]) -> Array:
        return module_for(self.params).forward(self.params, np.asarray(tokens), cache, rows=rows, numerics=self.numerics)

    def _decoded(self, tokens: Sequence[int] | np.ndarray, cache: Cache | Batch) -> "DecodeStep | None":
        """The card's fixed step that has computed these tokens, up to the commit, where there is one for them."""
        if not self.kv_backend.kernels:
            return None
        from nanokv.models.decode_step import Steps

        return self.params.beside(Steps).run(self.params, tokens, cache)

    def hidden_states(self, tokens: Sequence[int] | np.ndarray, cache: Cache | Batch) -> Array:
        """As forward(), without the head: the hidden states [R, E] of `tokens`."""
        with self._step(len(tokens)):
            return module_for(self.params).hidden_states(self.params, np.asarray(tokens), cache, numerics=self.numerics)

    def _step(self, count: int) -> AbstractContextManager[None]:
        advice = f"shorten the context or the batch, {SMALLER_KV} or smaller weights (--weights); the cache is as it was"
        return asking_for(f"a step of {count} tokens", advice, self.backend.xp)

    def prefill(self, tokens: Sequence[int], cache: ContiguousCache | PagedCache) -> Array:
        """Feeds `tokens` in steps that the cache has room for; the logits [V] after the last. What an error leaves in the
        cache are the steps before the one that failed."""
        return self.forward(self._feed(tokens, cache), cache, LAST)[0]

    def prefill_best(self, tokens: Sequence[int], cache: ContiguousCache | PagedCache) -> int:
        """As prefill(), but the id of the largest logit alone: see best()."""
        return int(self.best(self._feed(tokens, cache), cache, LAST)[0])

    def _feed(self, tokens: Sequence[int], cache: ContiguousCache | PagedCache) -> Sequence[int]:
        """Feeds all steps but the last; its tokens."""
        step = min(PREFILL_STEP, cache.max_step or PREFILL_STEP)
        last = max(0, len(tokens) - 1) // step * step
        for start in range(0, last, step):
            self.hidden_states(tokens[start : start + step], cache)
        return tokens[last:]

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Text or ids continued to the end. Options: those of Options, SamplingParams and CacheSpec (its kind as `cache`).

        >>> nanokv.load("default").generate("Hello, how", max_tokens=20).text        # doctest: +SKIP
        """
        return self.stream(prompt, **options).run()

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """As generate(), not yet run: iterate over it for pieces of text as they are made."""
        tokens = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        return Generation(self, tokens, *make_options(**options))

    def start(self, prompt: Sequence[int], options: Options, spec: CacheSpec) -> Generation:
        """A generation not yet run, from ids, and options that were made before."""
        return Generation(self, list(prompt), options, spec)

    def warm_up(self) -> "Model":
        """The model, its compiled kernels ready, so that the first token's time is not the compiler's."""
        if self.numerics is COMPILED:
            for count in (1, 16):  # attention has a kernel for few rows and one for many
                self.best([0] * min(count, self.config.num_positions), self.new_cache(count), LAST)
        return self

    def with_kv_heads(self, num_kv_heads: int) -> "Model":
        """The model with its key-value heads averaged in groups: see nanokv.models.convert."""
        return replace(self, params=pool_kv_heads(self.params, num_kv_heads))

    @property
    def weight_bytes(self) -> int:
        """Bytes that every decoded token reads: all matrices and vectors, the head, not the embedding tables."""
        return self.params.weight_bytes


def choose_numerics(name: str | None, backend: Backend, kernels: str = "auto", dtype: str = "float32") -> Numerics:
    """exact or fast by name; None is exact on NumPy, and on CuPy fast, whose products make no promise about rows: exact there
    is asked for. Exact is computed by compiled kernels where `kernels` says so, on CuPy always: see nanokv.kernels.choice."""
    if name not in (None, EXACT, FAST):
        raise UsageError(f"unknown numerics {name!r}: choose exact or fast")
    if name == FAST and kernels == "compiled":
        raise UsageError("the compiled kernels are exact: leave out --numerics fast, or use --kernels numpy")
    if backend.name == "cupy":
        if name == EXACT and not use_compiled("compiled" if kernels == "auto" else kernels, backend, dtype):
            raise UsageError("numerics exact on cupy takes the compiled kernels: leave out --kernels numpy, or use fast")
        return COMPILED if name == EXACT or kernels == "compiled" else FAST
    compiled = use_compiled(kernels, backend, dtype)
    if name == FAST:
        return FAST
    return COMPILED if compiled else EXACT


def make_options(**options: Any) -> tuple[Options, CacheSpec]:
    """Options and cache from flat keywords: those of Options, of SamplingParams, and of CacheSpec with `cache` as its kind.

    Raises UsageError for a keyword that is none of these.
    """
    spec = {name: options.pop(name) for name in CacheSpec.__dataclass_fields__ if name in options}
    if "cache" in options:
        spec["kind"] = options.pop("cache")
    sampling = {name: options.pop(name) for name in SamplingParams.__dataclass_fields__ if name in options}
    if sampling:
        options["sampling"] = SamplingParams(**sampling)
    if "stop" in options:
        stop = options["stop"]
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    unknown = sorted(options.keys() - Options.__dataclass_fields__.keys())
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r} of generate")
    return Options(**options), CacheSpec(**spec)
