"""The tile, which every cache yields and attention folds; which positions a query may see; the protocol of a cache.

A tile is TILE consecutive positions of the keys and values of one layer, aligned to absolute position 0, the last one
padded. It is one thing under three names: a whole number of a paged cache's blocks, the block that FlashAttention folds
into its running softmax, what a GPU loads into SRAM. Its shape is fixed, so that what is computed from it cannot depend
on how the work was split.

Symbols: L layers, n tiles, T = TILE tokens a tile, Hkv key-value heads, D head width, R rows (tokens being computed).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nanokv.backend import Array
from nanokv.errors import UsageError

if TYPE_CHECKING:
    from nanokv.kv.pages import Pages
    from nanokv.kv.storage import Storage

TILE = 128


@dataclass(frozen=True)
class Tiles:
    """Consecutive tiles of one layer of one sequence: k, v [n, T, Hkv, D].

    Slot t of tile i holds position (first + i) * T + t. A slot that holds nothing is finite (zero), never uninitialised:
    it is masked, and a masked key still meets a weight of zero, which only a finite value survives.
    """

    k: Array
    v: Array
    first: int = 0


@dataclass(frozen=True)
class Visibility:
    """Which key positions a query position may see: not later ones; of the earlier ones, the last `window` (including
    the query's own) and the first `sinks`. `window` None means all.

    A `streaming` cache (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453) counts positions inside the cache: a model with
    learned positions sees position min(i, sinks + window - 1) at token i, so a text has no end.

    `begin` and `end` leave no more than the keys begin .. end - 1 of all that: see split().
    """

    window: int | None = None
    sinks: int = 0
    streaming: bool = False
    begin: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UsageError(f"window {self.window} is out of range: it must be at least 1, the query's own key")
        if self.sinks < 0:
            raise UsageError(f"sinks {self.sinks} is out of range: it must be 0 or more")
        if self.window is None and (self.sinks or self.streaming):
            raise UsageError("sinks need a window: without one every key is kept anyway")

    def sees(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Broadcast positions -> bool."""
        seen = key <= query
        if self.window is not None:
            seen &= (query - key < self.window) | (key < self.sinks)
        if self.begin:
            seen &= key >= self.begin
        if self.end is not None:
            seen &= key < self.end
        return seen

    def split(self) -> tuple["Visibility", "Visibility"]:
        """The sinks alone, and what is seen beside them."""
        return replace(self, end=self.sinks), replace(self, begin=self.sinks)

    def oldest(self, length: int) -> int:
        """The first position after the sinks that the query at position `length`, or any later one, may see."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def position_ids(self, positions: np.ndarray) -> np.ndarray:
        """Absolute positions -> the positions that the model is told."""
        return np.minimum(positions, self.sinks + self.window - 1) if self.streaming and self.window else positions

    def held(self, length: int) -> int:
        """Tokens that a cache must keep once `length` have come."""
        return length - max(0, self.oldest(length) - self.sinks)


CAUSAL = Visibility()


class Cache(Protocol):
    """Keys and values of one sequence, all layers.

    A step is `extend(R)`, then for each layer `write` and `tiles`, then `commit`. Until `commit` the length is the old
    one: a step that fails half-way leaves the cache as it was.
    """

    @property
    def length(self) -> int:
        """Tokens that have come, dropped ones included: the position of the next."""
        ...

    def extend(self, count: int) -> np.ndarray:
        """Makes room for `count` more tokens and gives their positions [count]. CapacityError if there is none."""
        ...

    def position_ids(self, positions: np.ndarray) -> np.ndarray:
        """Absolute positions -> those that the model is told."""
        ...

    def visibility(self, layer: int) -> Visibility:
        """Which keys a query of this layer may see."""
        ...

    def write(self, layer: int, k: Array, v: Array) -> None:
        """k, v [R, Hkv, D] of the tokens of this step."""
        ...

    def tiles(self, layer: int, last: int) -> Sequence[Tiles]:
        """What queries in tile `last` fold, in order; tiles that none of them may see can be left out."""
        ...

    def pages(self, layer: int, last: int) -> "Pages":
        """The same, as where they lie: for the compiled kernels."""
        ...

    @property
    def storage(self) -> "Storage | None":
        """Where the keys and values of all layers lie, one after the other; None where that is not one memory, or where tokens
        have to be encoded by the tile."""
        ...

    @property
    def alike(self) -> Sequence[int]:
        """For each layer the first layer whose queries see the same positions."""
        ...

    def sources(self) -> np.ndarray | None:
        """Where the keys and values of each layer lie: lines [L, S, 7] as nanokv.kv.pages.sources_of gives them, the last for
        this step's tokens; None where they have to be encoded before the step's end."""
        ...

    def step_slots(self, layer: int) -> np.ndarray:
        """The slots [R] of this step's tokens there."""
        ...

    def written(self) -> None:
        """To be called once the keys and values of all layers were put into these slots, in place of write()."""
        ...

    def commit(self) -> None:
        """Ends the step: its tokens now count."""
        ...


class Batch:
    """Several caches as the rows of one step: `Batch([(cache_a, 3), (cache_b, 1)])` is 3 rows of a, then 1 of b.

    Layers other than attention see one matrix of rows; attention sees each sequence alone. No padding.
    """

    def __init__(self, members: Sequence[tuple[Cache, int]]):
        self._members = members
        self._home: Storage | None = None  # where kernels write the keys and values of all members at once
        self._slots: Array | slice = slice(0, 0)

    def extend(self, count: int) -> np.ndarray:
        expected = sum(rows for _, rows in self._members)
        if count != expected:
            raise UsageError(f"{count} tokens for a batch of {expected} rows")
        positions = np.concatenate([cache.extend(rows) for cache, rows in self._members])
        home = self._members[0][0].storage if len(self._members) > 1 else None
        shared = home is not None and home.appends and all(cache.storage is home for cache, _ in self._members)
        self._home = home if shared else None
        if self._home is not None:
            self._slots = self._home.slots(np.concatenate([cache.step_slots(0) for cache, _ in self._members]))
        return positions

    def write(self, layer: int, k: Array, v: Array) -> None:
        """k, v [R, Hkv, D] of all rows of this step."""
        if self._home is not None:
            self._home.write(layer, self._slots, k, v)
            return
        for cache, rows in self.members():
            cache.write(layer, k[rows], v[rows])

    def position_ids(self, positions: np.ndarray) -> np.ndarray:
        return np.concatenate([cache.position_ids(positions[rows]) for cache, rows in self.members()])

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
