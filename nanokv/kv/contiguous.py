"""One array for the keys and one for the values, filled from the left: the cache that every tutorial draws.

Symbols as in kv/tile.py; `capacity` is in tokens.
"""

from typing import Any

import numpy as np

from nanokv.backend import NUMPY, Array, Backend
from nanokv.errors import CapacityError, UsageError
from nanokv.kv.tile import TILE, Tiles


class ContiguousCache:
    """k, v [L, capacity rounded up to whole tiles, Hkv, D], all in one piece.

    Memory is taken at once but written only as tokens arrive. A tile is cleared when its first token comes, so nothing
    uninitialised ever reaches attention.
    """

    kind = "contiguous"

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: Any = np.float32,
        backend: Backend = NUMPY,
    ):
        if capacity < 1:
            raise UsageError(f"cache capacity must be at least 1 token, not {capacity}")
        self.capacity = capacity
        shape = (num_layers, -(-capacity // TILE) * TILE, num_kv_heads, head_dim)
        self._backend = backend
        self.k = backend.xp.empty(shape, dtype=dtype)
        self.v = backend.xp.empty(shape, dtype=dtype)
        self._length = 0  # tokens that count
        self._end = 0  # tokens written, those of an unfinished step included
        self._clean = 0  # slots below this one hold a token or zero

    @property
    def length(self) -> int:
        return self._length

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        layers, _, heads, dim = self.k.shape
        return 2 * layers * heads * dim * self.k.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes allocated, filled or not."""
        return self.k.nbytes + self.v.nbytes

    def extend(self, count: int) -> np.ndarray:
        if count < 1:
            raise UsageError(f"a step needs at least 1 token, not {count}")
        if self._length + count > self.capacity:
            raise CapacityError(
                f"the cache holds {self._length} of {self.capacity} tokens, no room for {count} more: use a larger capacity"
            )
        self._clear(self._length, self._end)  # what a step that never finished left behind
        self._end = self._length + count
        clean = -(-self._end // TILE) * TILE
        if clean > self._clean:
            self._clear(self._clean, clean)
            self._clean = clean
        return np.arange(self._length, self._end)

    def write(self, layer: int, k: Array, v: Array) -> None:
        self.k[layer, self._length : self._end] = k
        self.v[layer, self._length : self._end] = v

    def tiles(self, layer: int) -> Tiles:
        count = -(-self._end // TILE)
        k, v = (a[layer, : count * TILE].reshape(count, TILE, *a.shape[2:]) for a in (self.k, self.v))
        return Tiles(k, v)

    def commit(self) -> None:
        self._length = self._end

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens; more than there are is an error."""
        if not 0 <= length <= self._length:
            raise UsageError(f"cannot truncate a cache of {self._length} tokens to {length}")
        self._clear(length, self._end)
        self._length = self._end = length

    def reset(self) -> None:
        """Empties the cache: the next token goes to position 0."""
        self.truncate(0)

    def copy(self) -> "ContiguousCache":
        """An independent cache with the same tokens and capacity."""
        other = object.__new__(ContiguousCache)
        other.__dict__.update(self.__dict__)
        other.k, other.v = self._backend.xp.empty_like(self.k), self._backend.xp.empty_like(self.v)
        other.k[:, : self._clean], other.v[:, : self._clean] = self.k[:, : self._clean], self.v[:, : self._clean]
        return other

    def _clear(self, start: int, stop: int) -> None:
        self.k[:, start:stop] = 0
        self.v[:, start:stop] = 0
