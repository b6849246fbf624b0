"""exp, the sigmoids and the sum rule of docs/numerics.md on sixteen lanes, for the kernels to call."""

from typing import Any

import numpy as np

from nanokv.kernels.compiling import inner
from nanokv.kernels.simd import absolute, add, div, fma, fold, mul, negative, power_of_two, splat, sub, where_less

F = np.float32
LOWEST = F(np.finfo(np.float32).min)
_EXP_END = F(-87.0)  # below it exp is 0: all that it returns is a normal number
_LOG2_E, _SHIFTER, _LN2_HIGH, _LN2_LOW = F(1.44269504), F(12582912.0), F(-0.693359375), F(2.12194440e-4)
_P0, _P1, _P2 = F(1.9875691500e-4), F(1.3981999507e-3), F(8.3334519073e-3)
_P3, _P4, _P5 = F(4.1665795894e-2), F(1.6666665459e-1), F(5.0000001201e-1)
_GELU_0 = F(2 * np.sqrt(2 / np.pi))
_GELU_1 = F(2 * np.sqrt(2 / np.pi) * 0.044715)


@inner()
def exp(x: Any) -> Any:
    """exp(x) for x <= 0."""
    end, zero = splat(_EXP_END), splat(F(0))
    y = where_less(x, end, end, x)
    t = fma(y, splat(_LOG2_E), splat(_SHIFTER))
    n = sub(t, splat(_SHIFTER))
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), y))
    p = fma(splat(_P0), r, splat(_P1))
    p = fma(p, r, splat(_P2))
    p = fma(p, r, splat(_P3))
    p = fma(p, r, splat(_P4))
    p = fma(p, r, splat(_P5))
    p = add(fma(p, mul(r, r), r), splat(F(1)))
    return where_less(x, end, zero, mul(p, power_of_two(t)))


@inner()
def times_sigmoid(x: Any, z: Any) -> Any:
    """x / (1 + exp(-z)), by the exponential of a number that is never positive."""
    e = exp(negative(absolute(z)))
    return div(where_less(z, splat(F(0)), mul(x, e), x), add(splat(F(1)), e))


@inner()
def gelu(x: Any) -> Any:
    """GELU by tanh: (1 + tanh(u)) / 2 is the sigmoid of 2 u."""
    return times_sigmoid(x, mul(x, fma(splat(_GELU_1), mul(x, x), splat(_GELU_0))))


@inner()
def combine_lanes(a: Any, b: Any, c: Any, d: Any) -> Any:
    """The end of the sum rule for 64 lanes: 32 apart, 16 apart, then within sixteen -> the sum in every lane."""
    return fold(add(add(a, c), add(b, d)))
