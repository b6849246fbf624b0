"""Where the requests of a replay keep their K and V: what the scheduler asks of a memory (reservation.py, paging.py).

Every memory says, step by step, what its slots (room for one token's K and V) hold:

    tokens    states that were computed; a block that several requests share counts once
    reserved  nothing yet: a token that the request still comes to will be there
    internal  held by a request that will never use it: internal fragmentation
    external  free, together enough for the request at the head of the queue, but in holes that are too small for it
    cached    free, but still holding a prefix (blocks only)
    free      the rest; together they are all slots
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields
from typing import Protocol, TypeAlias

import numpy as np

from nanokv.kv.prefix import BlockKey
from nanokv.scheduler import Memory as SchedulerMemory
from sim.planner.traces import Request

Counts: TypeAlias = np.ndarray  # int64


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the engine: of `known` tokens (prompt and output so far) `computed` have their K and V."""

    request: Request
    index: int  # in order of arrival
    arrival: int  # picoseconds
    generated: int = 0
    computed: int = 0
    seen: int = 0  # tokens computed once, before any preemption
    admitted: int | None = None  # picoseconds, the first time
    block_table: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    published: int = 0  # blocks

    @property
    def known(self) -> int:
        return self.request.prompt + self.generated

    @property
    def pending(self) -> int:
        return self.request.prompt + self.generated - self.computed


@dataclass(frozen=True)
class Usage:
    """Slots by what they hold, at the end of each of n steps: each [n] int64."""

    tokens: Counts
    reserved: Counts
    internal: Counts
    external: Counts
    cached: Counts
    free: Counts


USES = tuple(each.name for each in fields(Usage))


class Memory(SchedulerMemory[Sequence], Protocol):
    """What the scheduler asks (units are blocks where there are blocks), and the replay. `slots` tokens fit in all."""

    slots: int

    def can_ever_hold(self, request: Request) -> bool:
        """Whether the request fits in the empty memory."""
        ...

    def extend(self, sequence: Sequence, count: int) -> None:
        """Makes room for `count` more tokens."""
        ...

    def commit(self, sequence: Sequence) -> None:
        """The tokens that extend() made room for are computed."""
        ...

    def reach(self, computed: Counts, steps: int) -> int:
        """For how many of `steps` steps of one token each there is room. computed [R]."""
        ...

    def decode(self, running: Many[Sequence], computed: Counts, steps: int, head: Sequence | None) -> Usage:
        """Room for `steps` steps of one token each, and what the memory holds at the end of each. computed [R]."""
        ...

    def infinite_hit(self, sequence: Sequence) -> int:
        """Tokens of a prefix that adopt() would find if nothing had ever been evicted."""
        ...

    def sharing(self, running: Many[Sequence]) -> tuple[int, int]:
        """Blocks that several sequences hold, and how many blocks more it would take if none were shared."""
        ...

    def usage(self, running: Many[Sequence], head: Sequence | None) -> Usage:
        """What the memory holds now; n is 1. `head` is the first that waits."""
        ...

    def may_help(self, sequence: Sequence, before: int, head: Sequence) -> bool:
        """Whether what `sequence` has computed beyond `before` tokens can be a prefix of `head`."""
        ...
