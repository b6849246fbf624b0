"""The pool against a naive model, and what public bug reports say a pool gets wrong."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanokv.errors import UsageError
from nanokv.kv.block_pool import NULL_BLOCK, AllBlocksCleared, BlockCopied, BlockPool, BlockRemoved, BlockStored, OutOfBlocks
from nanokv.kv.paged import PagedPool
from nanokv.kv.prefix import block_keys

BLOCK, COUNT = 4, 12


class PoolMachine(RuleBasedStateMachine):
    """Sequences are lists of tokens; the naive index is a dictionary from the plain prefix to what was stored there."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(COUNT, BLOCK)
        self.sequences: list[tuple[list[int], list[int]]] = []  # (tokens, table)
        self.content: dict[int, tuple[int, ...]] = {}  # cached block -> the whole prefix that it ends
        self.released: list[int] = []  # free blocks, least recently used first
        self.pool.listen(self.hear)

    def hear(self, event):
        if isinstance(event, BlockStored):
            assert event.block_id not in self.content
            self.content[event.block_id] = self.storing
        elif isinstance(event, BlockRemoved):
            del self.content[event.block_id]
        elif isinstance(event, AllBlocksCleared):
            self.content.clear()

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20))
    def start(self, tokens):
        """A new sequence: cached full blocks are shared, the rest are taken; all full ones enter the index."""
        table = []
        for key in block_keys(tokens, BLOCK):
            found = self.pool.get_cached_block(key)
            prefix = tuple(tokens[: (len(table) + 1) * BLOCK])
            stored = {text: block for block, text in self.content.items()}
            assert found == stored.get(prefix)  # the digest finds exactly what the plain prefix would
            if found is None:
                break
            table.append(found)
        self.pool.touch(table)
        needed = -(-len(tokens) // BLOCK) - len(table)
        before = self.pool.stats(), self.pool.num_free
        if needed > self.pool.num_free:
            with pytest.raises(OutOfBlocks):
                self.pool.get_new_blocks(needed)
            assert (self.pool.stats(), self.pool.num_free) == before
            self.pool.free_blocks(table[::-1])
            return
        new = self.pool.get_new_blocks(needed)
        assert NULL_BLOCK not in new
        assert not set(new) & {block for _, held in self.sequences for block in held}
        table += new
        for at, key in enumerate(block_keys(tokens, BLOCK)):
            self.storing = tuple(tokens[: (at + 1) * BLOCK])
            self.pool.cache_block(table[at], key)
        self.sequences.append((tokens, table))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def end(self, which):
        _, table = self.sequences.pop(which % len(self.sequences))
        self.pool.free_blocks(table[::-1])

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def fork(self, which):
        tokens, table = self.sequences[which % len(self.sequences)]
        self.pool.touch(table)
        self.sequences.append((tokens, list(table)))

    @rule()
    def clear(self):
        self.pool.reset_prefix_cache()
        assert not self.content

    @rule(block=st.integers(0, COUNT - 1))
    def free_what_is_free(self, block):
        if block != NULL_BLOCK and self.pool.ref_cnt(block) == 0:
            free = self.pool.num_free
            with pytest.raises(UsageError, match=f"block {block}"):
                self.pool.free_blocks([block])
            assert self.pool.num_free == free

    @invariant()
    def counts_agree(self):
        held = [block for _, table in self.sequences for block in table]
        stats = self.pool.stats()
        assert all(self.pool.ref_cnt(block) == held.count(block) for block in range(1, COUNT))
        assert stats.used == len(set(held))
        assert stats.shared == sum(held.count(block) > 1 for block in set(held))
        assert stats.cached == len(set(self.content) - set(held))
        assert stats.used + stats.cached + stats.free == COUNT - 1

    @invariant()
    def what_is_cached_is_what_was_stored(self):
        assert len(set(self.content.values())) == len(self.content)  # the first of two equal blocks is the one that is found


TestPoolMachine = PoolMachine.TestCase


def keys(tokens):
    return list(block_keys(tokens, BLOCK))


def test_blocks_are_taken_when_a_token_needs_one():
    """Block 16: 15 and 16 tokens hold one block, the 17th takes the second; growth, not the full need, each time."""
    pool = PagedPool(1, 1, 1, 10, 16)
    cache = pool.new_sequence()
    held = []
    for count in (15, 1, 1, 1):
        cache.extend(count)
        cache.commit()
        held.append(len(cache.block_table))
    assert held == [1, 1, 2, 2]


def test_slot_mapping():
    """Table [7, 2] with blocks of 4: positions 0 .. 7 are slots 28 .. 31 and 8 .. 11."""
    cache = PagedPool(1, 1, 1, 10, 4).new_sequence()
    cache.block_table = [7, 2]
    assert cache.slot_mapping(0, 8).tolist() == [28, 29, 30, 31, 8, 9, 10, 11]
    assert cache.slot_mapping(3, 6).tolist() == [31, 8, 9]
    with pytest.raises(UsageError, match="positions 7 .. 8"):
        cache.slot_mapping(7, 9)


def test_the_null_block_is_not_usable():
    pool = BlockPool(4, 4)
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 of 3"):
        pool.get_new_blocks(4)
    assert sorted(pool.get_new_blocks(3)) == [1, 2, 3]


def test_an_evicted_block_is_a_miss():
    pool = BlockPool(3, BLOCK)
    first, second = keys([1] * 4), keys([2] * 4)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, first[0])
    pool.free_blocks([block])
    assert pool.get_cached_block(first[0]) == block
    taken = pool.get_new_blocks(2)
    assert pool.get_cached_block(first[0]) is None
    pool.cache_block(taken[0], second[0])
    assert pool.get_cached_block(second[0]) == taken[0]


