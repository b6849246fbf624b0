"""Attention kernels on the CPU: the bits of the compiled CPU kernels for every cache, format, shape and order of threads."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from nanokv.kv.spec import CacheSpec
from tests.cuda.machine import ORDERS
from tests.support import examples, head_counts

pytest.importorskip("numba", exc_type=ImportError)
from tests.cuda.attention_cases import make_case, run_case

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
