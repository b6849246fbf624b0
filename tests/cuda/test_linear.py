"""Linear kernels on the CPU: the bits of the compiled CPU kernels for every format, shape and order of threads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.kernels.cuda.launches import embed_rows, linear, sums_shape
from nanokv.kernels.matrix import FORMATS, Matrix, from_int4, pack
from tests.cuda.machine import ORDERS, CpuDevice
from tests.cuda.small_examples import tensors_of
from tests.support import examples

compiled = pytest.importorskip("nanokv.kernels.compiled", exc_type=ImportError)


def run(x: np.ndarray, matrix: Matrix, bias: np.ndarray | None, order: str = "forwards") -> tuple[np.ndarray, CpuDevice]:
    """The kernels' result, everything that they should not read NaN."""
    out = np.full((len(x), matrix.shape[0]), np.nan, np.float32)
    sums = np.full(sums_shape(len(x), matrix), np.nan, np.float32)
    device = CpuDevice(order, x=x, out=out, sums=sums, **tensors_of(matrix), **({} if bias is None else {"bias": bias}))
    linear(device, x, matrix, bias, out, sums)
    return out, device


def random_matrix(rng: np.random.Generator, form: str, outputs: int, inputs: int, lows: bool) -> Matrix:
    weight = rng.standard_normal((outputs, inputs), dtype=np.float32)
    if form == "int4" and lows:
        groups = -(-inputs // 32)
        codes = rng.integers(0, 16, (outputs, groups, 32), dtype=np.uint8)
        scales, low = (rng.standard_normal((outputs, groups)).astype(np.float16) for _ in range(2))
        return from_int4(codes, scales, low, (outputs, inputs))
    return pack(weight, form)


SIZES = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 300]))


@examples(25)
@given(st.sampled_from(FORMATS), st.booleans(), SIZES, SIZES, st.one_of(st.integers(1, 12), st.sampled_from([32, 33, 40, 130])),
       st.booleans(), st.sampled_from(list(ORDERS)), st.integers(0, 99))  # fmt: skip
def test_every_product_has_the_bits_of_the_compiled_kernels(form, lows, outputs, inputs, rows, with_bias, order, seed):
    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, form, outputs, inputs, lows)
    x = rng.standard_normal((rows, inputs), dtype=np.float32)
    bias = rng.standard_normal(outputs, dtype=np.float32) if with_bias else None
    got, _ = run(x, matrix, bias, order)
    assert np.array_equal(got, compiled.linear(x, matrix, bias))
    # gamma_K of docs/numerics.md, K products and a bias, in float64
    exact = x.astype(np.float64) @ matrix.to_array().astype(np.float64).T + (0 if bias is None else bias)
    size = np.abs(x).astype(np.float64) @ np.abs(matrix.to_array()).astype(np.float64).T + (0 if bias is None else np.abs(bias))
    unit = 2.0**-24 * (inputs + 2)
    assert (np.abs(got - exact) <= unit / (1 - unit) * size + 2.0**-149).all()


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_does_not_depend_on_the_rows_beside_it(form):
    """One row, a few, and many: three kernels, the same bits."""
    rng = np.random.default_rng(3)
    matrix = random_matrix(rng, form, 70, 150, False)
    x = rng.standard_normal((140, 150), dtype=np.float32)
    many = run(x, matrix, None)[0]
    assert np.array_equal(run(x[:1], matrix, None)[0], many[:1])
    assert np.array_equal(run(x[:11], matrix, None)[0], many[:11])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_every_weight_is_read_once(form, rows):
    """What linear moves, counted: W once a launch for up to eight rows or 128, x once a panel, no byte of W twice."""
    rng = np.random.default_rng(4)
    matrix = random_matrix(rng, form, 192, 320, False)
    x = rng.standard_normal((rows, 320), dtype=np.float32)
    _, device = run(x, matrix, np.zeros(192, np.float32))
    counts = device.counts[device.launched[0]]
    assert counts.loads["W"] == counts.distinct_loads["W"] == matrix.codes.nbytes
    assert counts.loads["x"] == 3 * x.nbytes
    assert counts.flops >= 2 * rows * 192 * 320


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("lows", [False, True])
def test_rows_of_a_packed_matrix_are_looked_up(form, lows):
    matrix, tokens = random_matrix(np.random.default_rng(5), form, 70, 45, lows), np.array([3, 69, 0, 64], np.int32)
    out = np.full((4, 45), np.nan, np.float32)
    embed_rows(CpuDevice(**tensors_of(matrix)), tokens, matrix, out)
    assert np.array_equal(out, matrix[tokens])
