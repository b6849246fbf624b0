"""The arrays behind a cache: a codec's planes, cut into units of consecutive tokens.

A unit is a whole tile in a contiguous cache and a block in a paged one. Slots count tokens: slot = unit * unit_size +
offset. Symbols: L layers, U units, S tokens a unit, n units of a run, H key-value heads, D head width.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nanokv.backend import Array, Backend
from nanokv.errors import UsageError
from nanokv.kv.codec import Codec
from nanokv.kv.tile import TILE


class Storage:
    """k and v: lists of planes, each [L, U, S / tokens an entry, *entry]. The first of each holds the codes."""

    def __init__(
        self, num_layers: int, num_units: int, unit_size: int, num_kv_heads: int, head_dim: int, codec: Codec, backend: Backend
    ):
        self.codec, self.unit_size, self.head_dim, self._backend = codec, unit_size, head_dim, backend
        self.specs = codec.planes(num_kv_heads, head_dim)
        for plane in (plane for planes in self.specs for plane in planes):
            if unit_size % plane.tokens:
                raise UsageError(
                    f"KV format {codec.name} works on groups of {plane.tokens} tokens: "
                    f"block size {unit_size} is no multiple of {plane.tokens}"
                )
        self.k, self.v = (
            [backend.xp.empty((num_layers, num_units, unit_size // p.tokens, *p.shape), dtype=p.dtype) for p in planes]
            for planes in self.specs
        )

    @property
    def planes(self) -> list[Array]:
        return [*self.k, *self.v]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of K and V that one token takes over all layers, scales included."""
        return self.nbytes / (self.k[0].shape[1] * self.unit_size)

    def write(self, layer: int, slots: np.ndarray | slice, k: Array, v: Array) -> None:
        """k, v [N, H, D] into `slots` (host, [N]): whole groups in order where the codec has groups."""
        for planes, specs, entries in zip((self.k, self.v), self.specs, self.codec.encode(k, v), strict=True):
            for plane, spec, entry in zip(planes, specs, entries, strict=True):
                flat = plane[layer].reshape(-1, *spec.shape)
                if isinstance(slots, slice):
                    flat[slots.start // spec.tokens : slots.stop // spec.tokens] = entry
                else:
                    flat[self._backend.from_numpy(slots[:: spec.tokens] // spec.tokens)] = entry

    def clear(self, start: int, stop: int) -> None:
        """Zeroes the slots start .. stop - 1 of every layer; of a group that they touch, all of it."""
        if start >= stop:
            return
        for planes, specs in zip((self.k, self.v), self.specs, strict=True):
            for plane, spec in zip(planes, specs, strict=True):
                flat = plane.reshape(plane.shape[0], -1, *spec.shape)
                flat[:, start // spec.tokens : -(-stop // spec.tokens)] = np.zeros((), spec.dtype)[()]

    def copy_unit(self, source: int, target: int) -> None:
        """Everything of one unit into another, all layers: codes and scales."""
        for plane in self.planes:
            plane[:, target] = plane[:, source]

    def copy(self) -> "Storage":
        """An independent storage with the same content."""
        other = object.__new__(Storage)
        other.__dict__.update(self.__dict__)
        other.k, other.v = [plane.copy() for plane in self.k], [plane.copy() for plane in self.v]
        return other

    def run(self, layer: int, first: int, count: int) -> tuple[Array, Array]:
        """`count` consecutive units that make whole tiles, from unit `first` -> k, v [n, T, H, D]; a view if lossless."""
        return self._tiles(*([plane[layer, first : first + count] for plane in planes] for planes in (self.k, self.v)))

    def gather(self, layer: int, units: Sequence[int]) -> tuple[Array, Array]:
        """Any units that make whole tiles, in this order -> k, v [n, T, H, D]: a copy."""
        index = self._backend.from_numpy(np.asarray(units, dtype=np.int64))
        xp = self._backend.xp
        return self._tiles(*([xp.take(plane[layer], index, axis=0) for plane in planes] for planes in (self.k, self.v)))

    def _tiles(self, k: list[Array], v: list[Array]) -> tuple[Array, Array]:
        """Planes of n' units -> k, v of n tiles."""

        def as_tiles(planes: list[Array], which: int) -> list[Array]:
            return [a.reshape(-1, TILE // s.tokens, *s.shape) for a, s in zip(planes, self.specs[which], strict=True)]

        k, v = as_tiles(k, 0), as_tiles(v, 1)
        return (k[0], v[0]) if self.codec.lossless else self.codec.decode(k, v, self.head_dim)


class OwnTile:
    """The tile that a sequence is filling, in full precision: k, v [L, tiles of this step * T, H, D] from tile `first` on.

    For codecs with `own_tile`. Between steps it is one tile; a step that fills several keeps them all until it commits.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: Any, backend: Backend):
        self.first = 0
        self._xp = backend.xp
        self.k, self.v = (backend.xp.zeros((num_layers, TILE, num_kv_heads, head_dim), dtype=dtype) for _ in range(2))

    def extend(self, length: int, end: int) -> None:
        """Room for the tokens length .. end - 1; what lies past `length` is cleared."""
        tiles = (end - 1) // TILE - self.first + 1
        keep = length - self.first * TILE
        for name in ("k", "v"):
            old = getattr(self, name)
            if tiles * TILE > old.shape[1]:
                new = self._xp.zeros((old.shape[0], tiles * TILE, *old.shape[2:]), dtype=old.dtype)
                new[:, :keep] = old[:, :keep]
                setattr(self, name, new)
            else:
                old[:, keep:] = 0

    def write(self, layer: int, length: int, k: Array, v: Array) -> None:
        start = length - self.first * TILE
        self.k[layer, start : start + len(k)] = k
        self.v[layer, start : start + len(k)] = v

    def tile(self, layer: int, index: int) -> tuple[Array, Array]:
        """k, v [T, H, D] of one tile."""
        start = (index - self.first) * TILE
        return self.k[layer, start : start + TILE], self.v[layer, start : start + TILE]

    def settle(self, length: int) -> None:
        """Keeps the tile that the next token goes to."""
        start = (length // TILE - self.first) * TILE
        if start:
            for name in ("k", "v"):
                old = getattr(self, name)
                new = self._xp.zeros((old.shape[0], TILE, *old.shape[2:]), dtype=old.dtype)
                new[:, : length % TILE] = old[:, start : start + length % TILE]
                setattr(self, name, new)
            self.first = length // TILE

    def restart(self, length: int) -> None:
        """After truncation to `length`: what is left of this tile, or an empty one at a tile's edge."""
        if length % TILE == 0:
            self.first = length // TILE
            self.k, self.v = (self._xp.zeros((a.shape[0], TILE, *a.shape[2:]), dtype=a.dtype) for a in (self.k, self.v))

    def holds(self, length: int) -> bool:
        """Whether a truncation to `length` finds its last tokens in full precision, or needs none."""
        return length % TILE == 0 or length // TILE == self.first

    def copy(self) -> "OwnTile":
        other = object.__new__(OwnTile)
        other.__dict__.update(self.__dict__)
        other.k, other.v = self.k.copy(), self.v.copy()
        return other


def runs(tiles: Sequence[int], places: Sequence[int], step: int = 1) -> list[tuple[int, int, int]]:
    """Tiles that are neighbours both in the sequence and in memory: [(first tile, first place, tiles)].

    `places[i]` is where tile `tiles[i]` begins, in units; the next tile's memory follows `step` units on.
    """
    found: list[tuple[int, int, int]] = []
    for tile, place in zip(tiles, places, strict=True):
        if found:
            first, start, count = found[-1]
            if tile == first + count and place == start + count * step:
                found[-1] = first, start, count + 1
                continue
        found.append((tile, place, 1))
    return found
