"""A shape through several algorithms: what is computed, what is refused, what the answer holds; and the roofline."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import UsageError
from sim.footprint import hbm_footprint
from sim.formats import FORMATS
from sim.gpus import get_gpu
from sim.memory import Values
from sim.roofline import ESTIMATE_FROM, estimate, fit_estimate, lower_bound, minimum_bytes, minimum_flops
from sim.run import as_dict, count, simulate
from sim.schedules import DECODE, PREFILL, SCHEDULES, get_schedule
from sim.shape import Shape, TileSize
from tests.sim.cases import cases, counted, shapes

A100 = get_gpu("a100-80")
TILE = TileSize(128, 128)


def test_the_object_has_the_promised_keys_and_adds_up() -> None:
    found = as_dict(simulate(Shape(300, heads=4, head_dim=32, kv_heads=2), A100, tile=TILE))
    assert set(found) == {"gpu", "shape", "algorithms", "ratio_naive_to_tiled", "max_abs_error"}
    assert list(found["algorithms"]) == list(PREFILL)
    for each in found["algorithms"].values():
        assert set(each) == {"hbm_read_bytes", "hbm_write_bytes", "hbm_bytes", "sram_peak_bytes", "flops", "intensity", "bound",
                             "time_s", "per_tensor"}  # fmt: skip
        assert each["hbm_bytes"] == each["hbm_read_bytes"] + each["hbm_write_bytes"]
        for direction in ("read", "write"):
            parts = (tensor[f"hbm_{direction}_bytes"] for tensor in each["per_tensor"].values())
            assert sum(parts) == each[f"hbm_{direction}_bytes"]
        assert each["time_s"] == max(each["hbm_bytes"] / A100.bandwidth, each["flops"] / 312e12)
        assert each["intensity"] == each["flops"] / each["hbm_bytes"]
    naive, tiled = (found["algorithms"][name]["hbm_bytes"] for name in ("naive", "flash2"))
    assert found["ratio_naive_to_tiled"] == naive / tiled
    assert 0 < found["max_abs_error"] < 1e-5


@given(st.sampled_from(["prefill", "decode"]).flatmap(shapes), st.booleans())
def test_the_answer_is_the_same_counted_or_computed(shape: Shape, l2: bool) -> None:
    computed, counted = (
        as_dict(simulate(shape, get_gpu("h100"), tile=TileSize(64, 128), values=values, l2=l2))
        for values in (Values.ALL, Values.NONE)
    )
    assert computed.pop("max_abs_error") is not None
    assert counted.pop("max_abs_error") is None
    assert computed == counted


def test_small_shapes_are_computed_large_ones_counted() -> None:
    modes = [simulate(Shape(seq, heads=4, head_dim=64), A100, tile=TILE).values for seq in (64, 1024, 1 << 15)]
    assert modes == [Values.ALL, Values.ONE, Values.NONE] or modes == [Values.ALL, Values.ALL, Values.NONE]
    assert simulate(Shape(1024), A100, tile=TILE).values is Values.ONE  # the default of the command line


def test_many_scores_are_not_held_even_where_they_are_few_operations() -> None:
    """2^26 scores of one element: half a gigabyte of S and P."""
    assert simulate(Shape(1 << 13, heads=1, head_dim=1), A100, ["flash2"], TILE).values is Values.NONE


def test_the_runtimes_bits_are_reported() -> None:
    found = simulate(Shape(300, heads=4, head_dim=64, kv_heads=2), A100, tile=TILE).results
    assert {name: result.same_bits for name, result in found.items()} == {"naive": None, "flash1": None, "flash2": True}
    other = simulate(Shape(300, heads=4, head_dim=64), A100, tile=TileSize(128, 64)).results
    assert other["flash2"].same_bits is None


def test_a_million_tokens_are_counted_in_under_a_second() -> None:
    """Counting grows with tiles, and past LOOP_STEPS of them the closed form takes over. Time of this process alone."""
    start = time.process_time()
    prefill = simulate(Shape(1 << 20), A100, tile=TILE)
    decode = simulate(Shape(1 << 20, q_len=1, kv_heads=8), A100, tile=TILE)
    assert time.process_time() - start < 1
    assert not prefill.results["flash2"].looped
    assert decode.results["decode"].hbm == minimum_bytes(decode.shape)


def test_loop_and_closed_form_meet_at_the_switch() -> None:
    """The answer does not jump where the closed form takes over."""
    for name in ("naive", "flash1", "flash2"):
        schedule = get_schedule(name)
        for seq in (2048, 1 << 14):
            shape = Shape(seq, heads=1, head_dim=64)
            counts, looped = count(schedule, shape, TILE)
            assert looped == (seq == 2048)
            assert counts.total == schedule.closed_form(shape, TILE).total


@pytest.mark.parametrize(
    ("gpu", "shape", "tile", "largest"),
    [("t4", Shape(1024), TILE, "85x85"), ("a100-80", Shape(8192), TileSize(4096, 4096), "199x199")],
)
def test_a_tile_that_does_not_fit_names_the_largest_that_does(gpu: str, shape: Shape, tile: TileSize, largest: str) -> None:
    with pytest.raises(UsageError, match=f"tile {tile} needs .* bytes of SRAM.* the largest that fits is {largest}"):
        simulate(shape, get_gpu(gpu), tile=tile)
    rows, keys = map(int, largest.split("x"))
    simulate(shape, get_gpu(gpu), ["flash2"], TileSize(rows, keys), values=Values.NONE)
    with pytest.raises(UsageError, match="largest"):
        simulate(shape, get_gpu(gpu), ["flash2"], TileSize(rows + 1, keys + 1), values=Values.NONE)


def test_a_default_algorithm_that_does_not_fit_is_left_out_with_its_reason() -> None:
    found = simulate(Shape(1024), get_gpu("l4"), tile=TILE, values=Values.NONE)
    assert list(found.results) == ["naive", "flash2"]
    assert found.left_out["flash1"].startswith("tile 128x128 needs")
    with pytest.raises(UsageError, match="flash1"):
        simulate(Shape(1024), get_gpu("l4"), ["flash1"], TILE)


@pytest.mark.parametrize("gpu", ["a100-80", "h100", "l4", "t4", "mi300x", "a100-paper"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_auto_always_fits(gpu: str, head_dim: int) -> None:
    for shape in (Shape(2048, head_dim=head_dim), Shape(2048, head_dim=head_dim, q_len=1, kv_heads=4)):
        found = simulate(shape, get_gpu(gpu), values=Values.NONE, backward=shape.rows > 1)
        assert not found.left_out
        for result in found.results.values():
            assert result.counts.sram_peak <= get_gpu(gpu).sram


def test_naive_cannot_run_what_does_not_fit_in_hbm() -> None:
    shape = Shape(1 << 20)
    naive = get_schedule("naive").closed_form(shape, TILE)
    squares = 2 * 32 * (1 << 40) * 2  # S and P of 32 heads in float16
    lines = 4 * 32 * (1 << 20) * 128 * 2
    assert hbm_footprint(naive, shape) == squares + lines > A100.memory
    assert hbm_footprint(get_schedule("flash2").closed_form(shape, TILE), shape) == lines + 32 * (1 << 20) * 4


def test_what_nobody_can_compute_is_refused() -> None:
    with pytest.raises(UsageError, match="use --count-only"):
        simulate(Shape(1 << 17), A100, tile=TILE, values=Values.ALL)
    with pytest.raises(UsageError, match="too many for an L2"):
        simulate(Shape(1 << 18), A100, tile=TILE, values=Values.NONE, l2=True)
    with pytest.raises(UsageError, match="a100-paper has no L2"):
        simulate(Shape(128), get_gpu("a100-paper"), l2=True)
    with pytest.raises(UsageError, match="unknown algorithm 'flash9'"):
        simulate(Shape(128), A100, ["flash9"])
    with pytest.raises(UsageError, match="no float32 rate"):
        simulate(Shape(128, dtype=FORMATS["float32"]), get_gpu("b200"))
    with pytest.raises(UsageError, match="do not divide each other"):
        simulate(Shape(128, q_len=1), A100, ["paged"], TILE, block_size=48)
    with pytest.raises(UsageError, match="splits must be at least 1"):
        simulate(Shape(128, q_len=1), A100, splits=0)  # not left out: it was asked for
    with pytest.raises(UsageError, match="block size must be at least 1"):
        simulate(Shape(128, q_len=1), A100, block_size=0)


@given(st.sampled_from(["prefill", "decode"]).flatmap(shapes))
def test_the_bound_is_the_slower_of_memory_and_arithmetic(shape: Shape) -> None:
    nbytes, flops = minimum_bytes(shape), minimum_flops(shape)
    bound = lower_bound(nbytes, flops, A100, "float16")
    memory, compute = nbytes / 2039e9, flops / 312e12
    assert bound.seconds == max(memory, compute)
    assert bound.kind == ("compute" if compute > memory else "memory")
    per_head = minimum_bytes(shape, per_query_head=True)
    assert per_head >= nbytes
    assert (per_head == nbytes) == (shape.group == 1)


def test_decode_bytes_are_those_of_the_data_sets_formula() -> None:
    """2 b L kv d 2 + 2 b h d 2, L the keys seen: 134.51 MB at batch 8, 4096 + 1 tokens, 64/8 heads."""
    shape = Shape(4097, heads=64, head_dim=128, q_len=1, kv_heads=8, batch=8)
    assert minimum_bytes(shape) == 2 * 8 * 4097 * 8 * 128 * 2 + 2 * 8 * 64 * 128 * 2
    assert minimum_bytes(shape) == 134_512_640


def test_a_fit_finds_the_line_it_was_made_from() -> None:
    nbytes = np.geomspace(1e8, 1e10, 60)
    fit = fit_estimate(nbytes, 20e-6 + nbytes / (0.8 * 2e12), 2e12)
    assert fit.t0 == pytest.approx(20e-6)
    assert fit.efficiency == pytest.approx(0.8)
    assert fit.held_out_error < 1e-9


def test_an_estimate_is_only_given_where_it_was_fitted() -> None:
    fitted = Shape(1 << 15, 64, 128, q_len=1, kv_heads=8, dtype=FORMATS["bfloat16"])
    found = estimate(fitted, A100)
    assert found is not None
    assert found > minimum_bytes(fitted) / A100.bandwidth
    assert estimate(fitted, get_gpu("h200")) is None
    small = replace(fitted, seq=1 << 10)
    assert minimum_bytes(small) < ESTIMATE_FROM
    for other in (
        small,
        replace(fitted, q_len=2),
        replace(fitted, head_dim=64),
        replace(fitted, seq=1 << 17, kv_dtype=FORMATS["int8"]),
    ):
        assert estimate(other, A100) is None


def test_a_split_fills_the_multiprocessors_and_one_part_is_plain_decoding() -> None:
    shape = Shape(1 << 16, heads=32, kv_heads=8, q_len=1)
    partial = (
        simulate(shape, A100, ["split-kv"], TILE, values=Values.NONE).results["split-kv"].counts.per_tensor()["partial LSE"]
    )
    splits = partial.hbm_write // (4 * 32)
    assert 8 * (splits - 1) < 108 <= 8 * splits
    alone = simulate(replace(shape, batch=64), A100, ["split-kv", "decode"], TILE, values=Values.NONE).results
    assert alone["split-kv"].counts.total == alone["decode"].counts.total


@pytest.mark.parametrize("algorithm", DECODE)
def test_decoding_runs_with_a_window(algorithm: str) -> None:
    found = simulate(Shape(300, heads=4, head_dim=64, kv_heads=2, q_len=1, window=100), A100, [algorithm], TILE)
    assert found.max_abs_error is not None
    assert found.max_abs_error < 1e-5
    if algorithm == "decode":
        assert found.results["decode"].counts.per_tensor()["K"].hbm == 100 * 2 * 64 * 2


@given(st.sampled_from(sorted(SCHEDULES)), st.data())
def test_the_footprint_is_what_a_boundless_cache_moves_once(name: str, data: st.DataObject) -> None:
    """Each byte of a tensor is read in once or written back once; without a window every key is touched."""
    schedule, shape, tile = data.draw(cases(name))
    shape = replace(shape, window=None)
    blocks = getattr(schedule, "block_size", 1)
    tile = replace(tile, keys=max(tile.keys, blocks))  # smaller tiles look a block up again
    once = sum(
        max(moved.hbm_read, moved.hbm_write) for moved in counted(schedule, shape, tile, l2=1 << 40).per_tensor().values()
    )
    assert hbm_footprint(counted(schedule, shape, tile), shape) == once


@pytest.mark.parametrize(("name", "q_len"), [("flash2", None), ("flash2-backward", None), ("split-kv", 1)])
def test_more_tiles_than_can_be_gone_through_are_one_line(name: str, q_len: int | None) -> None:
    with pytest.raises(UsageError, match="tiles, more than 4194304: use a larger tile") as caught:
        simulate(Shape(1 << 36, q_len=q_len), A100, [name], TileSize(64, 64), values=Values.NONE)
    assert "\n" not in str(caught.value)


def test_counts_pass_64_bits() -> None:
    """2^34 rows in tiles of 2^13: 2^21 tiles, half of the pairs of tiles and the diagonal, each of 2^26 pairs."""
    counts = get_schedule("flash2").closed_form(Shape(1 << 34, heads=1, head_dim=64), TileSize(1 << 13, 1 << 13))
    assert counts.flops == 4 * 64 * (1 << 26) * ((1 << 21) * ((1 << 21) + 1) // 2)
