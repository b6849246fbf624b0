"""What a layer caches, and what a model's layers cache together.

Units are elements, not bytes: capacity.py turns them into bytes. A window of W means W tokens including the current one;
a chunk of C means that a layer attends inside blocks of C tokens, so that at most C are ever cached.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a layer keeps. The first four grow with tokens."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    CHUNKED = "chunked_attention"
    MLA = "mla"
    CROSS = "cross_attention"  # K and V of an encoder's tokens: fixed once they are there
    SHARED = "shared"  # reads the cache of an earlier layer
    LINEAR = "linear_attention"  # a fixed state a sequence
    MAMBA = "mamba"
    CONV = "conv"
    NONE = "none"  # no attention at all


GROWING = frozenset({Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.MLA})


@dataclass(frozen=True)
class State:
    """A tensor of fixed size that a layer keeps for each sequence: `heads` rows that tensor parallelism may split.

    `itemsize` None means the model's dtype.
    """

    heads: int
    per_head: int
    itemsize: int | None = None


@dataclass(frozen=True)
class Layer:
    """What one layer caches: for each token `kv_heads` keys of `head_dim_k` and values of `head_dim_v` elements.

    MLA caches one latent vector that serves as key and value: kv_heads 1, head_dim_k its width, head_dim_v 0.
    `index_bytes` is what a sparse-attention indexer keeps for each token beside them, in bytes.
    """

    kind: Kind
    kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    window: int | None = None
    index_bytes: int = 0
    state: tuple[State, ...] = ()

    def tokens(self, context: int) -> int:
        """How many of `context` tokens this layer holds."""
        if self.kind not in GROWING:
            return 0
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Geometry:
    """A model's caches. `dtype` is the file's, by its plain name; `cross_tokens` the encoder tokens of one request."""

    model_type: str
    layers: tuple[Layer, ...]
    num_heads: int
    max_positions: int | None
    dtype: str
    cross_tokens: int | None = None
    nested: bool = False
    notes: tuple[str, ...] = ()

    def groups(self) -> list[tuple[Layer, int]]:
        """Equal layers together, in the order in which each kind first appears, with their count."""
        return list(Counter(self.layers).items())
