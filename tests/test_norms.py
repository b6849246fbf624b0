"""RMSNorm and SwiGLU: what they are, in any precision, row by row."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.numerics import rms_norm, silu, swiglu

ROWS = st.integers(1, 300)


@given(ROWS, st.integers(1, 700), st.sampled_from([np.float32, np.float64]), st.integers(0, 99))
def test_rms_norm_of_a_row_is_the_row_s_alone(rows, width, dtype, seed):
    x, weight = np.random.default_rng(seed).standard_normal((rows, width)).astype(dtype), np.ones(width, dtype)
    together = rms_norm(x, weight, 1e-5)
    alone = np.concatenate([rms_norm(x[i : i + 1], weight, 1e-5) for i in range(rows)])
    assert np.array_equal(together, alone)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    # a sum of K squares by pairs is off by at most log2(K) + 1 roundings, of which the root keeps half; 4 more follow
    assert np.all(np.abs(together - expected) <= (np.log2(width) / 2 + 5) * np.finfo(dtype).eps * np.abs(expected) + 1e-300)


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 2, 7, 64, 128]), st.integers(0, 99))
def test_rms_norm_of_heads(rows, heads, dim, seed):
    """Each head of a slice of a wider array, as for the norm of queries."""
    x = np.random.default_rng(seed).standard_normal((rows, heads + 3, dim)).astype(np.float32)[:, :heads]
    weight = np.arange(1, dim + 1, dtype=np.float32)
    flat = rms_norm(np.ascontiguousarray(x).reshape(-1, dim), weight, 1e-6)
    assert np.array_equal(rms_norm(x, weight, 1e-6), flat.reshape(x.shape))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    """A07: the squares of 4096 eights add up to 262144, four times float16's largest number; the mean square is 64."""
    out = rms_norm(np.full((1, 4096), 8, dtype), np.ones(4096, dtype), 1e-5)
    assert out.dtype == dtype
    assert np.all(out == 1)


@given(st.lists(st.floats(-1e4, 1e4), min_size=1), st.sampled_from([np.float32, np.float64]))
def test_silu(values, dtype):
    """x / (1 + exp(-x)); for x < 0 as x exp(x) / (1 + exp(x)), which cannot overflow. Five roundings and exp's own, where
    the result is a normal number."""
    x = np.array(values, dtype)
    wide = x.astype(np.longdouble)
    expected = np.where(
        wide >= 0, wide / (1 + np.exp(-np.abs(wide))), wide * np.exp(-np.abs(wide)) / (1 + np.exp(-np.abs(wide)))
    )
    assert silu(x).dtype == dtype
    slack = 1e5 * np.finfo(dtype).tiny
    assert np.all(np.abs(silu(x) - expected) <= 8 * np.finfo(dtype).eps * np.abs(expected) + slack)


@given(ROWS, st.integers(1, 700), st.sampled_from([np.float32, np.float64]))
def test_swiglu_row_by_row(rows, inner, dtype):
    both = (np.random.default_rng(rows).standard_normal((rows, 2 * inner)) * 10).astype(dtype)
    kept = both.copy()
    out = swiglu(both)
    assert np.array_equal(out, np.concatenate([swiglu(both[i : i + 1]) for i in range(rows)]))
    assert np.array_equal(out, silu(both[:, :inner]) * both[:, inner:])
    assert np.array_equal(both, kept)
