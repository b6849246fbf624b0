"""Every algorithm: what is counted is exact however it is counted, and what is computed is attention."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import CapacityError, UsageError
from nanokv.kv.tile import TILE
from sim.formats import FORMATS
from sim.gpus import get_gpu
from sim.memory import Machine, Values
from sim.problem import Problem, make_problem
from sim.roofline import minimum_bytes, minimum_flops
from sim.schedules import BACKWARD, DECODE, PREFILL, SCHEDULES, get_schedule
from sim.schedules.base import largest_square
from sim.schedules.paged import PagedDecode
from sim.shape import Shape, TileSize
from tests.sim.bounds import gradient_bound, lse_bound, output_bound
from tests.sim.cases import FORWARD_TILED, cases, counted, options, plain, shapes, tiles

every_schedule = pytest.mark.parametrize("name", sorted(SCHEDULES))


@every_schedule
@given(data=st.data())
def test_counting_is_the_same_with_values_without_and_in_closed_form(name: str, data: st.DataObject) -> None:
    schedule, shape, tile = data.draw(cases(name))
    without = counted(schedule, shape, tile)
    assert without == counted(schedule, shape, tile, Values.ALL) == counted(schedule, shape, tile, Values.ONE)
    assert plain(without) == plain(schedule.closed_form(shape, tile))
    need = schedule.on_chip(shape, tile)
    assert (without.sram_peak, without.register_peak) == (need.sram, need.registers)


@every_schedule
@given(data=st.data())
def test_the_loop_fits_exactly_in_what_on_chip_says(name: str, data: st.DataObject) -> None:
    schedule, shape, tile = data.draw(cases(name))
    need = schedule.on_chip(shape, tile)
    schedule.run(Machine(need.sram, need.registers), Problem(shape, Values.NONE), tile)
    with pytest.raises(CapacityError, match="does not fit"):
        schedule.run(Machine(need.sram - 1, need.registers), Problem(shape, Values.NONE), tile)
    with pytest.raises(CapacityError, match="registers"):
        schedule.run(Machine(need.sram, need.registers - 1), Problem(shape, Values.NONE), tile)


@every_schedule
@given(data=st.data(), values=st.sampled_from([Values.ALL, Values.ONE]), seed=st.integers(0, 3))
def test_the_output_is_attention_within_the_rounding_bound(name: str, data: st.DataObject, values: Values, seed: int) -> None:
    schedule, shape, tile = data.draw(cases(name))
    problem = make_problem(shape, values, seed)
    outputs = schedule.run(Machine(values=values), problem, tile)
    keys = min(tile.keys, 512)
    bound = gradient_bound(problem, keys) if schedule.backward else output_bound(problem, keys)
    assert problem.error(outputs) <= bound
    assert bound < (0.1 if schedule.backward else 1e-3)  # a bound that says something: the values are of unit size


@given(shapes(), tiles)
def test_flash2_keeps_the_log_sum_exp(shape: Shape, tile: TileSize) -> None:
    problem = make_problem(shape, Values.ALL)
    kept = get_schedule("flash2").run(Machine(values=Values.ALL), problem, tile)["L"]
    assert np.abs(kept - problem.gradients.lse).max() <= lse_bound(problem, min(tile.keys, 512)) < 1e-3


def test_parts_of_unequal_weight_combine() -> None:
    """Split-KV where one part holds nearly all the weight: a large key in the last tile."""
    shape = Shape(300, heads=2, head_dim=16, q_len=1, kv_heads=1)
    problem = make_problem(shape, Values.ALL)
    assert problem.arrays is not None
    problem.arrays.k[:, 290] = 8 * problem.arrays.q[0]
    for splits in (2, 3, 100):
        outputs = get_schedule("split-kv", splits=splits).run(Machine(values=Values.ALL), problem, TileSize(1, 16))
        assert problem.error(outputs) <= output_bound(problem, 16)


@pytest.mark.parametrize("name", ["flash2", "decode", "decode-per-head", "paged"])
@given(data=st.data())
def test_tiles_of_the_runtime_give_the_runtimes_bits(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes("prefill" if name == "flash2" else "decode"))
    shape = replace(shape, head_dim=data.draw(st.sampled_from([16, 33, 64, 128])))
    tile = TileSize(data.draw(st.integers(1, 200)), TILE)
    schedule = get_schedule(name, block_size=data.draw(st.sampled_from([1, 8, 16, 128, 256])))
    problem = make_problem(shape, Values.ALL, data.draw(st.integers(0, 3)))
    outputs = schedule.run(Machine(values=Values.ALL), problem, tile)
    assert np.array_equal(outputs["O"], problem.runtime)


@given(shapes(), tiles, options)
def test_no_algorithm_moves_less_than_the_least(shape: Shape, tile: TileSize, more: dict[str, object]) -> None:
    for name in PREFILL:
        counts = get_schedule(name, **more).closed_form(shape, tile)
        assert counts.total.hbm >= minimum_bytes(shape)
        assert counts.flops >= minimum_flops(shape)


@given(shapes("decode"), st.sampled_from([None, 1, 4]), st.sampled_from([1, 16, 128]))
def test_no_decoding_moves_less_than_the_least(shape: Shape, splits: int | None, block_size: int) -> None:
    for name in DECODE:
        counts = get_schedule(name, splits=splits, block_size=block_size).closed_form(shape, TileSize(1, 128))
        assert counts.total.hbm >= minimum_bytes(shape)
    assert get_schedule("decode").closed_form(shape, TileSize(1, 128)).total.hbm == minimum_bytes(shape)


@given(shapes(), st.integers(1, 40), st.integers(0, 4000))
def test_bytes_fall_weakly_as_sram_grows(shape: Shape, kilobytes: int, more: int) -> None:
    """flash2 from where the paper's smallest block, 64 x 64, fits: below, a smaller one may read fewer hidden keys."""
    for name in ("flash1", "flash2", "naive"):
        schedule, moved = get_schedule(name), []
        least = schedule.on_chip(shape, TileSize(64, 64)).sram if name == "flash2" else kilobytes << 10
        for sram in (least, least + more, 1 << 20):
            gpu = replace(get_gpu("a100-80"), sram=sram)
            moved.append(schedule.closed_form(shape, schedule.auto_tile(shape, gpu)).total.hbm)
        assert moved == sorted(moved, reverse=True)