def test_of_equal_blocks_the_first_is_found_until_it_goes():
    """Twins computed together, then the first freed and reused: the index never points to a block with other content."""
    pool = BlockPool(4, BLOCK)
    a, b = pool.get_new_blocks(2)
    key = keys([5] * 4)[0]
    pool.cache_block(a, key)
    pool.cache_block(b, key)
    assert pool.get_cached_block(key) == a
    pool.free_blocks([a])
    pool.get_new_blocks(2)  # takes the unused block and a
    assert pool.get_cached_block(key) is None


def test_the_beginning_of_a_prefix_survives_longest():
    pool = BlockPool(4, BLOCK)
    table = pool.get_new_blocks(3)
    prefix = keys(list(range(12)))
    for block, key in zip(table, prefix, strict=True):
        pool.cache_block(block, key)
    pool.free_blocks(table[::-1])
    for left in (2, 1, 0):
        pool.get_new_blocks(1)
        assert [pool.get_cached_block(key) is not None for key in prefix] == [True] * left + [False] * (3 - left)


def test_a_digest_that_collides_is_a_miss(monkeypatch):
    """Two contents with one digest: the second is never answered with the first one's block."""
    pool = BlockPool(4, BLOCK)
    (a, b) = pool.get_new_blocks(2)
    one, other = keys([1] * 4)[0], keys([2] * 4)[0]
    forged = type(other)(one.digest, other.parent, other.tokens, other.extra)
    pool.cache_block(a, one)
    assert pool.get_cached_block(forged) is None
    pool.cache_block(b, forged)
    assert pool.get_cached_block(one) == a


def test_copies_are_announced():
    pool = PagedPool(1, 1, 1, 10, 4)
    events = []
    pool.blocks.listen(events.append)
    parent = pool.new_sequence()
    parent.extend(6)
    parent.commit()
    child = parent.fork()
    child.extend(1)
    copies = [event for event in events if isinstance(event, BlockCopied)]
    assert copies == [BlockCopied(parent.block_table[1], child.block_table[1])]
    parent.extend(1)  # the last holder writes in place
    assert sum(isinstance(event, BlockCopied) for event in events) == 1


def test_out_of_blocks_changes_nothing():
    pool = PagedPool(1, 1, 1, 4, 4)
    cache = pool.new_sequence()
    cache.extend(10)
    cache.commit()
    table, stats = list(cache.block_table), pool.blocks.stats()
    with pytest.raises(OutOfBlocks):
        cache.extend(5)
    assert (cache.block_table, pool.blocks.stats(), cache.length) == (table, stats, 10)
    cache.extend(2)


@pytest.mark.parametrize("size", [0, -1, 3, 5, 96, 256])
def test_a_block_size_that_does_not_divide_the_tile_is_refused(size):
    with pytest.raises(UsageError, match=f"block size {size}"):
        PagedPool(1, 1, 1, 4, size)


def test_ids_outside_the_pool_are_our_error():
    pool = BlockPool(4, 4)
    for call in (pool.ref_cnt, pool.forget, lambda block: pool.touch([block]), lambda block: pool.free_blocks([block])):
        for block in (-1, 4):
            with pytest.raises(UsageError, match=f"block {block} is not in the pool"):
                call(block)


@pytest.mark.parametrize("count", [0, 1])
def test_a_pool_without_a_usable_block_is_refused(count):
    with pytest.raises(UsageError, match="at least 2 blocks"):
        BlockPool(count, 4)
