"""Keys and values in blocks of a shared pool, found through a block table: PagedAttention's memory (Kwon et al. 2023, arXiv
2309.06180), with copy-on-write, prefix reuse, windows and codecs.

A sequence owns a table of block ids; token p lives in block table[p // block_size], at offset p % block_size. Tables may
share blocks: full ones for good, the last, partly filled one until somebody writes to it. Physical order does not matter:
tiles whose blocks lie side by side are read in place, the others are gathered.

Symbols as in kv/tile.py and kv/storage.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanokv.backend import NUMPY, Array, Backend, asking_for
from nanokv.errors import UsageError
from nanokv.kv.block_pool import NULL_BLOCK, BlockPool
from nanokv.kv.codec import Codec, get_codec
from nanokv.kv.contiguous import check_truncation, first_alike, per_layer
from nanokv.kv.pages import Pages, sources_of, with_own_tile
from nanokv.kv.prefix import BlockKey, block_keys, tagged
from nanokv.kv.storage import OwnTile, Storage
from nanokv.kv.tile import CAUSAL, TILE, Tiles, Visibility


class PagedPool:
    """The memory that sequences share: k_cache, v_cache [L, num_blocks, block_size, Hkv, D] and who owns which block.

    `num_blocks` counts the null block. `extra_keys` (a model's name, a salt) go into every block's hash.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int = 16,
        dtype: Any = np.float32,
        backend: Backend = NUMPY,
        codec: Codec | None = None,
        visibility: Visibility | Sequence[Visibility] = CAUSAL,
        extra_keys: Mapping[str, str] | None = None,
    ):
        if not 1 <= block_size <= TILE or TILE % block_size:
            raise UsageError(f"block size {block_size} does not divide the tile of {TILE} tokens: use 1, 2, 4, … or {TILE}")
        self.blocks = BlockPool(num_blocks, block_size)
        self.block_size = block_size
        self.codec = codec or get_codec(None, dtype, backend)
        self.visibility = per_layer(visibility, num_layers)
        self.alike = first_alike(self.visibility)
        self.storage = Storage(num_layers, num_blocks, block_size, num_kv_heads, head_dim, self.codec, backend)
        self.storage.clear(0, block_size)  # the null block
        self._own = (num_layers, num_kv_heads, head_dim, dtype, backend)
        self.xp = backend.xp
        windows = tuple((each.window, each.sinks, each.streaming) for each in self.visibility)
        self.extra = tagged({"codec": self.codec.name, "visibility": repr(windows), **(extra_keys or {})})

    @property
    def k_cache(self) -> Array:
        return self.storage.k[0]

    @property
    def v_cache(self) -> Array:
        return self.storage.v[0]

    def new_sequence(self) -> "PagedCache":
        """An empty sequence; it takes blocks as it grows."""
        with asking_for("a sequence's own tile", "keep fewer sequences", self.xp):
            return PagedCache(self)

    def new_own_tile(self) -> OwnTile | None:
        return OwnTile(*self._own) if self.codec.own_tile else None


@dataclass(frozen=True)
class _Place:
    """Consecutive tiles from `first` on: their blocks, side by side in memory or not."""

    first: int
    in_row: bool
    units: list[int]


