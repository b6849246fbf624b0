"""Who computes how many tokens in a step: continuous batching as rules over counts, without a model.

The oldest are served first, each with all that it has pending, within the step's budget. When memory runs out, the newest
gives its own back and waits at the head of the queue, to be computed again. A waiting one is let in, first come, first
served, when all its known tokens and one more fit beside what the running ones still need for theirs: two that each hold
half of what they need would wait for each other. `nanokv.engine` runs these rules on a model, the planner's replay on a
trace of requests.

Memory is counted in units: blocks, where there are blocks.
"""

from collections import deque
from typing import Generic, Protocol, TypeVar

from nanokv.errors import UsageError


class Schedulable(Protocol):
    """A request, as far as the rules know it."""

    @property
    def pending(self) -> int:
        """Known tokens (of the prompt and the output so far) whose K and V are not there yet."""
        ...


S = TypeVar("S", bound=Schedulable)
S_contra = TypeVar("S_contra", contravariant=True)


class Memory(Protocol[S_contra]):
    """What the rules ask of a memory."""

    @property
    def num_free(self) -> int:
        """Units that a step may take."""
        ...

    def needed(self, sequence: S_contra, count: int) -> int:
        """Units that a step of `count` tokens takes."""
        ...

    def outstanding(self, sequence: S_contra) -> int:
        """Units that a sequence still takes before its next token is known, and for that token."""
        ...

    def adopt(self, sequence: S_contra) -> None:
        """Gives a waiting sequence, which holds nothing, what is there for it before it computes: a cached prefix, say."""
        ...

    def release(self, sequence: S_contra) -> None:
        """Takes everything from a sequence."""
        ...


class Scheduler(Generic[S]):
    """`running` is in the order of admission, `waiting` in that of arrival with preempted ones before; both are changed in
    place. A step feeds `max_tokens` at most, and `max_sequences` are let in at once at most; UsageError below 1."""

    def __init__(self, memory: Memory[S], max_tokens: int, max_sequences: int):
        if max_tokens < 1 or max_sequences < 1:
            raise UsageError("max_batch_tokens and max_sequences must be at least 1")
        self.memory, self.max_tokens, self.max_sequences = memory, max_tokens, max_sequences
        self.waiting: deque[S] = deque()
        self.running: list[S] = []
        self.preemptions = 0
        self.refused = False  # whether the last schedule() found no memory for the first that waits

    @property
    def has_place(self) -> bool:
        """Whether the first that waits may be let in as far as numbers go."""
        return bool(self.waiting) and len(self.running) < self.max_sequences

    def schedule(self, admit: bool = True) -> list[tuple[S, int]]:
        """Which sequences get how many tokens now: every one within the units that are free. Nobody is let in while another
        is preempted, or where `admit` is False. Empty when nothing can be done."""
        memory, before = self.memory, self.preemptions
        plan: list[tuple[S, int]] = []
        budget, reserved, at = self.max_tokens, 0, 0
        self.refused = False
        while at < len(self.running):
            sequence = self.running[at]
            count = min(sequence.pending, budget)
            if count == 0:
                break
            # asked again after every preemption: who shares a block with the victim need not copy it any more
            while (needed := memory.needed(sequence, count)) > memory.num_free - reserved:
                if self.preempt() is sequence:
                    break
            else:
                reserved += needed
                budget -= count
                plan.append((sequence, count))
            at += 1
        while admit and budget and self.preemptions == before and self.has_place:
            sequence = self.waiting[0]
            if not self._fits(sequence, reserved):
                self.refused = True
                break
            self.running.append(self.waiting.popleft())
            count = min(sequence.pending, budget)
            reserved += memory.needed(sequence, count)
            budget -= count
            plan.append((sequence, count))
        return plan

    def _fits(self, sequence: S, reserved: int) -> bool:
        """Whether a waiting sequence may run; if not, it holds nothing. `reserved` units are promised to the step's others."""
        memory = self.memory
        memory.adopt(sequence)
        owed = sum(map(memory.outstanding, self.running))
        if memory.outstanding(sequence) <= memory.num_free - max(reserved, owed):
            return True
        memory.release(sequence)
        return False

    def preempt(self, place: int = -1) -> S:
        """Takes everything from a running sequence, the newest if no place is given; it waits at the head of the queue."""
        sequence = self.running.pop(place)
        self.memory.release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence
