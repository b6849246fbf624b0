"""A trace run through the runtime's rules, without a model: who runs, who waits, who is preempted, and what memory holds.

The rules are the runtime's own, nanokv.scheduler, as its engine follows them. Steps in which every sequence gets one token
and nobody comes, goes or is preempted are taken together: it changes no result.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nanokv.errors import NanoKVError
from nanokv.scheduler import Scheduler
from sim.planner.kv_memory import Memory, Sequence, Usage
from sim.planner.step_time import PICOSECONDS, StepTime
from sim.planner.timeline import Timeline
from sim.planner.traces import Request


@dataclass(frozen=True)
class Limits:
    """`tokens` a step at most, `sequences` running at most, `length`: tokens of a request at most."""

    tokens: int
    sequences: int
    length: int


@dataclass
class Counts:
    """What happened. Requests that are longer than the model or than the memory are `refused`."""

    requests: int
    finished: int = 0
    too_long: int = 0  # for the model
    too_large: int = 0  # for the memory
    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # of requests that were not refused
    prefix_hit_tokens: int = 0
    infinite_hit_tokens: int = 0  # that a cache which never evicts would have found at the same moments
    preemptions: int = 0
    peak_shared_blocks: int = 0
    peak_saved_blocks: int = 0  # table entries that stand for a block which another table has too
    waited: int = 0  # picoseconds from arrival to the first admission, all together

    @property
    def refused(self) -> int:
        return self.too_long + self.too_large


@dataclass(frozen=True)
class Stretch:
    """`steps` equal steps, told to a watcher before the finished sequences are let go."""

    replay: "Replay"
    plan: list[tuple[Sequence, int]]
    steps: int
    durations: np.ndarray
    usage: Usage


@dataclass(eq=False)
class Replay:
    """Runs `requests` (in order of arrival) on an empty `memory`. `ended` is called with the number that have just ended,
    `watch` after every stretch of steps."""

    requests: tuple[Request, ...]
    memory: Memory
    time: StepTime
    limits: Limits
    ended: Callable[[int], object] = lambda count: None
    watch: Callable[[Stretch], object] | None = None
    timeline: Timeline = field(default_factory=Timeline)
    now: int = 0  # picoseconds

    def __post_init__(self) -> None:
        self.counts = Counts(len(self.requests))
        self._scheduler: Scheduler[Sequence] = Scheduler(self.memory, self.limits.tokens, self.limits.sequences)
        self.running, self.waiting = self._scheduler.running, self._scheduler.waiting
        self.finished: list[Sequence] = []
        self._coming = deque(
            Sequence(request, index, round(request.arrival * PICOSECONDS)) for index, request in enumerate(self.requests)
        )
        self._stuck = False  # the first that waits was refused admission, and nothing has changed that could help it

    def run(self) -> Counts:
        """To the end of the last request."""
        while self._coming or self.waiting or self.running:
            self._arrive()
            if self.running or self.waiting:
                if not self._decode_together():
                    self._step()
            elif self._coming:
                self._rest()
        return self.counts

    def _rest(self) -> None:
        """Until the next request is there."""
        gap = self._coming[0].arrival - self.now
        usage = self.memory.usage([], None)
        self.timeline.add(self.now, np.array([gap]), usage, 0, 0, self.counts.preemptions)
        self.now += gap

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrival <= self.now:
            sequence = self._coming.popleft()
            if sequence.request.total > self.limits.length:
                self.counts.too_long += 1
            elif not self.memory.can_ever_hold(sequence.request):
                self.counts.too_large += 1
            else:
                self.counts.prompt_tokens += sequence.request.prompt
                self.waiting.append(sequence)
                continue
            self.ended(1)

    def _step(self) -> None:
        """One step as Engine.step takes it."""
        plan = self._schedule()
        if not plan:  # every waiting one fits alone, so one can always go on
            raise NanoKVError("the replay found nothing that fits in its memory: this is a fault of nanokv")
        before = [sequence.computed for sequence, _ in plan]
        for sequence, count in plan:
            self.memory.extend(sequence, count)
        for sequence, count in plan:
            sequence.computed += count
            self.memory.commit(sequence)
        tokens = sum(count for _, count in plan)
        duration = self.time.step(tokens, sum(sequence.computed for sequence, _ in plan))
        if self._stuck and any(
            self.memory.may_help(sequence, old, self.waiting[0]) for (sequence, _), old in zip(plan, before, strict=True)
        ):
            self._stuck = False
        self._record(plan, before, 1, np.array([duration]), self.memory.usage(self.running, self._head))
        self._advance([sequence for sequence, _ in plan if sequence.pending == 0], 1)

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """Who gets how many tokens now. One that was refused is not asked again before something may have changed that."""
        before = self.counts.preemptions
        plan = self._scheduler.schedule(admit=not self._stuck)
        self.counts.preemptions = self._scheduler.preemptions
        self._stuck = self._scheduler.refused or (self._stuck and self.counts.preemptions == before)
        for sequence, _ in plan:
            if sequence.admitted is None:
                self._note_admission(sequence)
        return plan

    def _note_admission(self, sequence: Sequence) -> None:
        sequence.admitted = self.now
        self.counts.waited += self.now - sequence.arrival
        self.counts.prefix_hit_tokens += sequence.computed
        self.counts.infinite_hit_tokens += self.memory.infinite_hit(sequence)

    @property
    def _head(self) -> Sequence | None:
        """The request that waits for memory."""
        return self.waiting[0] if self._stuck else None

    def _decode_together(self) -> bool:
        """The steps until something happens, where every running sequence decodes; False where that is none."""
        running = self.running
        if not running or len(running) > self.limits.tokens or (self._scheduler.has_place and not self._stuck):
            return False
        if any(sequence.pending > 1 for sequence in reversed(running)):
            return False
        computed = np.fromiter((sequence.computed for sequence in running), np.int64, len(running))
        durations = self._durations_until_arrival(int(computed.sum()), self._left_to_first_end())
        steps = self.memory.reach(computed, len(durations))
        if steps == 0:
            return False
        before = computed.tolist()
        usage = self.memory.decode(running, computed, steps, self._head)
        for sequence in running:
            sequence.computed += steps
            self.memory.commit(sequence)
        self._record([(sequence, 1) for sequence in running], before, steps, durations[:steps], usage)
        self._advance(running, steps)
        return True

    def _left_to_first_end(self) -> int:
        return min(sequence.request.output - sequence.generated for sequence in self.running)

    def _durations_until_arrival(self, cached: int, most: int) -> np.ndarray:
        """Of at most `most` decode steps those that begin before the next request is there: [n], n >= 1."""
        count = len(self.running)
        gap = self._coming[0].arrival - self.now if self._coming else None
        if gap is not None:
            most = min(most, -(-gap // max(1, self.time.step(count, cached + count))))  # later steps take no less
        durations = self.time.steps(count, cached + count * np.arange(1, most + 1))
        if gap is not None:
            begins = durations.cumsum() - durations
            durations = durations[: int(np.searchsorted(begins, gap))]
        return durations

    def _record(
        self, plan: list[tuple[Sequence, int]], before: list[int], steps: int, durations: np.ndarray, usage: Usage
    ) -> None:
        """Counts what a stretch did; `before` are the tokens that each sequence of the plan had computed."""
        counts = self.counts
        counts.steps += steps
        for (sequence, count), old in zip(plan, before, strict=True):
            counts.computed_tokens += count * steps
            counts.recomputed_tokens += max(0, min(sequence.seen, sequence.computed) - old)
            sequence.seen = max(sequence.seen, sequence.computed)
        shared, saved = self.memory.sharing(self.running)
        counts.peak_shared_blocks = max(counts.peak_shared_blocks, shared)
        counts.peak_saved_blocks = max(counts.peak_saved_blocks, saved)
        self.timeline.add(self.now, durations, usage, len(self.running), len(self.waiting), counts.preemptions)
        self.now += int(durations.sum())
        if self.watch:
            self.watch(Stretch(self, plan, steps, durations, usage))

    def _advance(self, sequences: list[Sequence], tokens: int) -> None:
        """These have made `tokens` more; those that have made all leave."""
        ended = []
        for sequence in sequences:
            sequence.generated += tokens
            if sequence.generated >= sequence.request.output:
                ended.append(sequence)
        for sequence in ended:
            self.memory.release(sequence)
            sequence.keys = []  # a long trace has millions
            self.finished.append(sequence)
        if ended:
            self._stuck = False
            gone = set(map(id, ended))
            self.running[:] = [sequence for sequence in self.running if id(sequence) not in gone]
            self.counts.finished += len(ended)
            self.ended(len(ended))
