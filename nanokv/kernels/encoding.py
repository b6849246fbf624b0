"""Keys and values written: one head of one token, D numbers, in a format of nanokv/kv/codec.py, bit for bit the codec's.

Planes are as in decoding.py. A number that a format cannot hold saturates, as the codecs have it. int4 is not here: its
tiles are encoded whole, by the codec.

Symbols: R rows, H key-value heads, D head width.
"""

from typing import Any

import numpy as np

from nanokv.kernels.compiling import inner
from nanokv.kernels.layout import BFLOAT16, FLOAT16, FLOAT32, FP8_FIXED, INT8
from nanokv.kernels.rows import rows_each
from nanokv.kernels.simd import bits_of_float, float_of_bits, integers, put, put_byte, put_word, vector

_F, _I = np.float32, np.int32


@inner()
def to_half(x: Any) -> Any:
    """float32 to the nearest float16, ties to even; beyond 65504 its largest value."""
    bits = bits_of_float(x)
    sign = bits >> _I(16) & _I(0x8000)
    size = float_of_bits(bits & _I(0x7FFFFFFF))
    if size != size:
        return sign | _I(0x7E00)
    size = min(size, _F(65504))
    if size < _F(2.0**-14):
        return sign | _I(np.rint(size * _F(2.0**24)))  # subnormal: whole numbers of 2^-24
    bits = bits_of_float(size)
    return sign | ((bits + _I(0xFFF) + (bits >> _I(13) & _I(1))) >> _I(13)) - _I(112 << 10)


@inner()
def to_bfloat16(x: Any) -> Any:
    """float32 to the nearest bfloat16, ties to even."""
    bits = bits_of_float(x)
    if x != x:
        return (bits >> _I(16) & _I(0x8000)) | _I(0x7FC0)
    return ((bits >> _I(16) & _I(1)) + _I(0x7FFF) + (bits & _I(0xFFFF)) >> _I(16)) + (bits >> _I(16)) & _I(0xFFFF)


@inner()
def to_fp8(x: Any) -> Any:
    """float32 in -448 .. 448 to the nearest fp8 e4m3, ties to even."""
    bits = bits_of_float(x)
    sign = bits >> _I(24) & _I(0x80)
    size = float_of_bits(bits & _I(0x7FFFFFFF))
    if size != size:
        return sign | _I(0x7F)
    if size < _F(2.0**-6):
        return sign | _I(np.rint(size * _F(2.0**9)))  # subnormal: whole numbers of 2^-9
    bits = bits_of_float(size)
    return sign | ((bits + _I(0x7FFFF) + (bits >> _I(20) & _I(1))) >> _I(20)) - _I(120 << 3)


@inner()
def _within(x: Any, top: Any) -> Any:
    """x in -top .. top; NaN stays."""
    return -top if x < -top else top if x > top else x


@inner()
def encode_row(codec: Any, fixed: Any, planes: Any, slot: Any, head: Any, heads: Any, x: Any) -> None:
    """x [D] into one head of the token in `slot`; `planes`: three addresses, `fixed`: fp8's scale."""
    dim = len(x)
    entry = slot * heads + head
    at, codes = entry * dim, planes[0]
    if codec == FLOAT32:
        for d in range(dim):
            put(codes, at + d, x[d])
    elif codec == FLOAT16:
        for d in range(dim):
            put_word(codes, at + d, to_half(x[d]))
    elif codec == BFLOAT16:
        for d in range(dim):
            put_word(codes, at + d, to_bfloat16(x[d]))
    elif codec == FP8_FIXED:
        for d in range(dim):
            put_byte(codes, at + d, to_fp8(_within(x[d] / fixed, _F(448))))
    else:
        largest = _F(0)
        for d in range(dim):
            size = abs(x[d])
            if size > largest or size != size:
                largest = size
        put(planes[1], entry, largest)
        divisor = _F(1) if largest == _F(0) else largest
        for d in range(dim):
            if codec == INT8:
                code = _within(x[d] / divisor * _F(127), _F(127))
                put_byte(codes, at + d, _I(0) if code != code else _I(np.rint(code)))
            else:
                put_byte(codes, at + d, to_fp8(_within(x[d] / divisor * _F(448), _F(448))))


@inner()
def append(
    task: Any, rows: Any, x: Any, stride: Any, heads: Any, dim: Any, slots: Any, sources: Any, homes: Any, values: Any,
    fixed: Any,
) -> None:  # fmt: skip
    """x [R, H, D] with rows `stride` apart into the slots [R] of the sources [S, 7] that `homes` [R] names, as keys or
    `values`."""
    each, places = rows_each(heads * dim), integers(slots, rows)
    for r in range(task * each, min(rows, (task + 1) * each)):
        source = sources[homes[r]]
        planes = source[4:7] if values else source[1:4]
        for h in range(heads):
            encode_row(source[0], fixed, planes, places[r], h, heads, vector(x + (r * stride + h * dim) * 4, dim))
