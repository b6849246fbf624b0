"""Norms, activations, positions, cache writes and greedy choice on the CPU: the compiled kernels' and the codecs' bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.kernels import layout
from nanokv.kernels.cuda import launches
from nanokv.kv.codec import get_codec
from tests.cuda.machine import ORDERS, CpuDevice
from tests.support import examples

compiled = pytest.importorskip("nanokv.kernels.compiled", exc_type=ImportError)
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 200, 768]))
SEEDS = st.integers(0, 99)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(3)


def empty(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


@examples(15)
@given(st.integers(1, 9), WIDTHS, st.sampled_from(list(ORDERS)), SEEDS)
def test_norms(rows, width, order, seed):
    rng = np.random.default_rng(seed)
    x, weight, bias = normal(rng, rows, width), normal(rng, width), normal(rng, width)
    device, out = CpuDevice(order), empty(rows, width)
    launches.layer_norm(device, x, weight, bias, 1e-5, out)
    assert np.array_equal(out, compiled.layer_norm(x, weight, bias, 1e-5))
    out = empty(rows, width)
    launches.rms_norm(device, x, weight, 1e-6, out)
    assert np.array_equal(out, compiled.rms_norm(x, weight, 1e-6))


@examples(15)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([2, 6, 8, 64, 66]), st.booleans(), SEEDS)
def test_heads_of_a_wider_matrix_are_turned_and_normed_in_place(rows, heads, dim, adjacent, seed):
    rng = np.random.default_rng(seed)
    qkv, weight = normal(rng, rows, heads + 3, dim), normal(rng, dim)
    cos, sin = (normal(rng, rows, 1, dim // 2) for _ in range(2))
    x, device, stride = qkv[:, 1 : 1 + heads], CpuDevice(), (heads + 3) * dim
    out = empty(rows, heads, dim)
    launches.rotate(device, x, cos, sin, adjacent, out, stride)
    assert np.array_equal(out, compiled.rotate(x, cos, sin, adjacent))
    out = empty(rows, heads, dim)
    launches.rms_norm(device, x, weight, 1e-6, out, stride)
    assert np.array_equal(out, compiled.rms_norm(x, weight, 1e-6))


@examples(10)
@given(st.integers(1, 5), st.integers(1, 300), SEEDS)
def test_activations(rows, width, seed):
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, 2 * width) * np.float32(10)  # into the range where exp is cut off
    x.flat[0] = 0
    device, out, half = CpuDevice(), empty(rows, 2 * width), empty(rows, width)
    launches.gelu_new(device, x, out)
    launches.swiglu(device, x, half)
    assert np.array_equal(out, compiled.gelu_new(x))
    launches.gelu_erf(device, x, out)
    assert np.array_equal(out, compiled.gelu_erf(x))
    assert np.array_equal(half, compiled.swiglu(x))
    y = normal(rng, rows, 2 * width)
    expected = x + y
    launches.add(device, x, y)
    assert np.array_equal(x, expected)


def test_embedding():
    rng = np.random.default_rng(0)
    tokens, positions = np.array([4, 0, 4], np.int32), np.array([0, 6, 2], np.int32)
    table, places, out = normal(rng, 5, 33), normal(rng, 7, 33), empty(3, 33)
    launches.embed(CpuDevice(), tokens, table, positions, places, out)
    assert np.array_equal(out, table[tokens] + places[positions])
    launches.embed(CpuDevice(), tokens, table, positions, None, out)
    assert np.array_equal(out, table[tokens])


@examples(8)
@given(st.integers(1, 3), st.sampled_from([1, 2, 31, 33, 1024, 1025, 3000]), st.sampled_from(list(ORDERS)), SEEDS)
def test_greedy_takes_the_lowest_of_equals(rows, vocab, order, seed):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, (rows, vocab)).astype(np.float32)  # many equals
    logits[0, : vocab // 2] = -np.inf
    tokens = np.full(rows, -1, np.int32)
    launches.argmax(CpuDevice(order), logits, tokens)
    assert np.array_equal(tokens, logits.argmax(axis=1))


NAMES = {layout.FLOAT32: "float32", layout.FLOAT16: "float16", layout.BFLOAT16: "bfloat16", layout.INT8: "int8",
         layout.FP8: "fp8", layout.FP8_FIXED: "fp8"}  # fmt: skip


@examples(24)
@given(st.sampled_from(list(NAMES)), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 7, 32, 64, 65]),
       st.sampled_from([1e-30, 1e-9, 1e-5, 1e-3, 1.0, 700.0, 1e6]), SEEDS)  # fmt: skip
def test_what_is_written_to_the_cache_is_what_the_codec_writes(number, rows, heads, dim, size, seed):
    rng = np.random.default_rng(seed)
    fixed = 0.37 if number == layout.FP8_FIXED else None
    codec = get_codec(NAMES[number], np.float32, NUMPY, fixed)
    qkv = normal(rng, rows, heads + 1, dim) * np.float32(size)
    qkv.flat[0] = 0
    x, slots = qkv[:, 1:], rng.permutation(6)[:rows].astype(np.int32)
    expected = codec.encode(x, x)[0]
    planes = [np.zeros((6, *each.shape[1:]), each.dtype) for each in expected]
    kept = [plane.copy() for plane in planes]
    for plane, entries in zip(kept, expected, strict=True):
        plane[slots] = entries
    slots[-1] = slots[-1] if seed % 2 else -1  # a row that is left out
    if slots[-1] < 0:
        for plane, old in zip(kept, planes, strict=True):
            rest = np.setdiff1d(np.arange(6), slots)
            plane[rest] = old[rest]
    scales = planes[1] if len(planes) > 1 else None
    launches.append(CpuDevice(), x, slots, number, planes[0], scales, fixed or 1.0, (heads + 1) * dim)
    for plane, other in zip(planes, kept, strict=True):
        assert np.array_equal(plane.view(np.uint8), other.view(np.uint8))


def test_a_block_is_copied_with_everything_in_it():
    plane = np.random.default_rng(0).standard_normal((2, 5, 16, 3, 7)).astype(np.float16)
    expected = plane.copy()
    expected[:, 3] = plane[:, 1]
    launches.copy_unit(CpuDevice(plane=plane), plane, 1, 3)
    assert np.array_equal(plane, expected)


@pytest.mark.parametrize(("codes", "whole"), [(np.arange(-127, 128), 127), (np.arange(16), 15), (None, 448)])
def test_shares_of_codes_are_the_division(codes, whole):
    """share() in common.cuh, in NumPy with exact fused multiply-adds: every code of every format."""
    import ml_dtypes

    from tests.kernels.oracle import fma

    if codes is None:
        codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        codes = codes[np.isfinite(codes)]
    x, w = codes.astype(np.float32), np.float32(whole)
    inverse = np.float32(1) / w
    near = x * inverse
    assert np.array_equal(fma(fma(-near, w, x), inverse, near), x / w)