@given(shapes(), st.sampled_from([16, 32, 64, 128]))
def test_flash1_falls_with_the_key_tile_and_not_with_the_row_tile(shape: Shape, keys: int) -> None:
    def moved(tile: TileSize) -> int:
        return get_schedule("flash1").closed_form(shape, tile).total.hbm

    assert moved(TileSize(16, 2 * keys)) <= moved(TileSize(16, keys)) == moved(TileSize(128, keys))


@given(st.sampled_from(["prefill", "decode"]).flatmap(shapes), tiles, options)
def test_groups_never_cost_more_than_a_head_each(shape: Shape, tile: TileSize, more: dict[str, object]) -> None:
    each = replace(shape, kv_heads=shape.heads)
    for name in DECODE if shape.rows == 1 else PREFILL:
        schedule = get_schedule(name, **{**more, "block_size": 1})
        grouped, alone = (schedule.closed_form(one, tile).total for one in (shape, each))
        assert grouped.hbm <= alone.hbm or name == "split-kv"  # fewer key-value heads are cut into more parts
        assert grouped.hbm_read <= alone.hbm_read or name == "split-kv"


@given(shapes(), tiles)
def test_masks_never_cost_more_than_none(shape: Shape, tile: TileSize) -> None:
    full, causal = replace(shape, causal=False, window=None), replace(shape, causal=True, window=None)
    for name in PREFILL:
        schedule = get_schedule(name)
        counts = [schedule.closed_form(one, tile) for one in (replace(causal, window=shape.window), causal, full)]
        assert [each.total.hbm for each in counts] == sorted(each.total.hbm for each in counts)
        assert [each.flops for each in counts] == sorted(each.flops for each in counts)


