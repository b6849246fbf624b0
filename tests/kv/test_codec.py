"""What comes back of what was stored: within half a step, exact where it must be, never NaN."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nanokv.backend import NUMPY, Backend
from nanokv.errors import UsageError
from nanokv.kv.codec import CODECS, GROUP, get_codec
from nanokv.kv.storage import Storage
from nanokv.kv.tile import TILE

NAMES = st.sampled_from(CODECS)
VALUES = st.floats(-(2.0**100), 2.0**100, width=32)


def there_and_back(name, x, scale=None, dtype=np.float32):
    """x [N, H, D] with whole tiles of tokens -> the same, decoded."""
    codec = get_codec(name, dtype, NUMPY, scale)
    storage = Storage(1, len(x) // TILE, TILE, *x.shape[1:], codec, NUMPY)
    storage.write(0, slice(0, len(x)), x, x[::-1])
    k, v = storage.run(0, 0, len(x) // TILE)
    return k.reshape(x.shape), v.reshape(x.shape)[::-1]


def tile_of(rows):
    """The given tokens, then zeros up to a tile."""
    x = np.zeros((TILE, *rows.shape[1:]), rows.dtype)
    x[: len(rows)] = rows
    return x


@given(NAMES, hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 70)), elements=VALUES))
def test_nothing_is_further_off_than_half_a_step(name, rows):
    """int8: largest / 127; fp8: 2^-4 of the value or a fixed step near zero; int4: a fifteenth of its group's span."""
    x = tile_of(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        k, v = there_and_back(name, x)
    size = np.abs(x).astype(np.float64)
    largest = size.max(axis=-1, keepdims=True)
    eps = 4 * np.finfo(np.float32).eps * largest  # a few roundings of the arithmetic itself
    if name == "float32":
        bound_k = bound_v = np.zeros_like(size)
    elif name == "float16":
        bound_k = bound_v = np.where(size > 65504, size - 65504, size * 2.0**-11 + 2.0**-25)
    elif name == "bfloat16":
        bound_k = bound_v = size * 2.0**-8 + 2.0**-133
    elif name == "int8":
        bound_k = bound_v = largest / 127 / 2 + eps
    elif name == "fp8":
        bound_k = bound_v = size * 2.0**-4 + largest / 448 * 2.0**-10 + eps
    else:
        grouped = x.astype(np.float64).reshape(-1, GROUP, *x.shape[1:])
        spans = (grouped.max(1) - grouped.min(1)).repeat(GROUP, axis=0)
        rounding = 4 * np.finfo(np.float32).eps * (np.abs(grouped).max(1).repeat(GROUP, axis=0) + spans)
        bound_k = spans / 30 + rounding
        bound_v = np.zeros_like(size)
        for start in range(0, x.shape[-1], GROUP):  # a group never spans two heads
            part = x[..., start : start + GROUP].astype(np.float64)
            span = part.max(-1, keepdims=True) - part.min(-1, keepdims=True)
            rounding = 4 * np.finfo(np.float32).eps * (np.abs(part).max(-1, keepdims=True) + span)
            bound_v[..., start : start + GROUP] = span / 30 + rounding
    tiny = np.finfo(np.float32).smallest_subnormal * 4
    assert np.all(np.abs(k.astype(np.float64) - x) <= bound_k + tiny)
    assert np.all(np.abs(v.astype(np.float64) - x) <= bound_v + tiny)


@given(
    st.sampled_from(["int8", "fp8", "int4", "float32", "bfloat16"]),
    st.floats(-(2.0**127), 2.0**127, width=32),
    st.integers(1, 70),
)
def test_groups_of_zeros_or_of_one_value_come_back_exactly(name, value, dim):
    if name == "bfloat16":
        value = float(np.float32(value).astype(ml_dtypes.bfloat16))
        if not np.isfinite(value):
            return
    x = np.full((TILE, 2, dim), value, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for out in there_and_back(name, x):
            assert np.array_equal(out, x)


@given(NAMES, st.integers(0, 99), st.integers(1, 70), st.data())
def test_a_token_is_stored_the_same_whatever_comes_with_it(name, seed, dim, draw):
    x = np.random.default_rng(seed).standard_normal((2 * TILE, 2, dim)).astype(np.float32)
    y = np.random.default_rng(seed + 1).standard_normal(x.shape).astype(np.float32)
    unit = GROUP if name == "int4" else 1
    keep = draw.draw(st.lists(st.integers(0, len(x) // unit - 1), unique=True))
    for group in keep:
        y[group * unit : (group + 1) * unit] = x[group * unit : (group + 1) * unit]
    for one, other in zip(there_and_back(name, x), there_and_back(name, y), strict=True):
        for group in keep:
            assert np.array_equal(one[group * unit : (group + 1) * unit], other[group * unit : (group + 1) * unit])


@pytest.mark.parametrize("dim", [80, 96])
def test_values_of_a_head_are_grouped_by_its_own_channels(dim):
    """A head of 80 has groups of 32, 32 and 16; the next head's values, a thousand times as large, change no step of them."""
    x = np.random.default_rng(0).standard_normal((TILE, 2, dim)).astype(np.float32)
    x[:, 1] *= 1000
    _, v = there_and_back("int4", x)
    for start in range(0, dim, GROUP):
        part = x[:, 0, start : start + GROUP]
        span = np.ptp(part, axis=-1, keepdims=True)
        assert np.all(np.abs(v[:, 0, start : start + GROUP] - part) <= span / 30 * (1 + 1e-5))  # half a step, and rounding


def test_scales_near_the_end_of_half_precision_are_single():
    """Magnitudes of 127 times 65504: a scale kept in float16 would be infinite when doubled."""
    x = np.full((TILE, 1, 4), 127 * 65504 * 2, np.float32)
    for name in ("int8", "int4", "fp8"):
        for out in there_and_back(name, x):
            assert np.array_equal(out, x)


def test_values_close_together_do_not_overflow_an_inverse_scale():
    """A group whose values lie within 0.001: an inverse scale of 255 / 0.001 would not fit float16."""
    x = np.random.default_rng(0).uniform(0.5, 0.5005, (TILE, 1, 32)).astype(np.float32)
    for out in there_and_back("int4", x):
        assert np.abs(out - x).max() <= 0.0005 / 15


def test_e4m3_codes_that_look_special_are_numbers():
    """Only mantissa 7 of the top exponent is NaN: 0x78 .. 0x7E are 256, 288, ... 448."""
    codes = np.arange(0x78, 0x80, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert codes[:7].tolist() == [256, 288, 320, 352, 384, 416, 448]
    assert np.isnan(codes[7])
    codec = get_codec("fp8", np.float32, NUMPY, scale=1.0)
    x = np.array([[[256, 288, 320, 352, 384, 416, 448, 500, 1e30, -1e30]]], np.float32)
    (k,), _ = codec.encode(x, x)
    assert k.astype(np.float32).ravel().tolist() == [256, 288, 320, 352, 384, 416, 448, 448, 448, -448]


def test_int8_codes_are_rounded_to_the_nearest_and_ties_to_even():
    x = np.array([[[127, 1.6, -1.6, 0.4, 2.5, -3.5]]], np.float32)
    (codes, largest), _ = get_codec("int8", np.float32, NUMPY).encode(x, x)
    assert codes.ravel().tolist() == [127, 2, -2, 0, 2, -4]
    assert largest.item() == 127


def test_one_scale_divides_on_write_and_multiplies_on_read():
    """Scale 0.04: the code of x is x / 0.04, and reading gives code * 0.04."""
    codec = get_codec("fp8", np.float32, NUMPY, scale=0.04)
    x = np.array([[[0.04, 0.08, 10.0]]], np.float32)
    (codes,), _ = codec.encode(x, x)
    assert codes.astype(np.float32).ravel().tolist() == [1, 2, 256]  # 250 is halfway between 240 and 256, which is even
    out, _ = codec.decode([codes], [codes], 3)
    assert np.allclose(out.ravel(), [0.04, 0.08, 10.24], rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none_are_refused(scale):
    with pytest.raises(UsageError, match="scale"):
        get_codec("fp8", np.float32, NUMPY, scale)


@pytest.mark.parametrize(("name", "dim", "expected"), [
    ("float32", 64, 512), ("float16", 64, 256), ("bfloat16", 64, 256), ("int8", 64, 2 * (64 + 4)), ("fp8", 64, 2 * (64 + 4)),
    ("int4", 64, 2 * (32 + 16)), ("int4", 96, 2 * (48 + 24)), ("int4", 80, 40 + 80 * 8 / 32 + 40 + 3 * 8), ("int8", 1, 2 * 5),
])  # fmt: skip
def test_bytes_a_token_and_head(name, dim, expected):
    """K and V of one head, scales included; int4: 4 bits and 8 bytes for 32 values, a last group of 16 padded."""
    codec = get_codec(name, np.float32, NUMPY)
    assert Storage(1, 1, TILE, 1, dim, codec, NUMPY).bytes_per_token == expected


def test_one_scale_for_everything_takes_no_plane():
    assert Storage(1, 1, TILE, 1, 64, get_codec("fp8", np.float32, NUMPY, 1.0), NUMPY).bytes_per_token == 128


def test_unknown_formats_and_formats_that_a_library_lacks_are_refused_when_built():
    with pytest.raises(UsageError, match="'int3'.*float32, float16"):
        get_codec("int3", np.float32, NUMPY)
    device = Backend("cupy", np)
    for name in ("bfloat16", "fp8"):
        with pytest.raises(UsageError, match=f"{name} is not available on cupy"):
            get_codec(name, np.float32, device)
    with pytest.raises(UsageError, match="fp8 only"):
        get_codec("int8", np.float32, NUMPY, 1.0)


@given(st.sampled_from(["int8", "fp8", "int4"]), st.integers(0, 99))
def test_a_copied_block_has_its_scales(name, seed):
    x = np.random.default_rng(seed).standard_normal((32, 2, 40)).astype(np.float32)
    storage = Storage(2, 8, 32, 2, 40, get_codec(name, np.float32, NUMPY), NUMPY)
    storage.clear(0, 8 * 32)
    for layer in range(2):
        storage.write(layer, np.arange(64, 96), x * (layer + 1), x)
    storage.copy_unit(2, 5)
    storage.clear(64, 96)
    for layer in range(2):
        k, v = storage.gather(layer, [5, 0, 0, 0])
        again = Storage(1, 4, 32, 2, 40, get_codec(name, np.float32, NUMPY), NUMPY)
        again.clear(0, 128)
        again.write(0, slice(0, 32), x * (layer + 1), x)
        assert np.array_equal(k[0, :32], again.gather(0, [0, 1, 2, 3])[0][0, :32])
        assert np.array_equal(v[0, :32], again.gather(0, [0, 1, 2, 3])[1][0, :32])
