"""Attention kernels on the CPU: the bits of the compiled CPU kernels for every cache, format, shape and order of threads."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.kernels.layout import BEGIN, END, FIRST, LAST, NUMBER, SINKS, WINDOW
from nanokv.kv.codec import get_codec
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import TILE, Visibility
from tests.cuda.machine import ORDERS
from tests.support import examples, head_counts

pytest.importorskip("numba", exc_type=ImportError)
from tests.cuda.attention_cases import Case, make_case, run_case

FORMATS = [
    ("float32", None),
    ("float16", None),
    ("bfloat16", None),
    ("int8", None),
    ("fp8", None),
    ("fp8", 0.02),
    ("int4", None),
]
LENGTHS = st.one_of(st.integers(0, 20), st.sampled_from([31, 63, 64, 127, 128, 129, 255, 256, 300]))


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    kv_dtype, scale = draw(st.sampled_from(FORMATS))
    kind = draw(st.sampled_from(["paged", "paged", "contiguous"]))
    block = draw(st.sampled_from([32, 64, 128] if kv_dtype == "int4" else [1, 2, 16, 64, 128]))
    window = draw(st.one_of(st.none(), st.none(), st.integers(1, 40), st.sampled_from([128, 130, 200])))
    sinks = draw(st.one_of(st.none(), st.integers(0, 5), st.sampled_from([17, 130]))) if window else None
    return CacheSpec(kind, block, window, sinks, kv_dtype, scale)


SEQUENCES = st.lists(st.tuples(LENGTHS, st.sampled_from([1, 1, 1, 2, 5, 9, 40])), min_size=1, max_size=3)  # before, now
WIDTHS = st.sampled_from([1, 4, 6, 8, 32, 33, 64, 68])
FLAGS = st.tuples(st.booleans(), st.booleans())  # many rows' kernel for all; another query for the sinks


@examples(20, suppress_health_check=list(HealthCheck))
@given(specs(), SEQUENCES, head_counts(), WIDTHS, st.sampled_from(list(ORDERS)), FLAGS, st.integers(0, 99))
def test_attention_has_the_bits_of_the_compiled_kernels(monkeypatch, spec, sequences, heads, dim, order, flags, seed):
    by_rows, second = flags
    before, now = zip(*sequences, strict=True)
    second = second and bool(spec.sinks)
    case, arrays = make_case(monkeypatch, spec, list(before), list(now), *heads, dim, seed, second)
    got, _ = run_case(case, arrays, order, few=0 if by_rows else 8)
    assert np.isfinite(got).all()
    assert np.array_equal(got, case.expected)


def keys_and_values(case: Case, arrays: dict[str, np.ndarray], kv_dtype: str, run: np.ndarray) -> tuple[np.ndarray, ...]:
    """What a run of a paged case lists: positions [n], k and v [n, H, D] in float64, decoded."""
    dim, listed = case.q.shape[2], slice(run[FIRST], run[LAST])
    slots = (case.units[listed, :, None] * case.unit_size + np.arange(case.unit_size)).reshape(-1)
    positions = (case.tiles[listed, NUMBER, None] * TILE + np.arange(TILE)).reshape(-1)
    slots, positions = (each[positions <= case.positions[run[END] - 1]] for each in (slots, positions))
    planes = [
        [plane[1].reshape(-1, *plane.shape[3:])[slots] for name, plane in arrays.items() if name.startswith(which)]
        for which in "kv"
    ]
    k, v = get_codec(kv_dtype, np.float32, NUMPY).decode(*planes, dim)
    return positions, k.astype(np.float64), v.astype(np.float64)


UNIT = 2.0**-24  # of float32's roundings
EXP_ERROR, EXP_END = 1e-7, 2e-38  # of exp: relative, and what is dropped below -87 (docs/numerics.md)


def gamma(steps: int) -> float:
    return steps * UNIT / (1 - steps * UNIT)


def truth_and_bound(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One query [D] over the keys that it sees, k, v [n, D]: the output in float64 and how far float32 may be from it.

    A score passes the scaling of the query, a chain and a sum of segments. Of the differences that become its weight (to its
    tile's largest, and that one's to each larger one) each is rounded once, and they add up to the score's distance from the
    largest of all; a tile and each combination have an exp. A value's product passes a chain of 64, its tile's two sums and
    two roundings a combination; a weight in l the tile's sum and the same two; the quotient one.
    """
    dim, tiles = len(q), -(-len(k) // TILE) + 1
    scores = scale * (k @ q)
    off = gamma(1 + min(dim, 64) + -(-dim // 64)) * abs(scale) * (np.abs(k) @ np.abs(q))
    p = np.exp(scores - scores.max())
    p /= p.sum()
    out = p @ v
    distance = scores.max() - scores + 2 * off.max()
    weight = np.expm1(off + UNIT * distance) + (1 + tiles) * EXP_ERROR
    above = (p * (weight + gamma(64 + 2 + 2 * tiles))) @ np.abs(v)
    below = float(p @ (weight + gamma(8 + 2 * tiles)))
    dropped = 2 * len(k) * EXP_END * np.abs(v).max()
    return out, 1.01 * (above + below * np.abs(out)) + UNIT * np.abs(out) + dropped  # 1.01: products of these errors


@examples(12, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["float32", "float16", "int8"]), st.sampled_from([(0, 1), (3, 9), (130, 2), (290, 20)]), head_counts(),
       st.sampled_from([1, 8, 33, 64, 128]), st.sampled_from([None, 50]), st.sampled_from([1.0, 8.0]), st.booleans(),
       st.integers(0, 99))  # fmt: skip
def test_attention_keeps_its_bound(monkeypatch, kv_dtype, counts, heads, dim, window, steep, by_rows, seed):
    case, arrays = make_case(
        monkeypatch,
        CacheSpec("paged", 16, window, 0 if window else None, kv_dtype),
        [counts[0]],
        [counts[1]],
        *heads,
        dim,
        seed,
    )
    case.q = case.q * np.float32(steep)
    case.q_sinks = case.q
    got, _ = run_case(case, arrays, few=0 if by_rows else 1000)
    group, scale = heads[0] // heads[1], float(np.float32(case.scale))
    for run in case.runs:
        positions, k, v = keys_and_values(case, arrays, kv_dtype, run)
        visibility = Visibility(run[WINDOW] or None, run[SINKS])
        for row in range(run[BEGIN], run[END]):
            seen = visibility.sees(case.positions[row], positions)
            for head in range(heads[0]):
                query = case.q[row, head].astype(np.float64)
                truth, bound = truth_and_bound(query, k[seen, head // group], v[seen, head // group], scale)
                assert (np.abs(got[row, head] - truth) <= bound).all()