@given(shapes("decode"), st.sampled_from([1, 8, 16, 128]))
def test_the_waste_of_paging_is_less_than_two_blocks_and_counted_apart(shape: Shape, block_size: int) -> None:
    schedule, tile = PagedDecode(block_size), TileSize(1, 128)
    waste = schedule.waste(shape)
    assert 0 <= waste < 2 * block_size
    paged = schedule.closed_form(shape, tile).per_tensor()
    dense = get_schedule("decode").closed_form(shape, tile).per_tensor()
    assert {name: paged[name] for name in dense} == dense
    unused = sum(moved.hbm for name, moved in paged.items() if "unused" in name)
    row = shape.kv.row_bytes(shape.head_dim) + shape.kv.scale_bytes(shape.head_dim)
    assert unused == 2 * waste * row * shape.all_kv_heads


@given(shapes("decode"))
def test_scales_are_counted_apart_from_codes(shape: Shape) -> None:
    """int8: one byte an element and a float32 a row; int4: half a byte, and a float32 minimum and span for 32 elements."""
    first, last = shape.key_range((0, 1))
    rows, dim = shape.all_kv_heads * (last - first), shape.head_dim
    for name, codes, scales in (("float32", 4 * dim, 0), ("float16", 2 * dim, 0), ("fp8_e4m3", dim, 0), ("int8", dim, 4),
                                ("fp8_scaled", dim, 4),
                                ("int4", -(-dim // 2), 8 * -(-dim // 32))):  # fmt: skip
        moved = get_schedule("decode").closed_form(replace(shape, kv_dtype=FORMATS[name]), TileSize(1, 128)).per_tensor()
        assert moved["K"].hbm_read == moved["V"].hbm_read == rows * codes
        assert ("K scales" in moved) == bool(scales)
        if scales:
            assert moved["K scales"].hbm_read == moved["V scales"].hbm_read == rows * scales


def test_reading_by_group_divides_the_bytes_of_k_and_v_by_the_group() -> None:
    """timtoole02/Camelid pull request 444: 32/8 heads, each query head streamed its own copy."""
    shape = Shape(4096, heads=32, head_dim=128, q_len=1, kv_heads=8)
    group, head = (
        get_schedule(name).closed_form(shape, TileSize(1, 128)).per_tensor() for name in ("decode", "decode-per-head")
    )
    assert head["K"].hbm_read == 4 * group["K"].hbm_read
    assert head["V"].hbm_read == 4 * group["V"].hbm_read


@pytest.mark.parametrize("keys", [64, 128])
def test_flash2_reads_k_and_v_once_for_each_row_tile(keys: int) -> None:
    """Without a mask: N / Br times. GPT-2 medium at batch 64: 4.568 GB with rows of 64, 2.420 with 128."""
    shape = Shape(1024, heads=16, head_dim=64, batch=64, causal=False)
    for rows, gigabytes in ((64, 4.568), (128, 2.420)):
        total = get_schedule("flash2").closed_form(shape, TileSize(rows, keys)).total
        assert total.hbm / 1e9 == pytest.approx(gigabytes, abs=5e-4)


@pytest.mark.parametrize(
    ("keys", "without", "zeros"), [(64, 6.98, 7.12), (128, 3.62, 3.77), (256, 1.95, 2.09), (512, 1.11, 1.25)]
)
def test_bytes_fall_with_the_block_as_in_figure_2(keys: int, without: float, zeros: float) -> None:
    """FlashAttention's figure 2, middle (blocks 64 to 512, about 6 to 2 GB and flat beyond 256): Algorithm 1 in GB by hand."""
    shape = Shape(1024, heads=16, head_dim=64, batch=64, causal=False)
    for init, gigabytes in ((False, without), (True, zeros)):
        total = get_schedule("flash1", init=init).closed_form(shape, TileSize(64, keys)).total
        trips, line, statistics = 1024 // keys, 1024 * 64 * 2, 1024 * 8
        assert total.hbm == 1024 * (2 * line + trips * (3 * line + 2 * statistics) + init * (line + statistics))
        assert total.hbm / 1e9 == pytest.approx(gigabytes, abs=0.006)


def test_flash1_follows_algorithm_1() -> None:
    """M = 192 KB of float16: Bc = ceil(98304 / (4 * 64)) = 384 and Br = min(384, 64) = 64."""
    shape = Shape(1024, heads=1, head_dim=64, causal=False)
    assert get_schedule("flash1").auto_tile(shape, get_gpu("a100-paper")) == TileSize(64, 384)
    assert get_schedule("flash1-backward").auto_tile(shape, get_gpu("a100-paper")).keys == 384
    ragged = replace(get_gpu("a100-paper"), sram=2 * 1001)
    assert get_schedule("flash1").auto_tile(shape, ragged).keys == 4  # ceil(1001 / 256), rows cut until all fits


def test_causal_flash2_does_about_half_the_work() -> None:
    shape = Shape(4096, heads=1, head_dim=64)
    causal, full = (
        get_schedule("flash2").closed_form(one, TileSize(128, 128)).flops for one in (shape, replace(shape, causal=False))
    )
    assert causal * 64 == full * 33  # 32 row tiles see 1 .. 32 key tiles


def test_backward_multiplies_five_products_where_forward_does_two() -> None:
    shape = Shape(256, heads=2, head_dim=64, causal=False)
    for forward, backward, ratio in (
        ("flash1", "flash1-backward", 2.5),
        ("flash2", "flash2-backward", 2.5),
        ("naive", "naive-backward", 2),
    ):
        counts = [get_schedule(name).closed_form(shape, TileSize(64, 64)).flops for name in (forward, backward)]
        assert counts[1] == ratio * counts[0]


@given(st.sampled_from(sorted(SCHEDULES)), st.sampled_from([64, 128, 256]), st.sampled_from(["a100-80", "l4", "t4"]))
def test_the_largest_tile_fits_and_the_next_does_not(name: str, head_dim: int, gpu_name: str) -> None:
    gpu, schedule = get_gpu(gpu_name), get_schedule(name)
    shape = Shape(1 << 16, heads=4, head_dim=head_dim, kv_heads=2, q_len=1 if name in DECODE[1:] else None)
    largest = largest_square(schedule, shape, gpu)
    assert 0 < largest < shape.seq
    assert schedule.on_chip(shape, TileSize(largest, largest)).fits(gpu)
    assert not schedule.on_chip(shape, TileSize(largest + 1, largest + 1)).fits(gpu)


@every_schedule
@given(data=st.data(), power=st.integers(10, 24))
def test_a_cache_only_takes_bytes_off_hbm(name: str, data: st.DataObject, power: int) -> None:
    """Behind an L2, what crosses into SRAM stays the same; HBM sees at most that, and no less than each byte once."""
    schedule, shape, tile = data.draw(cases(name))
    without = counted(schedule, shape, tile)
    behind = counted(schedule, shape, tile, l2=1 << power)
    assert behind.total.sram_read == without.total.sram_read
    assert behind.total.sram_write == without.total.sram_write
    for name, moved in behind.per_tensor().items():
        assert moved.hbm_write <= without.per_tensor()[name].sram_write
    if not schedule.backward:
        assert behind.total.hbm >= minimum_bytes(shape)


def test_a_large_cache_leaves_the_least_and_a_tiny_one_changes_nothing() -> None:
    shape = Shape(512, heads=4, head_dim=64, kv_heads=2, causal=False)
    schedule, tile = get_schedule("flash2"), TileSize(64, 64)
    statistics = 4 * shape.all_heads * shape.rows
    assert counted(schedule, shape, tile, l2=1 << 30).total.hbm == minimum_bytes(shape) + statistics
    tiny, none = counted(schedule, shape, tile, l2=1024), counted(schedule, shape, tile)
    assert tiny.total.hbm == none.total.hbm


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_pass_needs_a_whole_prefill(name: str) -> None:
    with pytest.raises(UsageError, match="q_len = seq"):
        get_schedule(name).check(Shape(64, q_len=3), TileSize(16, 16))


@pytest.mark.parametrize("name", DECODE[1:])
def test_decoding_needs_one_query(name: str) -> None:
    with pytest.raises(UsageError, match="q_len 1"):
        get_schedule(name).check(Shape(64, q_len=3), TileSize(16, 16))


def test_all_tiled_forward_schedules_are_covered() -> None:
    assert set(FORWARD_TILED) == set(PREFILL + DECODE) - {"naive"}
