# ruff: noqa: E501 - the sources' text is quoted as it is
"""Faults planted in the CUDA sources, one at a time: each is found, by the header or by the bits.

Every day seven of them, all in the thorough profile.
"""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

pytest.importorskip("numba", exc_type=ImportError)
from nanokv.kernels.cuda import launches
from nanokv.kernels.cuda.program import HERE
from nanokv.kernels.matrix import pack
from nanokv.kv.spec import CacheSpec
from tests.cuda.attention_cases import make_case, run_case
from tests.cuda.machine import CpuDevice, Fault, build, opened
from tests.cuda.test_linear import tensors_of
from tests.support import EVERYDAY

ATTENTION, LINEAR, CHOOSE, ROWS = "attention.cu", "linear.cu", "choose.cu", "rows.cu"
KERNELS = {
    ATTENTION: ["attend_tiles<8>", "combine_tiles"],
    LINEAR: ["linear_segments<Float32, 4>", "linear_sum"],
    CHOOSE: ["argmax"],
    ROWS: ["gelu_erf"],
}
FAULTS = {
    "no barrier before the keys are used": (ATTENTION, "stage_keys<FORMAT>(planes, memory, from, count);\n        __syncthreads();",
                                            "stage_keys<FORMAT>(planes, memory, from, count);", "without a barrier|nobody wrote"),
    "no barrier before the weights are used": (ATTENTION, "weigh(work, memory);\n    __syncthreads();", "weigh(work, memory);",
                                               "without a barrier|nobody wrote"),
    "the block table ignored": (ATTENTION, "units[t / unit_size] * unit_size;", "t / unit_size * unit_size;", None),
    "a query does not see its own key": (ATTENTION, "return key <= position", "return key < position", None),
    "a query sees the next key": (ATTENTION, "return key <= position", "return key <= position + 1", None),
    "one channel too many": (ATTENTION, "i < work.lines * dim; i += THREADS) {\n        int line = i / dim, d = i % dim;\n        long",
                             "i <= work.lines * dim; i += THREADS) {\n        int line = i / dim, d = i % dim;\n        long", "shared memory|written twice|bytes"),
    "the wrong key-value head": (ATTENTION, "true, heads, work.head,", "true, heads, (work.head + 1) % heads,", None),
    "a barrier that not all reach": (ATTENTION, "    weigh(work, memory);\n", "    if (threadIdx.x < 64) weigh(work, memory);\n    if (threadIdx.x < 64) __syncthreads();\n",
                                     "different barriers|not every thread"),
    "no barrier of the warp": (LINEAR, "    __syncwarp();\n", "", "without a barrier|nobody wrote"),
    "inputs off by one": (LINEAR, "load2(codes, (long long)(k + i) * PANEL)", "load2(codes, (long long)(k + i + 1) * PANEL)", None),
    "a segment in another order": (LINEAR, "for (int s = 0; s < segments; s++)", "for (int s = segments - 1; s >= 0; s--)", None),
    "GELU loses the rounding error of its square": (ROWS, "__fmaf_rn(t, t, -square)", "0.0f", None),
    "GELU's other branch": (ROWS, "out[i] = value < 0.0f ? g * e", "out[i] = value <= -1.0f ? g * e", None),
    "no barrier between the warps": (CHOOSE, "            __syncthreads();\n", "", "without a barrier|nobody wrote"),
}  # fmt: skip


EVERY_DAY = ("no barrier before the keys are used", "the block table ignored", "a query sees the next key", "one channel too many",
             "no barrier of the warp", "inputs off by one", "no barrier between the warps")  # fmt: skip
THOROUGH = settings.default.max_examples > EVERYDAY


def planted(file: str, old: str, new: str, folder: Path) -> dict[str, object]:
    """The sources with one change, compiled."""
    for path in HERE.glob("*.cu*"):
        shutil.copy(path, folder / path.name)
    text = (folder / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, "the fault has no place in the source any more"
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    return {file: opened(build(file, folder, KERNELS[file], ("-O0",)))}


def right_result(file: str, entries: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernels of a source give the right bits on a small example."""
    rng = np.random.default_rng(0)
    if file == ATTENTION:
        case, arrays = make_case(monkeypatch, CacheSpec("paged", 16), [140, 3], [1, 2], 4, 2, 40)
        return np.array_equal(run_case(case, arrays, entries=entries)[0], case.expected)
    if file == LINEAR:
        from nanokv.kernels import compiled

        x, weight = rng.standard_normal((3, 200), dtype=np.float32), rng.standard_normal((70, 200), dtype=np.float32)
        card, out = pack(weight), np.full((3, 70), np.nan, np.float32)
        sums = np.full(launches.sums_shape(3, card), np.nan, np.float32)
        launches.linear(CpuDevice(entries=entries, **tensors_of(card)), x, card, None, out, sums)
        return np.array_equal(out, compiled.linear(x, pack(weight), None))
    if file == ROWS:
        from nanokv.kernels import compiled

        x = rng.standard_normal((3, 200), dtype=np.float32) * np.float32(4)
        out = np.full(x.shape, np.nan, np.float32)
        launches.gelu_erf(CpuDevice(entries=entries), x, out)
        return np.array_equal(out, compiled.gelu_erf(x))
    logits, tokens = rng.integers(-3, 3, (2, 1500)).astype(np.float32), np.full(2, -1, np.int32)
    launches.argmax(CpuDevice(entries=entries), logits, tokens)
    return np.array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("file", list(KERNELS))
def test_without_a_fault_all_is_well(file, monkeypatch):
    assert right_result(file, None, monkeypatch)


@pytest.mark.parametrize("name", list(FAULTS if THOROUGH else EVERY_DAY))
def test_a_planted_fault_is_found(name, monkeypatch, tmp_path):
    file, old, new, message = FAULTS[name]
    entries = planted(file, old, new, tmp_path)
    if message is None:
        with contextlib.suppress(Fault):
            assert not right_result(file, entries, monkeypatch)
    else:
        with pytest.raises(Fault, match=message):
            right_result(file, entries, monkeypatch)
