"""A replay loses no request and no slot, takes many steps as one by one, and knows what it holds at every step."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.kv.block_pool import BlockPool
from sim.planner.kv_memory import USES, Memory
from sim.planner.paging import Paged
from sim.planner.replay import Limits, Replay, Stretch
from sim.planner.reservation import Reserved
from sim.planner.step_time import StepTime
from sim.planner.traces import Request
from tests.sim.planner.replay_cases import (
    LONGEST,
    NAMED,
    OneByOne,
    block_sizes,
    limit_values,
    limits,
    paged,
    request_lists,
    reserved,
    watched,
)
from tests.support import examples

memories = st.one_of(paged(), reserved())


@examples(200)
@given(request_lists(), memories, limit_values)
def test_every_request_ends_exactly_once(requests: tuple[Request, ...], make: Callable[[], Memory], limit: Limits) -> None:
    told: list[int] = []
    replay = Replay(requests, make(), StepTime(7, 3, 5), limit, told.append)
    counts = replay.run()
    indices = sorted(sequence.index for sequence in replay.finished)
    fitting = [index for index, request in enumerate(requests) if request.total <= LONGEST]
    assert indices == fitting
    assert (counts.finished, counts.too_long, counts.too_large) == (len(fitting), len(requests) - len(fitting), 0)
    assert sum(told) == len(requests)
    for sequence in replay.finished:
        assert sequence.generated == max(1, sequence.request.output)
        assert sequence.seen == sequence.request.cached
    assert counts.computed_tokens - counts.recomputed_tokens >= 0
    assert not replay.running
    assert not replay.waiting


@examples(200)
@given(request_lists(), memories, limit_values)
def test_slots_are_conserved_at_every_step(requests: tuple[Request, ...], make: Callable[[], Memory], limit: Limits) -> None:
    memory = make()

    def check(stretch: Stretch) -> None:
        uses = np.stack([getattr(stretch.usage, name) for name in USES])
        assert (uses >= 0).all()
        assert (uses.sum(axis=0) == memory.slots).all()
        assert uses.shape[1] == stretch.steps == len(stretch.durations)
        running = stretch.replay.running
        if isinstance(memory, Paged):
            stats = memory.pool.stats()
            assert stats.used + stats.cached + stats.free == memory.pool.num_blocks - 1
            assert stats.used == len({block for sequence in running for block in sequence.block_table})
            assert stats.used * memory.block_size == sum(uses[:3, -1])
            assert stats.cached * memory.block_size == stretch.usage.cached[-1]
        else:
            assert stretch.usage.tokens[-1] == sum(sequence.computed for sequence in running)

    replay = Replay(requests, memory, StepTime(7, 3, 5), limit, watch=check)
    replay.run()
    if isinstance(memory, Paged):
        assert memory.pool.stats().used == 0
    if replay.finished:
        one = replay.finished[0]
        memory.adopt(one)
        assert memory.outstanding(one) <= memory.num_free


@examples(300)
@given(request_lists(), memories, limit_values)
def test_many_steps_at_once_are_one_by_one(requests: tuple[Request, ...], make: Callable[[], Memory], limit: Limits) -> None:
    """Everything is whole numbers, so everything is equal; only the averages are sums of doubles in another order, of at
    most a few hundred terms: relative 1e-12 is generous."""
    fast, slow = watched(requests, make(), limit), watched(requests, make(), limit, OneByOne)
    assert fast.replay.counts == slow.replay.counts
    assert fast.replay.now == slow.replay.now
    for one, other in zip(fast.replay.finished, slow.replay.finished, strict=True):
        assert (one.index, one.admitted) == (other.index, other.admitted)
    for name in USES:
        together, alone = ([getattr(each.usage, name) for each in run.stretches] for run in (fast, slow))
        assert np.array_equal(np.concatenate(together), np.concatenate(alone)) if together else not alone
    durations = [np.concatenate([np.array([], int), *(each.durations for each in run.stretches)]) for run in (fast, slow)]
    assert np.array_equal(*durations)
    assert fast.replay.timeline.means() == pytest.approx(slow.replay.timeline.means(), rel=1e-12)


@examples(100)
@given(request_lists(), paged(), limit_values)
def test_paged_waste_is_below_a_block_a_running_request(
    requests: tuple[Request, ...], make: Callable[[], Paged], limit: Limits
) -> None:
    memory = make()
    for stretch in watched(requests, memory, limit).stretches:
        running = {id(sequence) for sequence, _ in stretch.plan} | {id(sequence) for sequence in stretch.replay.running}
        waste = stretch.usage.reserved + stretch.usage.internal
        assert (waste <= (memory.block_size - 1) * len(running)).all()
        assert (stretch.usage.external == 0).all()


@examples(100)
@given(request_lists(), limit_values, st.integers(1, 5), st.integers(1, 4))
def test_finer_blocks_waste_no_more(requests: tuple[Request, ...], limit: Limits, size: int, factor: int) -> None:
    """Where memory is ample all block sizes give the same steps. (Where it is not, a coarse pool runs fewer requests, and
    their waste is not comparable.)"""
    fine, coarse = (watched(requests, Paged(9999, each), limit) for each in (size, size * factor))
    for one, other in zip(fine.stretches, coarse.stretches, strict=True):
        assert (one.usage.tokens == other.usage.tokens).all()
        waste, more = (each.usage.reserved + each.usage.internal for each in (one, other))
        assert (waste <= more).all()


@examples(150)
@given(request_lists(20), block_sizes, st.integers(0, 40), limit_values)
def test_an_infinite_cache_hits_at_least_as_often(requests: tuple[Request, ...], size: int, spare: int, limit: Limits) -> None:
    counts = watched(requests, Paged(-(-LONGEST // size) + spare, size, NAMED), limit).replay.counts
    assert counts.prefix_hit_tokens <= counts.infinite_hit_tokens
    ample = watched(requests, Paged(99_999, size, NAMED), limit).replay.counts
    assert ample.prefix_hit_tokens == ample.infinite_hit_tokens  # nothing was evicted
    assert ample.prefix_hit_tokens == ample.prompt_tokens - (ample.computed_tokens - _decoded(requests))


def _decoded(requests: tuple[Request, ...]) -> int:
    return sum(request.cached - request.prompt for request in requests if request.total <= LONGEST)


@given(request_lists(), st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_one_after_the_other_hits_what_the_paths_share(requests: tuple[Request, ...], spare: list[int]) -> None:
    """Blocks as wide as the trace's, one request at a time, nothing evicted: the hits can be read off the prefixes."""
    fitting = [request for request in requests if request.total <= LONGEST]
    known: set[int] = set()
    expected = 0
    for request in fitting:
        full = request.prefix[: request.prompt // NAMED]
        hits = next((at for at, node in enumerate(full) if node not in known), len(full))
        expected += NAMED * min(hits, (request.prompt - 1) // NAMED)
        known |= set(full)
    counts = watched(requests, Paged(9999, NAMED, NAMED), limits(sequences=1)).replay.counts
    assert counts.prefix_hit_tokens == expected


@examples(100)
@given(request_lists(), st.integers(1, 5), st.integers(0, LONGEST - 1), limit_values)
def test_reserving_the_maximum_is_paging_with_one_block_a_request(
    requests: tuple[Request, ...], places: int, rest: int, limit: Limits
) -> None:
    slots = places * LONGEST + rest
    for allocator in ("buddy", "first-fit"):  # the model's length is a power of two: a buddy loses nothing
        held = watched(requests, Reserved("max", slots, LONGEST, allocator), limit)
        blocks = watched(requests, Paged(places, LONGEST), limit)
        assert [each.index for each in held.replay.finished] == [each.index for each in blocks.replay.finished]
        for one, other in zip(held.stretches, blocks.stretches, strict=True):
            for name in ("tokens", "reserved", "internal"):
                assert np.array_equal(getattr(one.usage, name), getattr(other.usage, name)), name


@given(request_lists(), memories, limit_values)
def test_the_same_again_is_the_same(requests: tuple[Request, ...], make: Callable[[], Memory], limit: Limits) -> None:
    one, other = (watched(requests, make(), limit).replay for _ in range(2))
    assert one.counts == other.counts
    assert one.timeline.means() == other.timeline.means()
    assert all((a == b).all() for a, b in zip(one.timeline.series(9).values.values(),
                                              other.timeline.series(9).values.values(), strict=True))  # fmt: skip


@given(request_lists(), memories, limit_values, st.integers(1, 30))
def test_a_series_has_the_integrals_of_the_whole(
    requests: tuple[Request, ...], make: Callable[[], Memory], limit: Limits, count: int
) -> None:
    """Doubles: sums of a few hundred terms."""
    memory = make()
    replay = watched(requests, memory, limit).replay
    timeline, series, means = replay.timeline, replay.timeline.series(count), replay.timeline.means()
    assert timeline.end == replay.now
    for name in ("tokens", "reserved", "internal", "external", "running", "waiting"):  # none of them outlasts the requests
        total = series.values[name].sum() * timeline.end / count
        assert total == pytest.approx(means[name] * timeline.busy, rel=1e-9, abs=1e-6), name
    if timeline.end:
        assert sum(series.values[name] for name in USES) == pytest.approx(np.full(count, memory.slots), rel=1e-9)
        assert series.values["preemptions"][-1] == replay.counts.preemptions
    assert (np.diff(series.values["preemptions"]) >= 0).all()
    assert len(series.seconds) == count


# By hand.


def one_at(time: int, prompt: int, output: int) -> Request:
    return Request(time * 1e-12, prompt, output)


def test_a_step_takes_what_reading_or_multiplying_takes() -> None:
    """Prompt 10: max(100 + 2 * 10, 30 * 10) = 300. Then 11 and 12 cached: 122 and 124. The last token is never fed."""
    run = watched((one_at(0, 10, 3),), Paged(9, 4), limits(), time=StepTime(100, 2, 30))
    assert [duration for each in run.stretches for duration in each.durations] == [300, 122, 124]
    assert (run.replay.now, run.replay.counts.steps, run.replay.counts.computed_tokens) == (546, 3, 12)
    uses = run.stretches[-1].usage
    assert (uses.tokens.tolist(), uses.reserved.tolist(), uses.internal.tolist()) == ([11, 12], [1, 0], [0, 0])


def test_a_prompt_is_fed_in_pieces_beside_the_decoding_ones() -> None:
    run = watched((one_at(0, 3, 9), one_at(0, 10, 1)), Paged(9, 4), limits(tokens=5))
    counts = [[(sequence.index, count) for sequence, count in each.plan] for each in run.stretches]
    assert counts[:3] == [[(0, 3), (1, 2)], [(0, 1), (1, 4)], [(0, 1), (1, 4)]]


def test_idle_time_is_no_busy_time() -> None:
    run = watched((one_at(0, 1, 1), one_at(1000, 1, 1)), Paged(9, 4), limits(), time=StepTime(10, 0, 0)).replay
    assert (run.timeline.busy, run.timeline.end) == (20, 1010)
    assert run.timeline.means()["running"] == 1
    assert run.timeline.series(101).values["running"].tolist() == [1.0, *[0.0] * 99, 1.0]


def test_two_that_fit_alone_but_not_together() -> None:
    """Blocks of 4, 10 of them. Both start (3 + 3 blocks), grow to 5 + 5, and the newer one gives its own back."""
    run = watched((one_at(0, 10, 20), one_at(0, 10, 20)), Paged(10, 4), limits())
    counts = run.replay.counts
    assert [each.index for each in run.replay.finished] == [0, 1]
    assert counts.preemptions == 1
    assert counts.recomputed_tokens == 20  # all that it had when the older one took position 20
    assert counts.computed_tokens == 2 * 29 + 20


def test_what_a_preempted_one_finds_of_itself_is_no_hit() -> None:
    run = watched((one_at(0, 10, 20), one_at(0, 10, 20)), Paged(10, 4, NAMED), limits()).replay
    assert run.counts.preemptions == 1
    assert run.counts.recomputed_tokens < 20
    assert run.counts.prefix_hit_tokens == run.counts.infinite_hit_tokens == 0


def test_two_that_each_need_most_of_the_memory_run_one_after_the_other() -> None:
    """The second is not let in on the strength of blocks that the first has not taken yet."""
    run = watched((one_at(0, 48, 4), one_at(0, 48, 4)), Paged(20, 4), limits(tokens=16))
    assert all(len(each.replay.running) <= 1 for each in run.stretches)
    assert run.replay.counts.preemptions == 0


def test_external_fragmentation_is_what_the_next_one_cannot_use() -> None:
    """40 slots: 10, 10, 10, 10 with different ends; when the first and the third are gone 20 are free in two holes."""
    requests = (one_at(0, 8, 3), one_at(0, 4, 7), one_at(0, 8, 3), one_at(0, 4, 7), one_at(1, 15, 2))
    run = watched(requests, Reserved("oracle", 40, LONGEST, "first-fit"), limits())
    external = np.concatenate([each.usage.external for each in run.stretches])
    assert set(external.tolist()) == {0, 20}


def test_free_slots_that_are_too_few_are_no_fragmentation() -> None:
    """40 slots: 30 are held and 10 free, in one piece; the next one wants 16."""
    run = watched((one_at(0, 25, 6), one_at(0, 15, 2)), Reserved("oracle", 40, LONGEST, "first-fit"), limits())
    first = run.stretches[0]
    assert (first.usage.external.tolist(), first.usage.free.tolist()) == ([0], [10])


def test_a_request_as_long_as_the_model_is_taken() -> None:
    run = watched((one_at(0, 60, 4), one_at(0, 60, 5)), Paged(99, 4), limits())
    assert (run.replay.counts.finished, run.replay.counts.too_long) == (1, 1)


def test_one_that_arrives_as_a_step_begins_is_in_it() -> None:
    """Steps of 11, 12 and 13; the second comes at 36, with the fourth."""
    run = watched((one_at(0, 1, 6), one_at(36, 2, 1)), Paged(9, 4), limits(), time=StepTime(10, 1, 0))
    plans = [[(sequence.index, count) for sequence, count in each.plan] for each in run.stretches for _ in range(each.steps)]
    assert plans == [[(0, 1)], [(0, 1)], [(0, 1)], [(0, 1), (1, 2)], [(0, 1)], [(0, 1)]]


def test_what_no_node_names_is_no_other_requests() -> None:
    """The second request's own blocks and the trace's nodes are numbered apart: node 1 holds nothing of request 1."""
    first = Request(0.0, 4, 9)  # no prefix: blocks of its own
    second = Request(1e-6, 9, 1, (0, 0, 0))
    for requests in ((first, second), (second, first)):
        counts = watched(requests, Paged(99, 4, NAMED), limits()).replay.counts
        assert counts.prefix_hit_tokens == 0


def test_table_entries_that_sharing_saves() -> None:
    """Three prompts of 8 with the same 2 blocks: of 6 entries 4 are saved, and 2 blocks are shared."""
    requests = tuple(Request(at * 1e-12, 9, 3, (0, 1, 2 + at)) for at in range(3))
    counts = watched(requests, Paged(99, 4, NAMED), limits(), time=StepTime(1, 0, 0)).replay.counts
    assert (counts.peak_shared_blocks, counts.peak_saved_blocks) == (2, 4)


def test_a_request_that_can_never_fit_is_refused_and_the_others_are_not() -> None:
    requests = (one_at(0, 60, 10), one_at(0, 30, 10), one_at(0, 5, 2))
    for memory in (Paged(8, 4), Reserved("oracle", 32, LONGEST, "first-fit")):
        counts = watched(requests, memory, limits()).replay.counts
        assert (counts.too_long, counts.too_large, counts.finished) == (1, 1, 1)


def test_nothing_but_requests_that_never_fit() -> None:
    run = watched((one_at(5, 60, 10),), Paged(8, 4), limits()).replay
    assert (run.counts.refused, run.timeline.busy, run.timeline.end) == (1, 0, 5)
    assert set(run.timeline.means().values()) == {0.0}
    assert run.timeline.series(3).values["free"] == pytest.approx([32.0] * 3)


def test_blocks_wider_than_the_nodes_of_the_trace() -> None:
    """Blocks of 8 over nodes of 4: two prompts that agree in 3 nodes share one block."""
    first, second = Request(0.0, 16, 1, (0, 1, 2, 3)), Request(1e-6, 16, 1, (0, 1, 2, 4))
    counts = watched((first, second), Paged(99, 8, 4), limits()).replay.counts
    assert counts.prefix_hit_tokens == counts.infinite_hit_tokens == 8


def test_the_pool_is_the_runtimes() -> None:
    assert type(Paged(3, 4).pool) is BlockPool


def test_one_that_waits_is_let_in_when_another_has_computed_its_prefix() -> None:
    """12 blocks of 4. The second needs 9; of the 6 it shares 5 are there when first asked, a step later all."""
    shared = (0, 1, 2, 3, 4, 5)
    first, second = Request(0.0, 32, 5, (*shared, 6, 7)), Request(0.0, 32, 5, (*shared, 8, 9))
    run = watched((first, second), Paged(12, 4, NAMED), limits(tokens=20))
    plans = [[(sequence.index, count) for sequence, count in each.plan] for each in run.stretches[:3]]
    assert plans == [[(0, 20)], [(0, 12)], [(0, 1), (1, 8)]]
