"""Keys and values of nanokv/kv/codec.py read back: one head of one token, D numbers, whatever the format.

Each line is the codec's own arithmetic, so the numbers are those of its decode(). An address is a plane's, in the layout
of nanokv/kv/storage.py: [slots, H, ...]; planes 1 and 2 are the scales, or lowest values and spans.

Symbols: H key-value heads, D head width, G groups of 32 channels.
"""

from typing import Any

import numpy as np

from nanokv.kernels.compiling import inner
from nanokv.kernels.layout import BFLOAT16, FLOAT16, FLOAT32, FP8, FP8_FIXED, INT8
from nanokv.kernels.simd import byte, float_of_bits, number, put, signed_byte, word

GROUP = 32
_F, _I = np.float32, np.int32


@inner()
def half(bits: Any) -> Any:
    """float16's bits -> float32: a product with 2^112, which is exact, mends the exponent; NaN and infinity keep theirs."""
    size = (bits & _I(0x7FFF)) << _I(13)
    sign = (bits & _I(0x8000)) << _I(16)
    if size >= _I(0x7C00 << 13):
        return float_of_bits(size | _I(0x7F800000) | sign)
    value = float_of_bits(size) * _F(2.0**112)
    return -value if sign else value


@inner()
def quarter(bits: Any) -> Any:
    """fp8 e4m3's bits -> float32, in the same way; its only special value is NaN."""
    size = (bits & _I(0x7F)) << _I(20)
    if size == _I(0x7F << 20):
        return _F(np.nan)
    value = float_of_bits(size) * _F(2.0**120)
    return -value if bits & _I(0x80) else value


@inner()
def decode_row(codec: Any, fixed: Any, planes: Any, keys: Any, slot: Any, head: Any, heads: Any, dim: Any, out: Any) -> None:
    """One head of the token in `slot` into float32 at the address `out`. `planes`: three addresses; `fixed`: fp8's scale."""
    entry = slot * heads + head
    at, codes = entry * dim, planes[0]
    if codec == FLOAT32:
        for d in range(dim):
            put(out, d, number(codes, at + d))
    elif codec == FLOAT16:
        for d in range(dim):
            put(out, d, half(word(codes, at + d)))
    elif codec == BFLOAT16:
        for d in range(dim):
            put(out, d, float_of_bits(word(codes, at + d) << _I(16)))
    elif codec == INT8:
        scale = number(planes[1], entry)
        for d in range(dim):
            put(out, d, _F(signed_byte(codes, at + d)) / _F(127) * scale)
    elif codec == FP8:
        scale = number(planes[1], entry)
        for d in range(dim):
            put(out, d, quarter(byte(codes, at + d)) / _F(448) * scale)
    elif codec == FP8_FIXED:
        for d in range(dim):
            put(out, d, quarter(byte(codes, at + d)) * fixed)
    else:
        packed = entry * ((dim + 1) // 2)
        channels = (slot // GROUP * heads + head) * dim
        groups = entry * ((dim + GROUP - 1) // GROUP)
        for d in range(dim):
            code = _F(byte(codes, packed + d // 2) >> _I(4 * (d % 2)) & _I(15)) / _F(15)
            group = channels + d if keys else groups + d // GROUP
            put(out, d, number(planes[1], group) + code * number(planes[2], group))
