"""The arrays behind a cache: a codec's planes, cut into units of consecutive tokens.

A unit is a whole tile in a contiguous cache and a block in a paged one. Slots count tokens: slot = unit * unit_size +
offset. Symbols: L layers, U units, S tokens a unit, n units of a run, H key-value heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanokv.backend import Array, Backend
from nanokv.errors import UsageError
from nanokv.kv.codec import Codec, Plane, codec_number
from nanokv.kv.tile import TILE
from nanokv.numerics import compiled_kernels


class Storage:
    """k and v: lists of planes, each [L, U, S / tokens an entry, *entry]. The first of each holds the codes.

    With a backend whose `kernels` are to read and write, the card's append kernels write float32 keys and values (`appends`),
    and a plane of a type that the array library lacks holds the same bits as unsigned numbers.
    """

    def __init__(
        self, num_layers: int, num_units: int, unit_size: int, num_kv_heads: int, head_dim: int, codec: Codec, backend: Backend
    ):
        self.codec, self.unit_size, self.head_dim, self._backend = codec, unit_size, head_dim, backend
        self.fixed = float(getattr(codec, "scale", None) or 1.0)  # what the kernels are told of a codec's one scale
        keys, values = codec.planes(num_kv_heads, head_dim)
        self.specs = [_held(spec, backend) for spec in keys], [_held(spec, backend) for spec in values]
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
        self._raw = any(plane.dtype != spec.dtype for plane, spec in zip(self.k, keys, strict=True))
        self._appended = codec_number(codec) if backend.kernels else None
        if self._appended is not None:  # every slot's number, on the card: consecutive ones are a view of it
            self._every = backend.table(np.arange(num_units * unit_size, dtype=np.int32))

    @property
    def planes(self) -> list[Array]:
        return [*self.k, *self.v]

    @property
    def appends(self) -> bool:
        """Whether kernels write, which find the place of each token by its slot."""
        return self._appended is not None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of K and V that one token takes over all layers, scales included."""
        return self.nbytes / (self.k[0].shape[1] * self.unit_size)

    def slots(self, slots: np.ndarray) -> Array | slice:
        """Slots [N] as write() takes them, for all layers of a step: on the card where its kernels write, sent only if they
        are not consecutive."""
        if self._appended is None:
            return slots
        if (np.diff(slots) == 1).all():
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return self._backend.table(slots.astype(np.int32))

    def write(self, layer: int, slots: Array | slice, k: Array, v: Array) -> None:
        """k, v [N, H, D] into `slots` (a slice, or [N] from slots()): whole groups in order where the codec has groups."""
        if self._appended is not None:
            there = self._every[slots] if isinstance(slots, slice) else slots
            k_planes, v_planes = ([plane[layer] for plane in planes] for planes in (self.k, self.v))
            compiled_kernels(k).append(k, v, there, self._appended, k_planes, v_planes, self.fixed)
            return
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
                flat[:, start // spec.tokens : -(-stop // spec.tokens)] = np.zeros((), plane.dtype)[()]

    def copy_unit(self, source: int, target: int) -> None:
        """Everything of one unit into another, all layers: codes and scales."""
        for plane in self.planes:
            if self._backend.kernels:
                compiled_kernels(plane).copy_unit(plane, source, target)
            else:
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
        """Planes of n' units -> k, v of n tiles. UsageError for bits that only the kernels can read."""
        if self._raw:
            raise UsageError(f"KV format {self.codec.name} on a card is read by its exact kernels only: use --numerics exact")

        def as_tiles(planes: list[Array], which: int) -> list[Array]:
            return [a.reshape(-1, TILE // s.tokens, *s.shape) for a, s in zip(planes, self.specs[which], strict=True)]

        k, v = as_tiles(k, 0), as_tiles(v, 1)
        return (k[0], v[0]) if self.codec.lossless else self.codec.decode(k, v, self.head_dim)


def _held(spec: Plane, backend: Backend) -> Plane:
    """The plane as the backend's memory can hold it: CuPy has no types but NumPy's own, so the bits of others lie there as
    unsigned numbers."""
    kind = np.dtype(spec.dtype)
    return replace(spec, dtype=np.dtype(f"u{kind.itemsize}")) if backend.kernels and kind.isbuiltin != 1 else spec


class OwnTile:
    """The tile that a sequence is filling, in full precision: k, v [L, tiles of this step * T, H, D] from tile `first` on.

    For codecs with `own_tile`. Between steps it is one tile; a step that fills several keeps them all until it commits.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: Any, backend: Backend):
        self.first = 0
        self._xp = backend.xp
        self.k, self.v = (backend.xp.zeros((num_layers, TILE, num_kv_heads, head_dim), dtype=dtype) for _ in range(2))
        self._following: tuple[Array, Array] | None = None  # memory of the tile that a step goes on to

    def extend(self, length: int, end: int) -> None:
        """Room for the tokens length .. end - 1; what lies past `length` is cleared. The memory of the tile that the step ends
        in is taken here too: settle() can find no lack of it."""
        tiles = (end - 1) // TILE - self.first + 1
        keep = length - self.first * TILE
        grown = tiles * TILE != self.k.shape[1]
        new = self._zeros(tiles) if grown else (self.k, self.v)
        following = self._zeros(1) if end // TILE != self.first else None
        for to, old in zip(new, (self.k, self.v), strict=True):
            if grown:
                to[:, :keep] = old[:, :keep]
            else:
                to[:, keep:] = 0
        (self.k, self.v), self._following = new, following

    def _zeros(self, tiles: int) -> tuple[Array, Array]:
        layers, _, *entry = self.k.shape
        k, v = (self._xp.zeros((layers, tiles * TILE, *entry), dtype=self.k.dtype) for _ in range(2))
        return k, v

    def write(self, layer: int, length: int, k: Array, v: Array) -> None:
        start = length - self.first * TILE
        self.k[layer, start : start + len(k)] = k
        self.v[layer, start : start + len(k)] = v

    def tile(self, layer: int, index: int) -> tuple[Array, Array]:
        """k, v [T, H, D] of one tile."""
        start = (index - self.first) * TILE
        return self.k[layer, start : start + TILE], self.v[layer, start : start + TILE]

    def filled(self, length: int, end: int) -> range:
        """The tiles that the tokens length .. end - 1 make full."""
        return range(length // TILE, end // TILE)

    def settle(self, length: int) -> None:
        """Keeps the tile that the next token goes to."""
        start = (length // TILE - self.first) * TILE
        if start and self._following:
            for new, old in zip(self._following, (self.k, self.v), strict=True):
                new[:, : length % TILE] = old[:, start : start + length % TILE]
            (self.k, self.v), self._following = self._following, None
            self.first = length // TILE

    def restart(self, length: int) -> None:
        """After truncation to `length`: what is left of this tile, or an empty one at a tile's edge."""
        if length % TILE == 0:
            self.first = length // TILE
            self.k[...] = 0
            self.v[...] = 0

    def holds(self, length: int) -> bool:
        """Whether a truncation to `length` finds its last tokens in full precision, or needs none."""
        return length % TILE == 0 or length // TILE == self.first

    def copy(self) -> "OwnTile":
        other = object.__new__(OwnTile)
        other.__dict__.update(self.__dict__)
        other.k, other.v, other._following = self.k.copy(), self.v.copy(), None
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
