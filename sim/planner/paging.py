"""Blocks of the runtime's own pool for the requests of a replay, taken, shared and given back as its engine does."""

import sys
from collections.abc import Sequence as Many
from typing import TypeVar

import numpy as np

from nanokv.kv.block_pool import BlockPool
from nanokv.kv.prefix import BlockKey
from sim.planner.kv_memory import Counts, Sequence, Usage
from sim.planner.traces import Request

Tokens = TypeVar("Tokens", int, np.ndarray)


class Paged:
    """Blocks of nanokv's own BlockPool, taken and given as its Engine does; `hash_block` is the tokens that each node of a
    request's prefix names, None replays without reuse.

    Only full blocks are reused. A block of a prompt that the trace names is found by every request that begins with it;
    what the trace does not name (outputs, and whole prompts of traces without ids) only by the same request, when it comes
    back after a preemption.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_block: int | None = None):
        self.pool = BlockPool(num_blocks + 1, block_size)  # the null block is one more
        self.block_size, self.slots = block_size, num_blocks * block_size
        self._reuse, self._named = hash_block is not None, hash_block or 1
        self._deepest: dict[int, int] = {}  # node -> its last block that was ever published
        self._numbers: list[bytes] = []  # of blocks, as keys have them: written once, not for every key

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def _blocks(self, tokens: Tokens) -> Tokens:
        return -(-tokens // self.block_size)

    def can_ever_hold(self, request: Request) -> bool:
        return self._blocks(request.total) <= self.pool.num_blocks - 1

    def adopt(self, sequence: Sequence) -> None:
        """Starts an empty sequence with the longest cached prefix, at least one token short of all that is known."""
        if not self._reuse:
            return
        self._make_keys(sequence, (sequence.known - 1) // self.block_size)
        found = []
        for key in sequence.keys:
            hit = self.pool.get_cached_block(key)
            if hit is None:
                break
            found.append(hit)
        self.pool.touch(found)
        sequence.block_table = found
        sequence.published = len(found)
        sequence.computed = len(found) * self.block_size

    def outstanding(self, sequence: Sequence) -> int:
        return self._blocks(sequence.known + 1) - len(sequence.block_table)

    def needed(self, sequence: Sequence, count: int) -> int:
        return self._blocks(sequence.computed + count) - len(sequence.block_table)

    def extend(self, sequence: Sequence, count: int) -> None:
        sequence.block_table += self.pool.get_new_blocks(self.needed(sequence, count))

    def commit(self, sequence: Sequence) -> None:
        """Enters the blocks that are full now into the index."""
        if not self._reuse:
            return
        full = sequence.computed // self.block_size
        if full == sequence.published:
            return
        self._make_keys(sequence, full)
        new = slice(sequence.published, full)
        for block, key in zip(sequence.block_table[new], sequence.keys[new], strict=True):
            self.pool.cache_block(block, key)
        self._note_published(sequence, full)
        sequence.published = full

    def release(self, sequence: Sequence) -> None:
        self.pool.free_blocks(sequence.block_table[::-1])
        sequence.block_table = []
        sequence.computed = 0

    def reach(self, computed: Counts, steps: int) -> int:
        held = int(self._blocks(computed).sum())

        def grown(count: int) -> int:
            return int(self._blocks(computed + count).sum()) - held

        if grown(steps) <= self.pool.num_free:
            return steps
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if grown(middle) <= self.pool.num_free else (low, middle)
        return low

    def decode(self, running: Many[Sequence], computed: Counts, steps: int, head: Sequence | None) -> Usage:
        before, size = self.pool.stats(), self.block_size
        takers = sorted(  # (step, place): who takes a block when, in the order in which the engine serves them
            (step, place)
            for place, tokens in enumerate(computed.tolist())
            for step in range(1 + -tokens % size, steps + 1, size)
        )
        cached = np.full(steps, before.cached)
        for step, place in takers:
            running[place].block_table += self.pool.get_new_blocks(1)
            if before.cached:
                cached[step - 1 :] = self.pool.stats().cached
        used = before.used + np.bincount([step - 1 for step, _ in takers], minlength=steps).cumsum()
        lengths = computed + np.arange(1, steps + 1)[:, None]  # [n, R]
        return self._usage(running, lengths, used, cached)

    def usage(self, running: Many[Sequence], head: Sequence | None) -> Usage:
        stats = self.pool.stats()
        lengths = np.array([[each.computed for each in running]], np.int64)
        return self._usage(running, lengths, np.array([stats.used]), np.array([stats.cached]))

    def _usage(self, running: Many[Sequence], lengths: Counts, used: Counts, cached: Counts) -> Usage:
        """lengths [n, R]; used, cached [n] blocks. A block in several tables is full: it adds neither reserved nor internal."""
        size = self.block_size
        final = np.array([each.request.cached for each in running], np.int64)  # [R]
        held = self._blocks(lengths) * size
        wanted = np.minimum(held, final)
        reserved, internal = (wanted - lengths).sum(axis=1), (held - wanted).sum(axis=1)
        return Usage(
            tokens=used * size - reserved - internal,
            reserved=reserved,
            internal=internal,
            external=np.zeros_like(used),
            cached=cached * size,
            free=self.slots - (used + cached) * size,
        )

    def sharing(self, running: Many[Sequence]) -> tuple[int, int]:
        stats = self.pool.stats()
        return stats.shared, sum(len(each.block_table) for each in running) - stats.used

    def infinite_hit(self, sequence: Sequence) -> int:
        if not self._reuse:
            return 0
        blocks, named = 0, self._named
        for at, node in enumerate(sequence.request.prefix):
            ends = (at + 1) * named // self.block_size  # blocks that end within this node or before
            if ends == at * named // self.block_size:
                continue  # none ends in this one: a later node tells
            blocks = self._deepest.get(node, blocks - 1) + 1
            if blocks < ends:
                break
        return min(blocks, (sequence.known - 1) // self.block_size) * self.block_size

    def may_help(self, sequence: Sequence, before: int, head: Sequence) -> bool:
        if not self._reuse:
            return False
        shared = 0
        for one, other in zip(sequence.request.prefix, head.request.prefix, strict=False):
            if one != other:
                break
            shared += self._named
        return shared > before

    def _make_keys(self, sequence: Sequence, count: int) -> None:
        """Keys of the first `count` blocks. A node of the trace names a block's past as a digest does, and stands in its
        place: the node that holds the block's last token."""
        keys, numbers = sequence.keys, self._numbers
        numbers += [block.to_bytes(8, "little") for block in range(len(numbers), count)]
        while len(keys) < count:
            owner, end = self._owner(sequence, len(keys))
            keys += [BlockKey(owner + number, b"", (), ()) for number in numbers[len(keys) : min(end, count)]]

    def _owner(self, sequence: Sequence, block: int) -> tuple[bytes, int]:
        """Who names a block: a node of the trace or the sequence alone, and the first block that it does not name."""
        request, size = sequence.request, self.block_size
        named = request.prompt // size if request.prefix else 0  # blocks
        if block >= named:
            return (sequence.index << 1 | 1).to_bytes(8, "little"), sys.maxsize
        at = ((block + 1) * size - 1) // self._named
        return (request.prefix[at] << 1).to_bytes(8, "little"), min(named, (at + 1) * self._named // size)

    def _note_published(self, sequence: Sequence, full: int) -> None:
        """Keeps, for a cache that never evicts, how far into each node blocks were published."""
        named, prefix = self._named, sequence.request.prefix
        last = min(full, sequence.request.prompt // self.block_size)
        if not prefix or sequence.published >= last:
            return
        for at in range(sequence.published * self.block_size // named, (last * self.block_size - 1) // named + 1):
            block = min(last, (at + 1) * named // self.block_size) - 1
            if block * self.block_size + self.block_size > at * named:  # it ends within this node
                self._deepest[prefix[at]] = max(block, self._deepest.get(prefix[at], -1))
