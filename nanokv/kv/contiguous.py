"""Keys and values in one piece of memory a layer, filled from the left: the cache that every tutorial draws.

With a window it rolls: a layer's memory is a ring of tiles, large enough for the window and one step, beside the tiles
that hold the sinks; tokens that no later query can see are cleared. Symbols as in kv/tile.py; `capacity` is in tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nanokv.backend import NUMPY, Array, Backend, asking_for
from nanokv.errors import CapacityError, UsageError
from nanokv.kv.codec import Codec, get_codec
from nanokv.kv.pages import Pages, sources_of, with_own_tile
from nanokv.kv.storage import OwnTile, Storage, runs
from nanokv.kv.tile import CAUSAL, TILE, Tiles, Visibility


class ContiguousCache:
    """One sequence. `capacity` None, no end, needs a window on every layer.

    Memory is taken at once but written only as tokens arrive: a tile is cleared when its first token comes, so nothing
    uninitialised ever reaches attention. `visibility` is one for all layers, or one for each.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int | None,
        dtype: Any = np.float32,
        backend: Backend = NUMPY,
        codec: Codec | None = None,
        visibility: Visibility | Sequence[Visibility] = CAUSAL,
    ):
        if capacity is not None and capacity < 1:
            raise UsageError(f"cache capacity must be at least 1 token, not {capacity}")
        self.capacity = capacity
        self.codec = codec or get_codec(None, dtype, backend)
        self._visibility = per_layer(visibility, num_layers)
        self.alike = first_alike(self._visibility)
        groups = sorted(set(self.alike))  # one ring for the layers that see alike
        self._rings = [
            _Ring(self.alike.count(first), num_kv_heads, head_dim, capacity, self.codec, backend, self._visibility[first])
            for first in groups
        ]
        self._places = [  # of each layer: its ring, and which of that ring's layers it is
            (groups.index(first), self.alike[:layer].count(first)) for layer, first in enumerate(self.alike)
        ]
        self._own = OwnTile(num_layers, num_kv_heads, head_dim, dtype, backend) if self.codec.own_tile else None
        self._sources: np.ndarray | None = None  # once asked for
        self._xp = backend.xp
        self._length = 0  # tokens that count
        self._end = 0  # tokens written, those of an unfinished step included

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_step(self) -> int | None:
        """Tokens that one step may bring; None where only the capacity limits it."""
        return min((ring.max_step for ring in self._rings if ring.max_step is not None), default=None)

    @property
    def held(self) -> int:
        """Tokens whose keys and values are kept, in the layer that keeps the most."""
        return max(visibility.held(self._length) for visibility in self._visibility)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of K and V that one token takes over all layers, scales included."""
        return sum(ring.storage.bytes_per_token for ring in self._rings)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens that are kept; one token's share of a group's scales is a fraction."""
        used = sum(ring.storage.bytes_per_token * ring.visibility.held(self._length) for ring in self._rings)
        return round(used) + (self._own.k.nbytes + self._own.v.nbytes if self._own else 0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, filled or not."""
        own = self._own.k.nbytes + self._own.v.nbytes if self._own else 0
        return sum(ring.storage.nbytes for ring in self._rings) + own

    @property
    def planes(self) -> list[Array]:
        """Every array of the cache's memory."""
        return [plane for ring in self._rings for plane in ring.storage.planes]

    def _ring(self, layer: int) -> "tuple[_Ring, int]":
        """A layer's ring, and which of its layers that is."""
        ring, one = self._places[layer]
        return self._rings[ring], one

    def visibility(self, layer: int) -> Visibility:
        return self._visibility[layer]

    def position_ids(self, positions: np.ndarray) -> np.ndarray:
        return self._visibility[0].position_ids(positions)

    def extend(self, count: int) -> np.ndarray:
        if count < 1:
            raise UsageError(f"a step needs at least 1 token, not {count}")
        if self.capacity is not None and self._length + count > self.capacity:
            raise CapacityError(
                f"the cache holds {self._length} of {self.capacity} tokens, no room for {count} more: use a larger capacity"
            )
        if self.max_step is not None and count > self.max_step:
            raise CapacityError(f"a step of {count} tokens is too long for this cache's window: {self.max_step} at most")
        for ring in self._rings:
            ring.clear(self._length, self._end)  # what a step that never finished left behind
            ring.open(self._length + count)
        self._end = self._length + count
        if self._own:
            self._own.extend(self._length, self._end)
        return np.arange(self._length, self._end)

    def write(self, layer: int, k: Array, v: Array) -> None:
        if self._own is None:
            ring, one = self._ring(layer)
            ring.write(one, self._length, k, v)
            return
        self._own.write(layer, self._length, k, v)
        self._encode(layer, self._own)

    def _encode(self, layer: int, own: OwnTile) -> None:
        """The tiles that this step has made full."""
        ring, one = self._ring(layer)
        for tile in own.filled(self._length, self._end):
            ring.write(one, tile * TILE, *own.tile(layer, tile))

    def tiles(self, layer: int, last: int) -> list[Tiles]:
        encoded = last - 1 if self._own else last
        ring, one = self._ring(layer)
        found = ring.tiles(one, max(self._length, last * TILE), encoded)
        if self._own:
            k, v = self._own.tile(layer, last)
            found.append(Tiles(k[None], v[None], last))
        return found

    def pages(self, layer: int, last: int) -> Pages:
        """What tiles() gives, where it lies."""
        ring, one = self._ring(layer)
        numbers, places = ring.wanted(max(self._length, last * TILE), last - 1 if self._own else last)
        units = np.array(places, dtype=np.int64)[:, None]
        own = self._own.tile(layer, last) if self._own else None
        return Pages(ring.storage, one, np.array(numbers, dtype=np.int64), units, last, own)

    @property
    def storage(self) -> Storage | None:
        return self._rings[0].storage if len(self._rings) == 1 and self._own is None else None

    def sources(self) -> np.ndarray | None:
        if self._sources is None:
            found = [sources_of(ring.storage) for ring in self._rings]
            self._sources = np.array([[found[ring][one]] for ring, one in self._places])
        return with_own_tile(self._sources, self._own, self._length, self._end)

    def step_slots(self, layer: int) -> np.ndarray:
        if self._own:
            return np.arange(self._length, self._end) % TILE
        return self._ring(layer)[0].slots(self._length, self._end)

    def written(self) -> None:
        if self._own and self._own.filled(self._length, self._end):
            for layer in range(len(self._places)):
                self._encode(layer, self._own)

    def commit(self) -> None:
        for ring in self._rings:
            ring.drop(self._length, self._end)
        self._length = self._end
        if self._own:
            self._own.settle(self._length)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens. More than there are is an error, and so is a length whose query would see
        tokens that are no longer kept as they were: dropped by a window, or encoded by a codec that keeps tiles."""
        check_truncation(length, self._length, self._visibility, self._own)
        for ring in self._rings:
            ring.clear(length, self._end)
        self._length = self._end = length
        if self._own:
            self._own.restart(length)

    def reset(self) -> None:
        """Empties the cache: the next token goes to position 0."""
        for ring in self._rings:
            ring.opened = 0
        self._length = self._end = 0
        if self._own:
            self._own.restart(0)

    def __getstate__(self) -> dict[str, Any]:
        """A copy's memory lies elsewhere."""
        return {**self.__dict__, "_sources": None}

    def copy(self) -> "ContiguousCache":
        """An independent cache with the same tokens and capacity."""
        other = object.__new__(ContiguousCache)
        other.__dict__.update(self.__getstate__())
        with asking_for("a copy of a cache", "keep fewer caches", self._xp):
            other._rings = [ring.copy() for ring in self._rings]
            other._own = self._own.copy() if self._own else None
        return other


def per_layer(visibility: Visibility | Sequence[Visibility], num_layers: int) -> list[Visibility]:
    """One visibility a layer. Raises UsageError for another number of them, or for layers that disagree on positions."""
    if isinstance(visibility, Visibility):
        return [visibility] * num_layers
    if len(visibility) != num_layers:
        raise UsageError(f"{len(visibility)} visibilities for {num_layers} layers")
    if any(each.streaming for each in visibility) and len(set(visibility)) > 1:
        raise UsageError("a streaming cache counts positions inside itself: every layer needs the same window and sinks")
    return list(visibility)


def first_alike(visibility: Sequence[Visibility]) -> list[int]:
    """For each layer the first one with the same visibility."""
    return [visibility.index(each) for each in visibility]


def check_truncation(length: int, present: int, visibility: Sequence[Visibility], own: OwnTile | None) -> None:
    """Raises UsageError when a cache of `present` tokens cannot become one of `length`."""
    if not 0 <= length <= present:
        raise UsageError(f"cannot truncate a cache of {present} tokens to {length}")
    if any(each.held(present) < present and each.oldest(length) < each.oldest(present) for each in visibility):
        raise UsageError(f"cannot truncate to {length}: the window has dropped tokens that its query would see")
    if own is not None and not own.holds(length):
        raise UsageError(f"cannot truncate to {length}: its tile is encoded; a multiple of {TILE} is possible")


class _Ring:
    """The memory of layers that see alike. Tile i lives at place i, or, past the sinks' tiles, at a place of the ring behind
    them."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int | None,
        codec: Codec,
        backend: Backend,
        visibility: Visibility,
    ):
        self.visibility = visibility
        total = None if capacity is None else -(-capacity // TILE)
        self.max_step: int | None = None
        self._pinned, self._turn = 0, total
        if visibility.window is not None:
            pinned = -(-visibility.sinks // TILE)
            turn = (visibility.window + TILE - 3) // TILE + 2  # tiles that window - 1 + TILE tokens can touch
            if total is None or pinned + turn < total:
                self._pinned, self._turn, self.max_step = pinned, turn, TILE
        if self._turn is None:
            raise UsageError("a cache without a capacity needs a window on every layer")
        self.storage = Storage(num_layers, self._pinned + self._turn, TILE, num_kv_heads, head_dim, codec, backend)
        self.opened = 0  # tiles that were cleared for use

    def place(self, tile: int) -> int:
        assert self._turn is not None
        return tile if tile < self._pinned else self._pinned + (tile - self._pinned) % self._turn

    def open(self, end: int) -> None:
        """Clears the tiles that tokens before `end` are the first to enter."""
        for tile in range(self.opened, -(-end // TILE)):
            self.storage.clear(self.place(tile) * TILE, (self.place(tile) + 1) * TILE)
        self.opened = max(self.opened, -(-end // TILE))

    def clear(self, start: int, stop: int) -> None:
        """Zeroes the positions start .. stop - 1."""
        for begin, end, slot in self._parts(start, stop):
            self.storage.clear(slot, slot + end - begin)

    def write(self, layer: int, start: int, k: Array, v: Array) -> None:
        for begin, end, slot in self._parts(start, start + len(k)):
            part = slice(begin - start, end - start)
            self.storage.write(layer, slice(slot, slot + end - begin), k[part], v[part])

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Of the positions start .. stop - 1."""
        return np.concatenate([np.arange(slot, slot + end - begin) for begin, end, slot in self._parts(start, stop)])

    def _parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Positions start .. stop - 1 in pieces that are consecutive in memory: (first, past the last, slot)."""
        if start >= stop:
            return []
        if start // TILE == (stop - 1) // TILE:
            return [(start, stop, self.place(start // TILE) * TILE + start % TILE)]
        tiles = range(start // TILE, (stop - 1) // TILE + 1)
        parts = []
        for first, place, count in runs(tiles, [self.place(tile) for tile in tiles]):
            begin, end = max(start, first * TILE), min(stop, (first + count) * TILE)
            parts.append((begin, end, place * TILE + begin - first * TILE))
        return parts

    def tiles(self, layer: int, query: int, last: int) -> list[Tiles]:
        """The tiles up to `last` that a query at position `query` or later may see."""
        wanted, places = self.wanted(query, last)
        return [Tiles(*self.storage.run(layer, place, count), first) for first, place, count in runs(wanted, places)]

    def wanted(self, query: int, last: int) -> tuple[list[int], list[int]]:
        """Their numbers and places."""
        first = self.visibility.oldest(query) // TILE
        sinks = range(min(first, -(-self.visibility.sinks // TILE)))
        wanted = [*sinks, *range(first, last + 1)]
        return wanted, [self.place(tile) for tile in wanted]

    def drop(self, old: int, new: int) -> None:
        """Clears what queries from position `new` on cannot see, whole groups of the codec's only."""
        if self.visibility.window is None:
            return
        group = max(spec.tokens for specs in self.storage.specs for spec in specs)
        begin = max(self.visibility.oldest(old) // group * group, -(-self.visibility.sinks // group) * group)
        self.clear(begin, self.visibility.oldest(new) // group * group)

    def copy(self) -> "_Ring":
        other = object.__new__(_Ring)
        other.__dict__.update(self.__dict__)
        other.storage = self.storage.copy()
        return other
