"""What the kernels move, counted access by access: the simulator's schedules byte for byte, and traffic.py's formulas."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

pytest.importorskip("numba", exc_type=ImportError)
from nanokv.backend import NUMPY
from nanokv.card_sampling import host_choice
from nanokv.kernels.cuda import launches, traffic
from nanokv.kernels.matrix import FORMATS, pack
from nanokv.kv.codec import get_codec
from nanokv.kv.spec import CacheSpec
from nanokv.sampling import SamplingParams
from sim.formats import get_format
from sim.memory import Counts as Simulated
from sim.memory import Machine, Values
from sim.problem import make_problem
from sim.schedules.decode import Decode
from sim.schedules.flash2 import FlashAttention2
from sim.schedules.paged import PagedDecode
from sim.schedules.split_kv import SplitKV
from sim.shape import Shape, TileSize
from tests.cuda.attention_cases import make_case, run_case
from tests.cuda.machine import Counts, CpuDevice
from tests.cuda.test_linear import run as run_linear
from tests.support import ROOT, examples

TILE = TileSize(1, 128)
PLANES = {"K": ("k",), "V": ("v",), "K scales": ("k_scale",), "V scales": ("v_scale",)}


def simulated(schedule, shape: Shape) -> Simulated:
    """The schedule as a loop that runs, counting only."""
    machine = Machine(values=Values.NONE)
    schedule.run(machine, make_problem(shape, Values.NONE), TILE)
    return machine.finish()


def same_keys_and_values(counts: Counts, kernel) -> None:
    """K, V and their scales: each address once a block, and codes in one access."""
    for name, planes in PLANES.items():
        for plane in planes:
            if plane in counts.loads:
                assert counts.distinct_loads[plane] == kernel.tensors[name].sram_read, name
    for name in ("K", "V"):
        assert counts.loads[name.lower()] == counts.distinct_loads[name.lower()]


CASES = [
    (batch, seq, heads, dim, form)
    for batch, seq in ((1, 1), (3, 130), (2, 256), (1, 391))
    for heads, dim, form in (((4, 4), 32, "float32"), ((8, 2), 64, "float16"), ((4, 1), 40, "int8"))
]


@pytest.mark.parametrize(("batch", "seq", "heads", "dim", "form"), CASES)
@pytest.mark.parametrize("window", [None, 100])
def test_one_block_a_sequence_and_head_is_the_simulators_paged_decode(monkeypatch, batch, seq, heads, dim, form, window):
    """attend_rows with one row. Unused slots of a block, which the simulator counts apart, are not read by it at all."""
    spec = CacheSpec("paged", 16, window, None, form)
    case, arrays = make_case(monkeypatch, spec, [seq - 1] * batch, [1] * batch, *heads, dim)
    got, device = run_case(case, arrays, few=0)
    assert np.array_equal(got, case.expected)
    (counts,) = device.counts.values()
    shape = Shape(seq, heads[0], dim, 1, heads[1], batch, window=window, dtype=get_format("float32"), kv_dtype=get_format(form))
    paged, plain = simulated(PagedDecode(16), shape), simulated(Decode(), shape)
    kernel = paged.kernels["attention"]
    assert counts.loads["Q"] == counts.distinct_loads["Q"] == kernel.tensors["Q"].sram_read
    assert counts.stores["O"] == kernel.tensors["O"].sram_write
    assert counts.loads["table"] == kernel.tensors["block table"].sram_read
    same_keys_and_values(counts, kernel)
    assert counts.flops == kernel.flops == plain.flops
    moved = sum(counts.distinct_loads[name] for name in ("Q", *arrays)) + counts.stores["O"]
    assert moved == plain.total.hbm


@pytest.mark.parametrize(("batch", "seq", "heads", "dim", "form"), CASES)
def test_tiles_apart_are_the_simulators_split_kv(monkeypatch, batch, seq, heads, dim, form):
    """attend_tiles and combine_tiles: split-KV with one tile a split, where m and l stand for its log-sum-exp. One tile is
    combined too: the simulator's single split is not."""
    case, arrays = make_case(monkeypatch, CacheSpec("paged", 16, None, None, form), [seq - 1] * batch, [1] * batch, *heads, dim)
    got, device = run_case(case, arrays)
    assert np.array_equal(got, case.expected)
    parts, reduction = device.counts["attend_tiles<8>"], device.counts["combine_tiles"]
    stated = traffic.decode([seq] * batch, *heads, dim, arrays["k"].itemsize * dim + (4 if form == "int8" else 0), 16)
    for counts, kernel in ((parts, stated["attend_tiles"]), (reduction, stated["combine_tiles"])):
        loads = {name: counts.distinct_loads.get(name, 0) for name in kernel.loads if name != "KV"}
        assert loads == {name: count for name, count in kernel.loads.items() if name != "KV"}
        assert {name: counts.stores[name] for name in kernel.stores} == kernel.stores
        assert counts.flops == kernel.flops
    assert sum(parts.distinct_loads[name] for name in arrays) == stated["attend_tiles"].loads["KV"]
    if seq <= 128:
        return
    shape = Shape(seq, heads[0], dim, 1, heads[1], batch, dtype=get_format("float32"), kv_dtype=get_format(form))
    split = simulated(SplitKV(splits=-(-seq // 128)), shape).kernels
    assert parts.loads["Q"] == split["attention"].tensors["Q"].sram_read
    same_keys_and_values(parts, split["attention"])
    assert parts.stores["partial O"] == split["attention"].tensors["partial O"].sram_write
    assert parts.stores["m"] == parts.stores["l"] == split["attention"].tensors["partial LSE"].sram_write
    assert parts.flops == split["attention"].flops
    assert reduction.loads["partial O"] == split["reduction"].tensors["partial O"].sram_read
    assert reduction.loads["m"] == reduction.loads["l"] == split["reduction"].tensors["partial LSE"].sram_read
    assert reduction.stores["O"] == split["reduction"].tensors["O"].sram_write


PREFILLS = [
    (before, now, heads, dim, form, window)
    for before, now in ((0, 40), (0, 150), (130, 60))
    for heads, dim, form in (((2, 2), 32, "float32"), ((4, 1), 24, "float16"), ((8, 1), 40, "int8"))
    for window in (None, 70)
]


@pytest.mark.parametrize(("before", "now", "heads", "dim", "form", "window"), PREFILLS)
def test_a_prefill_is_the_simulators_flash_attention_2(monkeypatch, before, now, heads, dim, form, window):
    """attend_rows with 16 queries a block: queries outside, keys inside. Its block holds 16 / G rows of all G heads, so that K
    and V come once where the schedule reads them for each head; it reads the keys that a row of it sees, which is the schedule
    with key tiles of one; it weighs values that are seen, where the schedule counts whole tiles; and it keeps no L."""
    spec = CacheSpec("paged", 16, window, 0 if window else None, form)
    case, arrays = make_case(monkeypatch, spec, [before], [now], *heads, dim)
    got, device = run_case(case, arrays, few=0)
    assert np.array_equal(got, case.expected)
    (counts,) = device.counts.values()
    group = heads[0] // heads[1]
    shape = Shape(
        before + now, heads[0], dim, now, heads[1], window=window, dtype=get_format("float32"), kv_dtype=get_format(form)
    )
    kernel = FlashAttention2().closed_form(shape, TileSize(16 // group, 1)).kernels["attention"]
    assert counts.loads["Q"] == counts.distinct_loads["Q"] == kernel.tensors["Q"].sram_read
    assert counts.stores["O"] == kernel.tensors["O"].sram_write
    for name, planes in PLANES.items():
        for plane in planes:
            if plane in counts.loads:
                assert group * counts.distinct_loads[plane] == kernel.tensors[name].sram_read, name
    assert counts.flops == kernel.flops // 2 + 2 * dim * heads[0] * shape.visible_pairs()
    stated = traffic.prefill(before, now, *heads, dim, arrays["k"].itemsize * dim + (4 if form == "int8" else 0), 16, window)
    (stated,) = stated.values()
    assert sum(counts.distinct_loads[name] for name in arrays) == stated.loads["KV"]
    assert {name: counts.distinct_loads[name] for name in ("Q", "table")} == {
        name: stated.loads[name] for name in ("Q", "table")
    }
    assert (counts.stores["O"], counts.flops) == (stated.stores["O"], stated.flops)


def test_the_numbers_in_the_documentation():
    """docs/gpu.md's table: Llama-3-8B's attention, one layer, one token; and the passes of a choice."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    plain, all_filters = (traffic.sample_passes(50257, filters, filters, filters) for filters in (False, True))
    assert f"of 50,257, {plain} passes of 201 KB with temperature alone, {all_filters} with top-k, top-p and min-p" in text
    for keys in (1024, 8192, 131072):
        parts = traffic.decode([keys], 32, 8, 128, 4 * 128, 16)
        loads, partial = parts["attend_tiles"].loads, 2 * sum(parts["attend_tiles"].stores.values())
        line = f"| {keys:,} | {loads['KV']:,} B | {loads['table']:,} B | {partial:,} B | {partial / loads['KV']:.1%} |"
        assert line in text


@examples(12, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(FORMATS),
    st.integers(1, 140),
    st.sampled_from([1, 32, 64, 100, 200]),
    st.sampled_from([1, 64, 130]),
    st.booleans(),
)
def test_linear_moves_what_it_states(form, rows, inputs, outputs, with_bias):
    rng = np.random.default_rng(0)
    matrix = pack(rng.standard_normal((outputs, inputs), dtype=np.float32), form)
    bias = np.zeros(outputs, np.float32) if with_bias else None
    _, device = run_linear(rng.standard_normal((rows, inputs), dtype=np.float32), matrix, bias)
    filling = -(-inputs // 32) * 4 - -(-inputs // 8) if form == "int4" else 0  # words past the last input
    read = matrix.nbytes - 4 * 64 * -(-outputs // 64) * filling
    stated = traffic.linear(rows, inputs, outputs, read, with_bias, form == "int8-row")
    for launched, kernel in zip(device.counts.values(), stated.values(), strict=True):
        loaded = {name: count for name, count in launched.loads.items() if name not in ("scales", "lows", "W")}
        weights = sum(launched.distinct_loads.get(name, 0) for name in ("W", "scales", "lows"))
        assert weights == kernel.loads.get("W", 0)
        for name, count in kernel.loads.items():
            if name not in ("W", "bias"):
                assert loaded[name] == count, name
        if "bias" in kernel.loads and len(stated) == 1:
            assert launched.distinct_loads["bias"] == kernel.loads["bias"]
        assert {name: launched.stores[name] for name in kernel.stores} == kernel.stores
        assert launched.flops == kernel.flops


def same_as_stated(device: CpuDevice, stated: dict[str, traffic.Traffic]) -> None:
    for launched, kernel in zip(device.counts.values(), stated.values(), strict=True):
        assert {name: launched.distinct_loads[name] for name in kernel.loads} == kernel.loads
        assert {name: launched.stores[name] for name in kernel.stores} == kernel.stores
        assert launched.flops == kernel.flops


def test_softmax_moves_what_it_states():
    x, out = np.zeros((2, 1500), np.float32), np.zeros((2, 1500), np.float32)
    device = CpuDevice(x=x, out=out)
    launches.softmax(device, x, out)
    same_as_stated(device, traffic.softmax(2, 1500))


@pytest.mark.parametrize("vocab", [1, 4, 5, 1500])
@pytest.mark.parametrize(("top_k", "top_p", "min_p", "penalty"), [
    (0, 1.0, 0.0, 1.0), (3, 1.0, 0.0, 1.5), (0, 0.5, 0.0, 1.0), (3, 0.5, 0.1, 1.5), (0, 1.0, 0.1, 1.0),
])  # fmt: skip
def test_sampling_moves_what_it_states(vocab, top_k, top_p, min_p, penalty):
    logits, weights = np.random.default_rng(0).standard_normal((2, vocab), dtype=np.float32), np.zeros((2, vocab), np.float32)
    choice = host_choice([SamplingParams(1.0, top_k, top_p, min_p, penalty)] * 2, [[0]] * 2, [0.3, 0.6], vocab)
    tokens = np.zeros(2, np.int32)
    device = CpuDevice(logits=logits, weights=weights, tokens=tokens, **vars(choice))
    launches.sample(device, logits, choice, weights, tokens)
    same_as_stated(device, traffic.sample(2, vocab, penalty != 1))
    passes = traffic.sample_passes(vocab, 0 < top_k < vocab, top_p < 1, min_p > 0)
    assert device.counts["sample"].loads["weights"] == passes * weights.nbytes
    assert device.counts["sample"].loads["logits"] == 2 * logits.nbytes


@pytest.mark.parametrize("dim", [1, 33, 64])
def test_int4_keys_and_values_move_what_they_state(dim):
    x, slots = np.zeros((64, 3, dim), np.float32), np.arange(64, dtype=np.int32)
    for keys, entries in zip((True, False), get_codec("int4", np.float32, NUMPY).encode(x, x), strict=True):
        planes = dict(zip(("codes", "low", "span"), (np.zeros_like(each) for each in entries), strict=True))
        device = CpuDevice(x=x, **planes)
        launches.append_int4(device, x, slots, list(planes.values()), keys)
        same_as_stated(device, traffic.append_int4(64, 3, dim, keys))
