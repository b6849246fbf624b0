"""An independent check of the counting: address traces of attention, written here as plain loops over rows, through an LRU
cache that knows nothing of tiles or tensors.

A count is of explicit moves: a tile is loaded when the algorithm says so and nothing outlives its use. A cache of the size
of SRAM decides by recency instead. It can do worse, because a tile streaming in pushes out the rows that the algorithm
would keep; given room for two working sets it keeps those, and may find leftovers of earlier tiles that the algorithm
loads again. So a count lies between the cache with that room (or all room there is) and the cache of exactly SRAM's size;
docs/simulator.md says the same to readers. Rows are one cache line: D = 32 elements of float16.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.gpus import get_gpu
from sim.memory import Moved
from sim.schedules import get_schedule
from sim.shape import Shape, TileSize
from tests.sim.lines import LINE, traffic

ROW = LINE  # 32 float16
Trace = Iterator[tuple[str, int, int]]


def at(tensor: int, row: int, offset: int = 0) -> int:
    """An address: tensors lie far apart."""
    return (tensor << 24) + row * ROW + offset


Q, K, V, O = range(4)  # noqa: E741 - the tensor's name
S, P = 8, 12


def flash2_trace(n: int, rows: int, keys: int, causal: bool) -> Trace:
    """Row by row: scores of a query with the tile's keys, then their values; the output at the end."""
    for i in range(0, n, rows):
        top = min(i + rows, n)
        for j in range(0, top if causal else n, keys):
            tile = range(j, min(j + keys, n))
            for r in range(i, top):
                yield "r", at(Q, r), ROW
                yield from (("r", at(K, c), ROW) for c in tile)
            for _ in range(i, top):
                yield from (("r", at(V, c), ROW) for c in tile)
        yield from (("w", at(O, r), ROW) for r in range(i, top))


def naive_trace(n: int) -> Trace:
    """Three kernels, a row of S at a time; an element of S is two bytes."""
    for r in range(n):
        yield "r", at(Q, r), ROW
        for c in range(n):
            yield "r", at(K, c), ROW
        yield "w", (S << 24) + r * 2 * n, 2 * n
    for r in range(n):
        yield "r", (S << 24) + r * 2 * n, 2 * n
        yield "w", (P << 24) + r * 2 * n, 2 * n
    for r in range(n):
        yield "r", (P << 24) + r * 2 * n, 2 * n
        for c in range(n):
            yield "r", at(V, c), ROW
        yield "w", at(O, r), ROW


def shape_of(n: int, causal: bool = False) -> Shape:
    return Shape(n, heads=1, head_dim=32, causal=causal)


def without_statistics(counts_of: dict[str, Moved]) -> int:
    """Bytes of Q, K, V, S, P and O: the traces have no log-sum-exp."""
    return sum(moved.hbm for name, moved in counts_of.items() if name != "L")


@given(st.sampled_from([96, 128, 160]), st.sampled_from([8, 16]), st.sampled_from([8, 16, 32]), st.booleans())
def test_the_tiled_count_lies_between_two_caches(n: int, rows: int, keys: int, causal: bool) -> None:
    schedule, shape, tile = get_schedule("flash2"), shape_of(n, causal), TileSize(rows, keys)
    ours = without_statistics(schedule.closed_form(shape, tile).per_tensor())
    sram = schedule.on_chip(shape, tile).sram
    trace = list(flash2_trace(n, rows, keys, causal))
    exact, roomy = (sum(traffic(size, trace, allocate=False)) for size in (sram, 2 * sram))
    assert roomy <= ours <= exact
    assert sum(traffic(8 * n * ROW, trace, allocate=False)) == 4 * n * ROW  # all fits: each byte once


@given(st.sampled_from([64, 96, 128]), st.sampled_from([16, 32]))
def test_the_naive_count_lies_between_two_caches(n: int, size: int) -> None:
    """The naive count takes it that a kernel reads K and V once: the cache of SRAM's size must do no better, and one that
    holds K or V besides a row must do as well."""
    schedule, shape, tile = get_schedule("naive"), shape_of(n), TileSize(size, size)
    ours = schedule.closed_form(shape, tile).total.hbm
    sram = schedule.on_chip(shape, tile).sram
    trace = list(naive_trace(n))
    small = sum(traffic(sram, trace, allocate=False))
    enough = sum(traffic((n + 1) * ROW + 4 * n, trace, allocate=False))
    assert enough <= ours <= small


def test_with_room_for_two_working_sets_the_cache_gives_the_very_count() -> None:
    """Not causal, and K and V much larger than SRAM: nothing else is worth keeping, so recency keeps what the loop keeps."""
    for n, tile in ((128, TileSize(16, 16)), (256, TileSize(32, 16))):
        schedule, shape = get_schedule("flash2"), shape_of(n)
        sram = schedule.on_chip(shape, tile).sram
        trace = flash2_trace(n, tile.rows, tile.keys, causal=False)
        ours = without_statistics(schedule.closed_form(shape, tile).per_tensor())
        assert sum(traffic(2 * sram, trace, allocate=False)) == ours


def test_a_real_sram_would_hold_these_tiles() -> None:
    for name in ("flash2", "naive"):
        assert get_schedule(name).on_chip(shape_of(256), TileSize(32, 32)).fits(get_gpu("t4"))


@pytest.mark.parametrize("capacity", [4, 8])
def test_the_cache_itself_is_lru(capacity: int) -> None:
    """capacity + 1 lines round and round: a cache that forgets the least recent never hits."""
    trace = [("r", line * LINE, LINE) for _ in range(3) for line in range(capacity + 1)]
    assert traffic(capacity * LINE, trace) == (len(trace) * LINE, 0)
    assert traffic((capacity + 1) * LINE, trace) == ((capacity + 1) * LINE, 0)
