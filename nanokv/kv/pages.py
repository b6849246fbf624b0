"""Where the tiles of a sequence lie, for kernels that read keys and values in place: nothing is gathered or decoded.

Symbols: n tiles, T tokens a tile, S tokens a unit of the storage, H key-value heads, D head width.
"""

from dataclasses import dataclass

import numpy as np

from nanokv.backend import Array, address_of
from nanokv.kernels import layout
from nanokv.kv.codec import codec_number
from nanokv.kv.storage import OwnTile, Storage
from nanokv.kv.tile import TILE


@dataclass(frozen=True)
class Pages:
    """What queries of tile `last` fold, in order: the tiles `numbers` [n], whose tokens lie in `units` [n, T / S] of a layer
    of a storage, and then, where a cache keeps it, their own tile k, v [T, H, D] in full precision."""

    storage: Storage
    layer: int
    numbers: np.ndarray
    units: np.ndarray
    last: int
    own: tuple[Array, Array] | None = None

    @property
    def key(self) -> tuple[int, float]:
        """What the sequences of one call must have in common."""
        return self.storage.unit_size, self.storage.fixed

    @property
    def shape(self) -> tuple[int, int]:
        """H and D."""
        return self.storage.k[0].shape[3], self.storage.head_dim

    def table(self) -> np.ndarray:
        """A line of layout.py's columns for each tile, the own one last."""
        count = len(self.numbers)
        line = [0] * layout.TILE_COLUMNS
        line[layout.HIGH] = layout.NO_LIMIT
        line[layout.CODEC : layout.QUERY] = sources_of(self.storage)[self.layer]
        lines = np.empty((count + (self.own is not None), layout.TILE_COLUMNS), np.int64)
        lines[:count] = line
        lines[:count, layout.NUMBER] = self.numbers
        if self.own is not None:
            lines[count] = tile_line(self.last, *self.own)
        return lines

    def places(self) -> np.ndarray:
        """The units of each line [n or n + 1, T / S]; those of the own tile count from its beginning."""
        if self.own is None:
            return self.units
        return np.concatenate([self.units, np.arange(TILE // self.storage.unit_size)[None]])


def sources_of(storage: Storage) -> np.ndarray:
    """Where keys and values of each layer lie [L, 7]: the codec's number and the addresses of three planes of each, 0 for
    none."""
    layers = np.arange(storage.k[0].shape[0])
    found = np.zeros((len(layers), 7), np.int64)
    found[:, 0] = codec_number(storage.codec)
    for first, planes in ((1, storage.k), (4, storage.v)):
        for i, plane in enumerate(planes):
            found[:, first + i] = address_of(plane) + layers * plane.strides[0]
    return found


def with_own_tile(sources: np.ndarray, own: OwnTile | None, length: int, end: int) -> np.ndarray | None:
    """sources_of() as [L, 1, 7], and behind it, [L, 2, 7], the tile in full precision that the tokens length .. end - 1 go
    to, where a cache keeps one; None where they go to several."""
    if own is None:
        return sources
    if length // TILE != (end - 1) // TILE:
        return None
    k, v = own.tile(0, length // TILE)
    found = np.zeros((len(own.k), 1, 7), np.int64)
    found[:, 0, 0] = layout.FLOAT32
    for column, first, plane in ((1, k, own.k), (4, v, own.v)):
        found[:, 0, column] = address_of(first) + np.arange(len(plane)) * plane.strides[0]
    return np.concatenate([sources, found], axis=1)


def tile_line(number: int, k: Array, v: Array) -> np.ndarray:
    """A line for a tile k, v [T, H, D] of consecutive float32 tokens."""
    line = np.zeros(layout.TILE_COLUMNS, np.int64)
    line[[layout.NUMBER, layout.CODEC, layout.HIGH]] = number, layout.FLOAT32, layout.NO_LIMIT
    line[[layout.KEYS, layout.VALUES]] = address_of(k), address_of(v)
    return line