class PagedCache:
    """One sequence of a pool."""

    def __init__(self, pool: PagedPool, own: OwnTile | None = None):
        self.pool = pool
        self.block_table: list[int] = []  # the null block where a window has dropped one
        self._length = 0
        self._end = 0
        self._written = 0  # slots up to this position may hold tokens that never counted, or no longer do
        self._own = own or pool.new_own_tile()
        self._tokens: Sequence[int] = ()  # as far as publish() was told
        self._keys: list[BlockKey] = []  # of the full blocks that were published
        self._layout: dict[tuple[int, int], list[_Place]] = {}
        self._grids: dict[tuple[tuple[int, int], tuple[int, int]], tuple[np.ndarray, np.ndarray]] = {}
        self._dropped = 0  # entries of the table that a window has let go
        self._slots: dict[int, Array | slice] = {}  # of this step's tokens by the first position, once asked for

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_step(self) -> int | None:
        return None

    @property
    def held(self) -> int:
        """Tokens whose keys and values some layer may still see."""
        return max(visibility.held(self._length) for visibility in self.pool.visibility)

    @property
    def bytes_per_token(self) -> float:
        return self.pool.storage.bytes_per_token

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in the table, shared ones included, and of a tile kept in full precision."""
        blocks = sum(block != NULL_BLOCK for block in self.block_table)
        own = self._own.k.nbytes + self._own.v.nbytes if self._own else 0
        return round(blocks * self.pool.block_size * self.bytes_per_token) + own

    def visibility(self, layer: int) -> Visibility:
        return self.pool.visibility[layer]

    def position_ids(self, positions: np.ndarray) -> np.ndarray:
        return self.pool.visibility[0].position_ids(positions)

    def blocks_needed(self, count: int) -> int:
        """Blocks that a step of `count` tokens takes from the pool: growth, and a copy of a shared last block."""
        grown = -(-(self._length + count) // self.pool.block_size) - len(self.block_table)
        return max(0, grown) + self.copies_on_write

    @property
    def copies_on_write(self) -> bool:
        """Whether the next step copies the last block, which is partly filled and shared."""
        block, offset = divmod(self._length, self.pool.block_size)
        return offset > 0 and self.pool.blocks.ref_cnt(self.block_table[block]) > 1

    def extend(self, count: int) -> np.ndarray:
        """Room for `count` more tokens. OutOfBlocks leaves pool and table as they were; so does a card that fails, for want
        of memory say, while blocks are made ready."""
        if count < 1:
            raise UsageError(f"a step needs at least 1 token, not {count}")
        pool, blocks = self.pool, self.pool.blocks
        at, copies = self._length // pool.block_size, self.copies_on_write
        new = blocks.get_new_blocks(self.blocks_needed(count))
        try:
            for block in new[: len(new) - copies]:
                pool.storage.clear(block * pool.block_size, (block + 1) * pool.block_size)
            if copies:
                pool.storage.copy_unit(self.block_table[at], new[-1])
        except Exception:
            blocks.free_blocks(new[::-1])
            raise
        if copies:
            source, self.block_table[at] = self.block_table[at], new.pop()
            blocks.free_blocks([source])
            blocks.copied(source, self.block_table[at])
        elif self._length % pool.block_size:  # after a truncation it may be full and in the index
            blocks.forget(self.block_table[at])
        self.block_table += new
        self._layout, self._grids = {}, {}
        self._clear(self._length, self._written)
        self._end = self._written = self._length + count
        self._slots = {}
        if self._own:
            self._own.extend(self._length, self._end)
        return np.arange(self._length, self._end)

    def slot_mapping(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: where the tokens of these positions live, block id * block_size + offset."""
        if not 0 <= start <= stop <= len(self.block_table) * self.pool.block_size:
            raise UsageError(f"positions {start} .. {stop - 1} are not all in the {len(self.block_table)} blocks of the table")
        positions = np.arange(start, stop)
        size = self.pool.block_size
        table = np.asarray(self.block_table[start // size : -(-stop // size)], dtype=np.int64)
        return table[positions // size - start // size] * size + positions % size

    def write(self, layer: int, k: Array, v: Array) -> None:
        if self._own is None:
            self.pool.storage.write(layer, self._slots_of(self._length, self._end), k, v)
            return
        self._own.write(layer, self._length, k, v)
        self._encode(layer, self._own)

    def _encode(self, layer: int, own: OwnTile) -> None:
        """The tiles that this step has made full."""
        for tile in own.filled(self._length, self._end):
            self.pool.storage.write(layer, self._slots_of(tile * TILE, (tile + 1) * TILE), *own.tile(layer, tile))

    def _slots_of(self, start: int, stop: int) -> Array | slice:
        """The slots of positions start .. stop - 1 as the storage takes them, the same for every layer of a step."""
        if start not in self._slots:
            self._slots[start] = self.pool.storage.slots(self.slot_mapping(start, stop))
        return self._slots[start]

    def tiles(self, layer: int, last: int) -> list[Tiles]:
        found = []
        for begin, end in self._ranges(layer, last):
            for place in self._places(begin, end):
                if place.in_row:
                    k, v = self.pool.storage.run(layer, place.units[0], len(place.units))
                else:
                    k, v = self.pool.storage.gather(layer, place.units)
                found.append(Tiles(k, v, place.first))
        if self._own:
            k, v = self._own.tile(layer, last)
            found.append(Tiles(k[None], v[None], last))
        return found

    def pages(self, layer: int, last: int) -> Pages:
        """What tiles() gives, where it lies."""
        sinks, window = self._ranges(layer, last)
        if (sinks, window) not in self._grids:
            numbers = np.array([*range(*sinks), *range(*window)], dtype=np.int64)
            self._grids[sinks, window] = numbers, np.concatenate([self._grid(*sinks), self._grid(*window)])
        own = self._own.tile(layer, last) if self._own else None
        return Pages(self.pool.storage, layer, *self._grids[sinks, window], last, own)

    @property
    def alike(self) -> Sequence[int]:
        return self.pool.alike

    @property
    def storage(self) -> Storage | None:
        return None if self._own else self.pool.storage

    def sources(self) -> np.ndarray | None:
        return with_own_tile(sources_of(self.pool.storage)[:, None], self._own, self._length, self._end)

    def written(self) -> None:
        if self._own and self._own.filled(self._length, self._end):
            for layer in range(len(self.pool.visibility)):
                self._encode(layer, self._own)

    def step_slots(self, layer: int) -> np.ndarray:
        if self._own:
            return np.arange(self._length, self._end) % TILE
        return self.slot_mapping(self._length, self._end)

    def _ranges(self, layer: int, last: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The encoded tiles that queries in tile `last` may see: those of the sinks, and the others up to their own."""
        visibility = self.pool.visibility[layer]
        first = visibility.oldest(max(self._length, last * TILE)) // TILE
        encoded = last - 1 if self._own else last
        return (0, min(first, -(-visibility.sinks // TILE))), (first, max(first, encoded + 1))

    def _grid(self, begin: int, end: int) -> np.ndarray:
        """The blocks of the tiles begin .. end - 1 [n, blocks a tile]; the null block past the table's end."""
        each = TILE // self.pool.block_size
        table = self.block_table[begin * each : end * each]
        table += [NULL_BLOCK] * ((end - begin) * each - len(table))
        return np.array(table, dtype=np.int64).reshape(-1, each)

    def commit(self) -> None:
        self._length = self._end
        self._publish_full_blocks()
        self._drop_unseen_blocks()
        if self._own:
            self._own.settle(self._length)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens and gives the blocks behind them back; errors as ContiguousCache.truncate."""
        check_truncation(length, self._length, self.pool.visibility, self._own)
        keep = -(-length // self.pool.block_size)
        self.pool.blocks.free_blocks(self.block_table[keep:][::-1])
        del self.block_table[keep:], self._keys[length // self.pool.block_size :]
        self._tokens = self._tokens[:length]
        self._layout, self._grids = {}, {}
        self._length = self._end = length
        self._written = min(self._written, keep * self.pool.block_size)
        if self._own:
            self._own.restart(length)

    def reset(self) -> None:
        """Gives all blocks back."""
        self.pool.blocks.free_blocks(self.block_table[::-1])
        self.block_table, self._tokens, self._keys, self._layout, self._grids = [], (), [], {}, {}
        self._length = self._end = self._written = self._dropped = 0
        if self._own:
            self._own.restart(0)

    def fork(self) -> "PagedCache":
        """Another sequence with the same tokens, sharing every block."""
        with asking_for("a fork's own tile", "keep fewer sequences", self.pool.xp):
            other = PagedCache(self.pool, self._own and self._own.copy())
        keep = -(-self._length // self.pool.block_size)
        self.pool.blocks.touch(self.block_table[:keep])
        other.block_table, other._keys = self.block_table[:keep], list(self._keys)
        other._length = other._end = self._length
        other._written = min(self._written, keep * self.pool.block_size)
        other._dropped = self._dropped
        return other

    copy = fork

    def publish(self, tokens: Sequence[int]) -> None:
        """Enters the full blocks of this sequence, whose tokens these are, into the prefix index: those that are full now,
        and those that fill up as steps are committed, before a window can drop them."""
        self._tokens = tokens
        self._publish_full_blocks()

    def _publish_full_blocks(self) -> None:
        tokens = self._tokens
        full = self._length // TILE * TILE if self._own else self._length
        known = len(self._keys)
        for key in block_keys(tokens[:full], self.pool.block_size, self.pool.extra, self._keys[:known]):
            block = self.block_table[len(self._keys)]
            if block != NULL_BLOCK:
                self.pool.blocks.cache_block(block, key)
            self._keys.append(key)

    def adopt(self, tokens: Sequence[int]) -> int:
        """Starts an empty sequence with the longest cached prefix of `tokens` in whole blocks, at least one token short of
        all of them, and says how long it is."""
        if self._length:
            raise UsageError("only an empty sequence can adopt a prefix")
        size = self.pool.block_size
        keys: list[BlockKey] = []
        found: list[int] = []
        for key in block_keys(tokens[: len(tokens) - 1], size, self.pool.extra):
            block = self.pool.blocks.get_cached_block(key)
            if block is None:
                break
            keys.append(key)
            found.append(block)
        length = len(found) * size
        if self._own:  # what an own tile holds is not in any block
            length = length // TILE * TILE
        count = length // size
        self.pool.blocks.touch(found[:count])
        self.block_table, self._keys = found[:count], keys[:count]
        self._length = self._end = self._written = length
        self._drop_unseen_blocks()
        if self._own:
            self._own.restart(self._length)
        return self._length

    def _clear(self, start: int, stop: int) -> None:
        """Zeroes what is in the table's slots but does not count; its blocks are this sequence's alone."""
        if self._own is None:
            size = self.pool.block_size
            for position in range(start, min(stop, len(self.block_table) * size)):
                slot = self.block_table[position // size] * size + position % size
                self.pool.storage.clear(slot, slot + 1)

    def _drop_unseen_blocks(self) -> None:
        size = self.pool.block_size
        oldest = min(visibility.oldest(self._length) for visibility in self.pool.visibility)
        kept = -(-max(visibility.sinks for visibility in self.pool.visibility) // size)
        dropped = range(max(kept, self._dropped), oldest // size)
        if dropped:
            self.pool.blocks.free_blocks([self.block_table[at] for at in reversed(dropped)])
            self.block_table[dropped.start : dropped.stop] = [NULL_BLOCK] * len(dropped)
            self._dropped = dropped.stop
            self._layout, self._grids = {}, {}

    def _places(self, begin: int, end: int) -> list[_Place]:
        """Where the tiles begin .. end - 1 are; the same for every layer of a step."""
        if begin >= end:
            return []
        if (begin, end) not in self._layout:
            self._layout[begin, end] = _find_places(self._grid(begin, end), begin)
        return self._layout[begin, end]


def _find_places(grid: np.ndarray, first: int) -> list[_Place]:
    """Tiles of blocks grid [n, blocks a tile], from tile `first` on, joined while they lie side by side or while none does."""
    in_row = (np.diff(grid, axis=1) == 1).all(axis=1)
    found: list[_Place] = []
    for tile, (straight, units) in enumerate(zip(in_row.tolist(), grid.tolist(), strict=True), start=first):
        if found and found[-1].in_row == straight and (not straight or units[0] == found[-1].units[-1] + 1):
            found[-1].units.extend(units)
        else:
            found.append(_Place(tile, straight, units))
    return found
