# ruff: noqa: E501 - the sources' text is quoted as it is
"""Faults planted in the CUDA sources, one at a time: each is found, by the header or by the bits.

Every day one or two for each source, all in the thorough profile.
"""

import contextlib
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

pytest.importorskip("numba", exc_type=ImportError)
from nanokv.kernels.cuda.program import HERE
from tests.cuda.machine import Fault, build, opened
from tests.cuda.small_examples import EXAMPLES, KERNELS
from tests.support import EVERYDAY

ATTENTION, LINEAR, ROWS = "attention.cu", "linear.cu", "rows.cu"
CACHE, SOFTMAX, CHOOSE = "cache.cu", "softmax.cu", "choose.cu"
VOCAB = "vocab.cuh"
BUILT_AS = {VOCAB: SOFTMAX}  # a header is tried in a source that includes it
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
    "a bound of the order is one too far": (CHOOSE, "    found.end++;\n", "    found.end += 2;\n", None),
    "a token passes with exactly the mass drawn": (CHOOSE, "__int_as_float(__float_as_int(drawn) + 1)", "drawn", None),
    "a token that occurred twice is penalised by its neighbour's bit": (CHOOSE, ">> (i % 32) & 1", ">> (i % 31) & 1", None),
    "the top-p of all, not of what top-k left": (CHOOSE, "if (by_count) measure<1>(own, vocab, false, &kept, room, &total);\n        kept", "kept", None),
    "min-p is off": (CHOOSE, "if (kept.weight < least)", "if (false)", None),
    "sums are written before they were read": (VOCAB, "totals[s] + room[s * BLOCK_WARPS + piece];\n        __syncthreads();",
                                               "totals[s] + room[s * BLOCK_WARPS + piece];", "without a barrier"),
    "sums are read before they were written": (VOCAB, "        __syncthreads();\n        int pieces", "        int pieces", "without a barrier|nobody wrote"),
    "a row's last numbers left out": (VOCAB, "end = min(begin + PIECE, n);", "end = min(begin + PIECE, n - 1);", None),
    "the largest of one warp only": (SOFTMAX, "    top = warp_max(tops[threadIdx.x % WARP]);\n", "", None),
    "a group of keys is one token short": (CACHE, "for (int t = 1; t < CODE_GROUP; t++)", "for (int t = 1; t < CODE_GROUP - 1; t++)", None),
    "halves of a byte exchanged": (CACHE, "code | next << 4 : code", "code << 4 | next : code", None),
    "the scales of the first groups of keys": (CACHE, "(long long)(slot / CODE_GROUP) * heads", "(long long)(group) * heads", None),
    "channels past the head's last": (CACHE, "from[min(d, dim - 1)]", "from[d]", "bytes|NaN"),
}  # fmt: skip


EVERY_DAY = ("no barrier before the keys are used", "the block table ignored", "a query sees the next key", "one channel too many",
             "no barrier of the warp", "inputs off by one", "no barrier between the warps", "a bound of the order is one too far",
             "sums are written before they were read", "a group of keys is one token short")  # fmt: skip
THOROUGH = settings.default.max_examples > EVERYDAY


def planted(file: str, old: str, new: str, folder: Path) -> tuple[str, dict[str, object]]:
    """The sources with one change, and the one that shows it compiled."""
    for path in HERE.glob("*.cu*"):
        shutil.copy(path, folder / path.name)
    text = (folder / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, "the fault has no place in the source any more"
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    built = BUILT_AS.get(file, file)
    return built, {built: opened(build(built, folder, KERNELS[built], ("-O0",)))}


@pytest.mark.parametrize("file", list(EXAMPLES))
def test_without_a_fault_all_is_well(file):
    assert EXAMPLES[file](None)


@pytest.mark.parametrize("name", list(FAULTS if THOROUGH else EVERY_DAY))
def test_a_planted_fault_is_found(name, tmp_path):
    file, old, new, message = FAULTS[name]
    built, entries = planted(file, old, new, tmp_path)
    if message is None:
        with contextlib.suppress(Fault):
            assert not EXAMPLES[built](entries)
    else:
        with pytest.raises(Fault, match=message):
            EXAMPLES[built](entries)
