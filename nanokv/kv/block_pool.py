"""Who owns which block: reference counts, the free list, the index of cached blocks. Bookkeeping only, no keys or values.

Names are vLLM's. Block 0 is the null block: never handed out, always zero, a place holder in tables. A freed block that
holds a hashed prefix stays in the index until it is needed for something else; the free list is in order of last use, so
the prefix that was left alone longest goes first. Every operation costs O(1) a block.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nanokv.errors import CapacityError, UsageError
from nanokv.kv.prefix import BlockKey

NULL_BLOCK = 0


class OutOfBlocks(CapacityError):  # noqa: N818 - the field's name for it
    """The pool has fewer free blocks than were asked for. Nothing was changed."""


@dataclass(frozen=True)
class BlockStored:
    """A full block entered the prefix index."""

    block_id: int
    key: BlockKey


@dataclass(frozen=True)
class BlockRemoved:
    """A block left the prefix index: it was evicted, or is about to be written."""

    block_id: int
    key: BlockKey


@dataclass(frozen=True)
class BlockCopied:
    """A shared, partly filled block was copied for the sequence that writes to it."""

    source: int
    target: int


@dataclass(frozen=True)
class AllBlocksCleared:
    """The prefix index was emptied."""


Event: TypeAlias = BlockStored | BlockRemoved | BlockCopied | AllBlocksCleared


@dataclass(frozen=True)
class PoolStats:
    """Blocks by state: used + cached + free = all but the null block. `cached` ones are free, but still hold a prefix."""

    used: int
    cached: int
    free: int
    shared: int


class BlockPool:
    """`num_blocks` counts the null block: one less can be used."""

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 2:
            raise UsageError(f"a pool needs at least 2 blocks, one of them the null block, not {num_blocks}")
        if block_size < 1:
            raise UsageError(f"block size {block_size} is out of range: it must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._ref_cnt = [0] * num_blocks
        self._ref_cnt[NULL_BLOCK] = 1
        # The free list is doubly linked through two lists of ids, with the null block as both ends.
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self.num_free = num_blocks - 1  # cached ones included
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}  # digest -> block
        self._num_cached_free = 0
        self._num_shared = 0
        self._listeners: list[Callable[[Event], object]] = []

    def listen(self, listener: Callable[[Event], object]) -> None:
        """Calls `listener` with every event from now on."""
        self._listeners.append(listener)

    def ref_cnt(self, block_id: int) -> int:
        """How many tables hold the block."""
        return self._ref_cnt[self._checked(block_id)]

    def get_new_blocks(self, count: int) -> list[int]:
        """Takes `count` blocks, least recently used first. OutOfBlocks if there are not as many."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} of {self.num_blocks - 1} are free")
        following, keys, ref_cnt = self._next, self._key, self._ref_cnt  # a replay takes millions
        taken, block = [], NULL_BLOCK
        for _ in range(count):
            block = following[block]
            key = keys[block]
            if key is not None:
                self._num_cached_free -= 1
                self._remove(block, key)
            ref_cnt[block] = 1
            taken.append(block)
        rest = following[block]  # the whole run leaves the list at once
        following[NULL_BLOCK], self._previous[rest] = rest, NULL_BLOCK
        self.num_free -= count
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """One more table holds each of the blocks; a cached free one comes back to life."""
        for block in blocks:
            count = self._ref_cnt[self._checked(block)]
            if block == NULL_BLOCK:
                continue
            if count == 0:
                if self._key[block] is None:
                    raise UsageError(f"block {block} is free and holds nothing: it cannot be shared")
                self._unlink(block)
                self._num_cached_free -= 1
            elif count == 1:
                self._num_shared += 1
            self._ref_cnt[block] = count + 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """One table less holds each. Give them in the order in which they may be reused: a sequence's last block first, so
        that the beginning of its prefix survives longest. Freeing a free block is an error that changes nothing."""
        self._check_all(blocks)
        for block, held in Counter(blocks).items():
            if self._ref_cnt[block] < held and block != NULL_BLOCK:
                raise UsageError(f"block {block} is freed once more than it is held")
        following, previous, ref_cnt = self._next, self._previous, self._ref_cnt
        last = previous[NULL_BLOCK]
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            count = ref_cnt[block] = ref_cnt[block] - 1
            if count == 1:
                self._num_shared -= 1
            elif count == 0:
                following[last], previous[block] = block, last
                last = block
                self.num_free += 1
                if self._key[block] is not None:
                    self._num_cached_free += 1
        following[last], previous[NULL_BLOCK] = NULL_BLOCK, last

    def cache_block(self, block: int, key: BlockKey) -> None:
        """Enters a full block into the index. Of two blocks with the same content the first stays the one that is found;
        a digest that belongs to other content is left alone."""
        if self._ref_cnt[self._checked(block)] == 0 or block == NULL_BLOCK:
            raise UsageError(f"block {block} is not held by anyone: it cannot be cached")
        if self._key[block] is not None or key.digest in self._index:
            return
        self._key[block] = key
        self._index[key.digest] = block
        if self._listeners:
            self._emit(BlockStored(block, key))

    def get_cached_block(self, key: BlockKey) -> int | None:
        """The block with exactly this content: parent, tokens and extra keys are compared, not only the digest."""
        block = self._index.get(key.digest)
        return block if block is not None and self._key[block] == key else None

    def forget(self, block: int) -> None:
        """Takes a block out of the index: its content is about to change."""
        key = self._key[self._checked(block)]
        if key is not None:
            self._remove(block, key)

    def _remove(self, block: int, key: BlockKey) -> None:
        self._key[block] = None
        del self._index[key.digest]
        if self._listeners:
            self._emit(BlockRemoved(block, key))

    def reset_prefix_cache(self) -> None:
        """Empties the index. Blocks in use stay in use."""
        self._key = [None] * self.num_blocks
        self._index.clear()
        self._num_cached_free = 0
        self._emit(AllBlocksCleared())

    def copied(self, source: int, target: int) -> None:
        """Tells the listeners of a copy-on-write."""
        self._emit(BlockCopied(source, target))

    def stats(self) -> PoolStats:
        """How many blocks are in which state; counted as they change, not here."""
        used = self.num_blocks - 1 - self.num_free
        return PoolStats(used, self._num_cached_free, self.num_free - self._num_cached_free, self._num_shared)

    def _check_all(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._checked(min(blocks))
            self._checked(max(blocks))

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise UsageError(f"block {block} is not in the pool (0 .. {self.num_blocks - 1})")
        return block

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1

    def _emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
