"""A loaded model: what `nanokv.load` gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanokv.backend import NUMPY, Array, Backend
from nanokv.errors import UsageError
from nanokv.generate import Generation, Options
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.tile import Batch, Cache
from nanokv.models import gpt2
from nanokv.models.config import GPT2Config
from nanokv.numerics import EXACT, FAST, Numerics
from nanokv.sampling import SamplingParams
from nanokv.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """Weights, tokenizer, and where and how to compute. All state of a generation is in its cache."""

    name: str
    params: gpt2.GPT2Params
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int] = frozenset()
    backend: Backend = NUMPY
    numerics: Numerics = EXACT

    @property
    def config(self) -> GPT2Config:
        return self.params.config

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.params.wte.dtype)

    def encode(self, text: str) -> list[int]:
        """Text -> token ids. Names of control tokens in it are ordinary text."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Token ids -> text; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(tokens)

    def new_cache(self, capacity: int | None = None) -> ContiguousCache:
        """An empty cache for `capacity` tokens (the model's positions if not said)."""
        config = self.config
        capacity = config.num_positions if capacity is None else capacity
        return ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, capacity, self.dtype, self.backend)

    def forward(self, tokens: Sequence[int] | np.ndarray, cache: Cache | Batch, rows: slice = slice(None)) -> Array:
        """Logits of the next token after each of `tokens` [R], which continue what `cache` holds -> [len(rows), V]."""
        return gpt2.forward(self.params, np.asarray(tokens), cache, rows=rows, numerics=self.numerics)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Text or ids continued to the end. Options: those of nanokv.generate.Options and of SamplingParams.

        >>> nanokv.load("default").generate("Hello, how", max_tokens=20).text        # doctest: +SKIP
        """
        return self.stream(prompt, **options).run()

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """As generate(), not yet run: iterate over it for pieces of text as they are made."""
        tokens = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        return Generation(self, tokens, make_options(**options))

    @property
    def weight_bytes(self) -> int:
        """Bytes that every decoded token reads: all matrices and vectors, the head, not the embedding tables."""
        blocks = sum(array.nbytes for block in self.params.blocks for array in vars(block).values())
        return blocks + self.params.ln_f_weight.nbytes + self.params.ln_f_bias.nbytes + self.params.head.nbytes


def choose_numerics(name: str | None, backend: Backend) -> Numerics:
    """exact or fast by name; None is exact on NumPy and fast on CuPy, whose products make no promise about rows."""
    if name not in (None, EXACT, FAST):
        raise UsageError(f"unknown numerics {name!r}: choose exact or fast")
    if backend.name == "cupy":
        if name == EXACT:
            raise UsageError("numerics exact is not available on cupy, whose products depend on the batch: use fast, or numpy")
        return FAST
    return EXACT if name is None else Numerics(name)


def make_options(**options: Any) -> Options:
    """Options from flat keywords: SamplingParams' among them are gathered."""
    sampling = {name: options.pop(name) for name in SamplingParams.__dataclass_fields__ if name in options}
    if sampling:
        options["sampling"] = SamplingParams(**sampling)
    if "stop" in options:
        stop = options["stop"]
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return Options(**options)
