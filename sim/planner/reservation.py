"""Reserving one run of slots for a request's whole life, as engines did before paging.

The three rules are the baselines of the PagedAttention paper (Kwon et al. 2023, arXiv 2309.06180, section 6.1): the model's
length (Orca Max), the output rounded up to a power of two (Orca Pow2), the length that the request will turn out to have
(Orca Oracle). The paper takes Orca to find the run with a buddy allocator.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np

from nanokv.errors import UsageError
from sim.planner.kv_memory import Counts, Sequence, Usage
from sim.planner.traces import Request


class Allocator(Protocol):
    """Runs of consecutive slots out of one memory."""

    free: int  # slots that no run holds

    def rounded(self, size: int) -> int:
        """Slots that a run of `size` takes."""
        ...

    def can_ever(self, size: int) -> bool:
        """Whether a run of `size` slots fits in the empty memory."""
        ...

    def take(self, size: int) -> int | None:
        """The first slot of a run of `size`; None where no hole is large enough, and then nothing has changed."""
        ...

    def give(self, start: int, size: int) -> None:
        """Gives back a run that take(size) started at `start`."""
        ...


class FirstFit:
    """The first hole that is large enough; neighbouring holes join."""

    def __init__(self, slots: int):
        self.slots = self.free = slots
        self._starts, self._sizes = ([0], [slots]) if slots else ([], [])

    def rounded(self, size: int) -> int:
        return size

    def can_ever(self, size: int) -> bool:
        return size <= self.slots

    def take(self, size: int) -> int | None:
        at = next((at for at, hole in enumerate(self._sizes) if hole >= size), None)
        if at is None:
            return None
        start = self._starts[at]
        if self._sizes[at] == size:
            del self._starts[at], self._sizes[at]
        else:
            self._starts[at], self._sizes[at] = start + size, self._sizes[at] - size
        self.free -= size
        return start

    def give(self, start: int, size: int) -> None:
        at = bisect_left(self._starts, start)
        self.free += size
        if at < len(self._starts) and self._starts[at] == start + size:
            size += self._sizes[at]
            del self._starts[at], self._sizes[at]
        if at and self._starts[at - 1] + self._sizes[at - 1] == start:
            self._sizes[at - 1] += size
        else:
            self._starts.insert(at, start)
            self._sizes.insert(at, size)


class Buddy:
    """Runs of a power of two of slots, at a multiple of their size, split in halves and joined again (Knuth, The Art of
    Computer Programming, volume 1, section 2.5). A memory of another size is the powers of two that make it up."""

    def __init__(self, slots: int):
        self.free = slots
        self._free: list[set[int]] = [set() for _ in range(slots.bit_length())]  # starts of free runs of 2^i slots
        start = 0
        for order in reversed(range(slots.bit_length())):
            if slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def rounded(self, size: int) -> int:
        return 1 << (size - 1).bit_length()

    def can_ever(self, size: int) -> bool:
        return (size - 1).bit_length() < len(self._free)

    def take(self, size: int) -> int | None:
        order = (size - 1).bit_length()
        found = next((each for each in range(order, len(self._free)) if self._free[each]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        for half in range(order, found):
            self._free[half].add(start + (1 << half))
        self.free -= 1 << order
        return start

    def give(self, start: int, size: int) -> None:
        order = (size - 1).bit_length()
        self.free += 1 << order
        while (other := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(other)
            start, order = min(start, other), order + 1
        self._free[order].add(start)


ALLOCATORS: Mapping[str, Callable[[int], Allocator]] = {"buddy": Buddy, "first-fit": FirstFit}


def _power_of_two(request: Request, longest: int) -> int:
    return min(longest, request.prompt + (1 << max(0, request.output - 1).bit_length()))


# (request, the model's length) -> slots
RULES: Mapping[str, Callable[[Request, int], int]] = {
    "max": lambda request, longest: longest,
    "pow2": _power_of_two,
    "oracle": lambda request, longest: request.cached,
}


def get_allocator(name: str, slots: int) -> Allocator:
    """An empty memory of `slots`; UsageError for an unknown name."""
    if name not in ALLOCATORS:
        raise UsageError(f"unknown allocator {name!r}: choose one of {', '.join(ALLOCATORS)}")
    return ALLOCATORS[name](slots)


class Reserved:
    """One run of slots a request, held from its admission to its end; `rule` is a name of RULES."""

    num_free = 0  # a step takes nothing

    def __init__(self, rule: str, slots: int, longest: int, allocator: str):
        self.slots, self.longest = slots, longest
        self._rule, self._allocator = RULES[rule], get_allocator(allocator, slots)

    def _size(self, request: Request) -> int:
        return self._rule(request, self.longest)

    def can_ever_hold(self, request: Request) -> bool:
        return self._allocator.can_ever(self._size(request))

    def adopt(self, sequence: Sequence) -> None:
        """Takes the run, if there is a hole for it."""
        start = self._allocator.take(self._size(sequence.request))
        sequence.block_table = [] if start is None else [start]

    def outstanding(self, sequence: Sequence) -> int:
        return 0 if sequence.block_table else 1  # more than is ever free: all is taken at once, or nothing

    def needed(self, sequence: Sequence, count: int) -> int:
        return 0

    def extend(self, sequence: Sequence, count: int) -> None:
        pass

    def commit(self, sequence: Sequence) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        for start in sequence.block_table:
            self._allocator.give(start, self._size(sequence.request))
        sequence.block_table = []

    def reach(self, computed: Counts, steps: int) -> int:
        return steps

    def decode(self, running: Many[Sequence], computed: Counts, steps: int, head: Sequence | None) -> Usage:
        return self._usage(running, int(computed.sum()) + len(running) * np.arange(1, steps + 1), head)

    def usage(self, running: Many[Sequence], head: Sequence | None) -> Usage:
        return self._usage(running, np.array([sum(each.computed for each in running)]), head)

    def may_help(self, sequence: Sequence, before: int, head: Sequence) -> bool:
        return False

    def infinite_hit(self, sequence: Sequence) -> int:
        return 0

    def sharing(self, running: Many[Sequence]) -> tuple[int, int]:
        return 0, 0

    def _usage(self, running: Many[Sequence], tokens: Counts, head: Sequence | None) -> Usage:
        final = sum(each.request.cached for each in running)
        free = self._allocator.free
        external = free if head is not None and self._size(head.request) <= free else 0
        zero = np.zeros_like(tokens)
        return Usage(
            tokens=tokens,
            reserved=final - tokens,
            internal=zero + (self.slots - free - final),
            external=zero + external,
            cached=zero,
            free=zero + (free - external),
        )
