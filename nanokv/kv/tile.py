"""The tile, which every cache yields and attention folds; which positions a query may see; the protocol of a cache.

A tile is TILE consecutive positions of the keys and values of one layer, aligned to absolute position 0, the last one
padded. It is one thing under three names: a whole number of a paged cache's blocks, the block that FlashAttention folds
into its running softmax, what a GPU loads into SRAM. Its shape is fixed, so that what is computed from it cannot depend
on how the work was split.

Symbols: L layers, n tiles, T = TILE tokens a tile, Hkv key-value heads, D head width, R rows (tokens being computed).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nanokv.backend import Array
from nanokv.errors import UsageError

TILE = 128


@dataclass(frozen=True)
class Tiles:
    """Keys and values of one layer of one sequence: k, v [n, T, Hkv, D].

    Slot t of tile i holds position (first + i) * T + t. A slot that holds nothing is finite (zero), never uninitialised:
    it is masked, and a masked key still meets a weight of zero, which only a finite value survives.
    """

    k: Array
    v: Array
    first: int = 0

    def positions(self) -> np.ndarray:
        """[n, T] int64: the absolute position of every slot."""
        return np.arange(self.first * TILE, (self.first + len(self.k)) * TILE).reshape(-1, TILE)


@dataclass(frozen=True)
class Visibility:
    """Which key positions a query position may see: not later ones; of the earlier ones, the last `window` (including
    the query's own) and the first `sinks`. `window` None means all."""

    window: int | None = None
    sinks: int = 0

    def sees(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Broadcast positions -> bool."""
        seen = key <= query
        if self.window is not None:
            seen &= (query - key < self.window) | (key < self.sinks)
        return seen


CAUSAL = Visibility()


class Cache(Protocol):
    """Keys and values of one sequence, all layers.

    A step is `extend(R)`, then for each layer `write` and `tiles`, then `commit`. Until `commit` the length is the old
    one: a step that fails half-way leaves the cache as it was.
    """

    @property
    def length(self) -> int:
        """Tokens that the cache holds."""
        ...

    def extend(self, count: int) -> np.ndarray:
        """Makes room for `count` more tokens and gives their positions [count]. CapacityError if there is none."""
        ...

    def write(self, layer: int, k: Array, v: Array) -> None:
        """k, v [R, Hkv, D] of the tokens of this step."""
        ...

    def tiles(self, layer: int) -> Tiles:
        """All tokens including those of this step."""
        ...

    def commit(self) -> None:
        """Ends the step: its tokens now count."""
        ...


class Batch:
    """Several caches as the rows of one step: `Batch([(cache_a, 3), (cache_b, 1)])` is 3 rows of a, then 1 of b.

    Layers other than attention see one matrix of rows; attention sees each sequence alone. No padding.
    """

    def __init__(self, members: list[tuple[Cache, int]]):
        self._members = members

    def extend(self, count: int) -> np.ndarray:
        expected = sum(rows for _, rows in self._members)
        if count != expected:
            raise UsageError(f"{count} tokens for a batch of {expected} rows")
        return np.concatenate([cache.extend(rows) for cache, rows in self._members])

    def members(self) -> Iterator[tuple[Cache, slice]]:
        start = 0
        for cache, rows in self._members:
            yield cache, slice(start, start + rows)
            start += rows

    def commit(self) -> None:
        for cache, _ in self._members:
            cache.commit()


def members_of(cache: "Cache | Batch", rows: int) -> Iterator[tuple[Cache, slice]]:
    """The sequences of a step with the rows that belong to each."""
    if isinstance(cache, Batch):
        yield from cache.members()
    else:
        yield cache, slice(0, rows)
