"""Exact rows depend on themselves alone; every function is as near to the truth as its rounding allows."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanokv import numerics
from nanokv.numerics import EXACT, FAST, activate, erf, layer_norm, linear, weight_slices

DTYPES = st.sampled_from([np.float32, np.float64])
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([192, 576, 768]))


def normal(seed: int, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@given(st.integers(0, 1 << 30), st.integers(1, 40), WIDTHS, WIDTHS, DTYPES, st.data())
def test_a_row_of_an_exact_product_does_not_know_its_companions(seed, rows, width, outputs, dtype, draw):
    x, weight = normal(seed, rows, width, dtype=dtype), normal(seed + 1, outputs, width, dtype=dtype)
    whole = linear(x, weight, normal(seed + 2, outputs, dtype=dtype))
    some = draw.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows))
    assert np.array_equal(linear(x[some], weight, normal(seed + 2, outputs, dtype=dtype)), whole[some])


@pytest.mark.parametrize(("outputs", "width"), [(2304, 768), (768, 3072), (3072, 768), (4096, 1024), (50257, 768), (4096, 192)])
def test_exact_products_at_real_widths(outputs, width):
    """Where it was seen to go wrong: whole matrices for one row and slices for many differed at width 768, not at 64."""
    x, weight = normal(0, 9, width), normal(1, outputs, width)
    whole = linear(x, weight)
    for some in ([0], [8], [3, 4], list(range(1, 9))):
        assert np.array_equal(linear(x[some], weight), whole[some])


@given(st.integers(0, 1 << 30), st.integers(1, 20), WIDTHS, WIDTHS, DTYPES, st.sampled_from([EXACT, FAST]))
def test_a_product_is_within_the_bound_of_its_rounding(seed, rows, width, outputs, dtype, mode):
    """|error| <= gamma_K |x| |W| for a sum of K products in any order (Higham, Accuracy and Stability, section 3.1)."""
    x, weight = normal(seed, rows, width, dtype=dtype), normal(seed + 1, outputs, width, dtype=dtype)
    wide = np.longdouble
    truth = x.astype(wide) @ weight.astype(wide).T
    unit = np.finfo(dtype).eps / 2
    gamma = width * unit / (1 - width * unit)
    bound = gamma * (np.abs(x).astype(wide) @ np.abs(weight).astype(wide).T)
    assert np.all(np.abs(linear(x, weight, numerics=mode) - truth) <= bound)


@given(st.integers(1, 60000), st.integers(1, 1 << 16))
def test_slices_cover_a_matrix_once_and_keep_to_their_size(rows, row_bytes):
    slices = weight_slices(rows, row_bytes)
    assert [start for start, _ in slices] == [0] + [stop for _, stop in slices[:-1]]
    assert slices[-1][1] == rows
    assert all((stop - start) * row_bytes <= 2 * numerics.SLICE_BYTES or stop - start <= 8 for start, stop in slices)


@given(st.integers(0, 1 << 30), st.integers(1, 300), WIDTHS, DTYPES, st.data())
def test_a_row_of_a_norm_or_activation_does_not_know_its_companions(seed, rows, width, dtype, draw):
    x = normal(seed, rows, width, dtype=dtype)
    weight, bias = normal(seed + 1, width, dtype=dtype), normal(seed + 2, width, dtype=dtype)
    some = draw.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows))
    assert np.array_equal(layer_norm(x[some], weight, bias, 1e-5), layer_norm(x, weight, bias, 1e-5)[some])
    for name in numerics.ACTIVATIONS:
        assert np.array_equal(activate(x[some], name), activate(x.copy(), name)[some])


def test_layer_norm_is_the_population_variance():
    x = np.array([[1.0, 2.0, 3.0, 6.0]])
    expected = (x - 3) / math.sqrt(3.5 + 1e-5)
    np.testing.assert_array_max_ulp(layer_norm(x, np.ones(4), np.zeros(4), 1e-5), expected, maxulp=4)


def test_layer_norm_statistics_do_not_overflow_where_the_input_does_not():
    """4096 values of 1e18: their sum of squares is beyond float32, their variance is not even defined without centring."""
    x = np.full((1, 4096), 1e18, np.float32)
    x[0, 0] = -1e18
    out = layer_norm(x, np.ones(4096, np.float32), np.zeros(4096, np.float32), 1e-5)
    assert np.all(np.isfinite(out))
    assert out[0, 0] == pytest.approx(-63.99, abs=0.01)  # -(2 - 2/4096) / sqrt(4 (1/4096) (1 - 1/4096))


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=50))
@example([0.46875, -0.46875, 0.46876, 0.0, -0.0, 5.9, 6.1, 1e-300])
def test_erf_equals_the_c_library_to_the_last_places(values):
    """Cody's approximations are good to 6e-19; what is left is the rounding of some twenty float64 operations near 1."""
    expected = np.array([math.erf(value) for value in values])
    assert np.all(np.abs(erf(np.array(values)) - expected) <= 20 * np.finfo(float).eps * np.maximum(np.abs(expected), 1e-300))


@given(st.lists(st.floats(-12, 12), min_size=1, max_size=50))
def test_the_activations_are_their_formulas(values):
    x = np.array([values])
    tanh = [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in values]
    exact = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in values]
    # 1 + tanh cancels for negative v: an absolute error of a few units in the last place of 1, times |v| / 2
    bound = 16 * np.finfo(float).eps * (np.abs(x[0]) + 1)
    assert np.all(np.abs(activate(x.copy(), "gelu_new")[0] - tanh) <= bound)
    assert np.all(np.abs(activate(x.copy(), "gelu")[0] - exact) <= bound)


def test_activations_in_pieces_equal_those_in_one():
    x = normal(3, 700, 333)
    whole = numerics.gelu_new(x)
    assert np.array_equal(activate(x.copy(), "gelu_new"), whole)


def test_an_error_in_parallel_work_is_raised():
    with pytest.raises(ZeroDivisionError):
        numerics.in_parallel(lambda i: 1 // i, [1, 0, 2])
