"""Reservations: runs never overlap, nothing is lost, and what is given back can be taken again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import UsageError
from sim.planner.reservation import ALLOCATORS, RULES, Buddy, FirstFit, get_allocator
from sim.planner.traces import Request
from tests.support import examples


def largest_hole(owners: list[int | None]) -> int:
    best = run = 0
    for owner in owners:
        run = run + 1 if owner is None else 0
        best = max(best, run)
    return best


@examples(150)
@given(
    st.sampled_from(sorted(ALLOCATORS)), st.integers(1, 70),
    st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 99)), max_size=60),
)  # fmt: skip
def test_against_a_map_of_every_slot(name: str, slots: int, moves: list[tuple[bool, int, int]]) -> None:
    memory = get_allocator(name, slots)
    owners: list[int | None] = [None] * slots
    runs: list[tuple[int, int]] = []
    for take, size, which in moves:
        if take:
            width, hole = memory.rounded(size), largest_hole(owners)
            start = memory.take(size)
            if start is None:
                assert name == "buddy" or hole < size  # first-fit finds every hole; a buddy needs an aligned one
                continue
            assert owners[start : start + width] == [None] * width
            assert name == "first-fit" or start % width == 0
            owners[start : start + width] = [len(runs)] * width
            runs.append((start, size))
        elif runs:
            start, size = runs.pop(which % len(runs))
            memory.give(start, size)
            owners[start : start + memory.rounded(size)] = [None] * memory.rounded(size)
        assert memory.free == owners.count(None)
    for start, size in runs:
        memory.give(start, size)
    assert memory.free == slots
    whole = slots if name == "first-fit" else 1 << slots.bit_length() - 1
    assert memory.take(whole) == 0


@given(st.sampled_from(sorted(ALLOCATORS)), st.integers(1, 300), st.integers(1, 300))
def test_what_can_ever_fit_fits_in_the_empty_memory(name: str, slots: int, size: int) -> None:
    memory = get_allocator(name, slots)
    assert memory.can_ever(size) == (memory.take(size) is not None)


@given(st.integers(0, 5000), st.integers(0, 12))
def test_a_buddy_holds_as_many_powers_of_two_as_there_is_room_for(slots: int, order: int) -> None:
    memory = Buddy(slots)
    taken = 0
    while memory.take(1 << order) is not None:
        taken += 1
    assert taken == slots >> order


def test_a_hole_between_two_runs_is_external_fragmentation() -> None:
    memory = FirstFit(10)
    starts = [memory.take(2) for _ in range(5)]
    assert starts == [0, 2, 4, 6, 8]
    memory.give(2, 2)
    memory.give(6, 2)
    assert memory.free == 4
    assert memory.take(3) is None
    memory.give(4, 2)
    assert memory.take(3) == 2  # the three holes have joined


def test_rounding_of_a_buddy() -> None:
    assert [Buddy(64).rounded(size) for size in (1, 2, 3, 4, 5, 33)] == [1, 2, 4, 4, 8, 64]
    assert FirstFit(64).rounded(33) == 33


@pytest.mark.parametrize(("prompt", "output", "expected"), [
    (100, 25, {"max": 2048, "pow2": 132, "oracle": 124}),  # the paper's example: 25 tokens reserve 32
    (100, 32, {"max": 2048, "pow2": 132, "oracle": 131}),
    (100, 1, {"max": 2048, "pow2": 101, "oracle": 100}),
    (100, 0, {"max": 2048, "pow2": 101, "oracle": 100}),
    (2000, 33, {"max": 2048, "pow2": 2048, "oracle": 2032}),  # no more than the model's length
])  # fmt: skip
def test_rules(prompt: int, output: int, expected: dict[str, int]) -> None:
    request = Request(0.0, prompt, output)
    assert {name: rule(request, 2048) for name, rule in RULES.items()} == expected


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_every_rule_reserves_what_the_request_needs(prompt: int, output: int) -> None:
    request = Request(0.0, prompt, output)
    sizes = {name: rule(request, 2000) for name, rule in RULES.items()}
    assert request.cached == sizes["oracle"] <= sizes["pow2"] <= sizes["max"]
    assert sizes["pow2"] <= prompt + max(1, 2 * output)


def test_unknown_allocator() -> None:
    with pytest.raises(UsageError, match="unknown allocator 'slab': choose one of buddy, first-fit"):
        get_allocator("slab", 8)
