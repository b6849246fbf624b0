"""The scheduler's rules, on a memory of counts: who goes first, who is let in, who gives back."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import UsageError
from nanokv.scheduler import Scheduler
from tests.support import examples


@dataclass(eq=False)
class Job:
    """`known` tokens, of which `computed` have their K and V; `held` units."""

    name: str
    known: int
    computed: int = 0
    held: int = 0

    @property
    def pending(self) -> int:
        return self.known - self.computed


class Units:
    """A unit is a token."""

    def __init__(self, total: int):
        self.num_free = total

    def needed(self, job: Job, count: int) -> int:
        return job.computed + count - job.held

    def outstanding(self, job: Job) -> int:
        return job.known + 1 - job.held

    def adopt(self, job: Job) -> None:
        assert job.held == job.computed == 0

    def release(self, job: Job) -> None:
        self.num_free += job.held
        job.held = job.computed = 0

    def compute(self, plan: list[tuple[Job, int]]) -> None:
        """One step, in which every job that has nothing pending any more makes a token."""
        for job, count in plan:
            self.num_free -= count
            job.held += count
            job.computed += count
            job.known += job.pending == 0


def scheduler(total: int, waiting: list[Job], tokens: int = 100, sequences: int = 100) -> Scheduler[Job]:
    made: Scheduler[Job] = Scheduler(Units(total), tokens, sequences)
    made.waiting.extend(waiting)
    return made


def step(rules: Scheduler[Job], **more: bool) -> list[tuple[str, int]]:
    plan = rules.schedule(**more)
    rules.memory.compute(plan)  # type: ignore[attr-defined]
    return [(job.name, count) for job, count in plan]


def test_the_oldest_first_within_the_budget() -> None:
    rules = scheduler(100, [Job("a", 3), Job("b", 10)], tokens=5)
    assert [step(rules) for _ in range(4)] == [
        [("a", 3), ("b", 2)], [("a", 1), ("b", 4)], [("a", 1), ("b", 4)], [("a", 1), ("b", 1)],
    ]  # fmt: skip


def test_no_more_than_may_run() -> None:
    rules = scheduler(100, [Job(name, 2) for name in "abc"], sequences=2)
    assert step(rules) == [("a", 2), ("b", 2)]
    assert not rules.has_place
    rules.running.pop()
    assert step(rules) == [("a", 1), ("c", 2)]


def test_a_waiting_one_needs_room_for_all_it_knows_and_one_more() -> None:
    assert step(scheduler(5, [Job("a", 5)])) == []
    assert step(scheduler(6, [Job("a", 5)])) == [("a", 5)]


def test_what_the_running_ones_still_need_is_not_given_away() -> None:
    """Of 12 units a holds 4, takes one now and will need one for its next token: 6 are left for b and its next."""
    for size, expected in ((5, [("a", 1), ("b", 5)]), (6, [("a", 1)])):
        rules = scheduler(12, [Job("a", 4)])
        assert step(rules) == [("a", 4)]
        rules.waiting.append(Job("b", size))
        assert step(rules) == expected
        assert rules.refused == (size == 6)


def test_who_came_last_gives_its_units_back_and_waits_before_all_others() -> None:
    rules = scheduler(12, [Job("a", 5), Job("b", 4)])
    step(rules)
    rules.waiting.append(Job("c", 1))
    for job in rules.running:
        job.known += 2
    assert step(rules) == [("a", 3)]  # 3 units free, and a takes them: none for b
    assert [job.name for job in rules.waiting] == ["b", "c"]
    assert (rules.preemptions, rules.waiting[0].computed, rules.memory.num_free) == (1, 0, 4)


def test_nobody_is_let_in_while_another_is_preempted() -> None:
    """c would fit beside a when b is gone."""
    rules = scheduler(12, [Job("a", 4), Job("b", 5)])
    step(rules)
    rules.running[0].known += 3
    rules.waiting.append(Job("c", 1))
    assert step(rules) == [("a", 4)]
    assert [job.name for job in rules.running] == ["a"]


def test_first_come_first_served() -> None:
    rules = scheduler(10, [Job("large", 20), Job("small", 1)])
    assert step(rules) == []
    assert rules.refused
    rules.waiting.popleft()
    assert step(rules) == [("small", 1)]
    assert not rules.refused


def test_nobody_is_let_in_where_none_should() -> None:
    rules = scheduler(10, [Job("a", 1)])
    assert step(rules, admit=False) == []
    assert not rules.refused
    assert step(rules) == [("a", 1)]


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 1), (1, 0), (-1, 1)])
def test_limits_below_one(tokens: int, sequences: int) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        scheduler(1, [], tokens, sequences)


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=8), st.integers(0, 30),
       st.integers(1, 20), st.integers(1, 5))  # fmt: skip
def test_every_one_ends_and_no_unit_is_given_twice(
    jobs: list[tuple[int, int]], spare: int, tokens: int, sequences: int
) -> None:
    """Jobs of (prompt, output) in a memory that holds the largest alone."""
    ends = {str(i): prompt + output for i, (prompt, output) in enumerate(jobs)}
    total = max(ends.values()) + 1 + spare
    rules = scheduler(total, [Job(str(i), prompt) for i, (prompt, _) in enumerate(jobs)], tokens, sequences)
    order = []
    for _ in range(2000):
        if not rules.running and not rules.waiting:
            break
        plan = rules.schedule()
        assert plan
        assert sum(count for _, count in plan) <= tokens
        assert all(count > 0 for _, count in plan)
        assert sum(rules.memory.needed(job, count) for job, count in plan) <= rules.memory.num_free
        assert len(rules.running) <= sequences
        rules.memory.compute(plan)  # type: ignore[attr-defined]
        assert rules.memory.num_free + sum(job.held for job in rules.running) == total
        for job in [job for job in rules.running if job.known >= ends[job.name]]:
            rules.memory.release(job)
            rules.running.remove(job)
            order.append(job.name)
    assert sorted(order) == sorted(ends)
