"""exp, the sigmoids, GELU and the sum rule of docs/numerics.md on sixteen lanes, for the kernels to call."""

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
_GELU_END = F(14)  # beyond it exp(-x^2 / 2) is 0
_MILLS_ABOVE = tuple(map(F, (3.99084156e-3, 3.97992767e-2, 1.80777177e-1, 4.35000986e-1, 0.5)))
_MILLS_BELOW = tuple(map(F, (1.00034093e-2, 9.97695178e-2, 4.62976545e-1, 1.19233203, 1.66788673, 1.0)))


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
def gelu_by_erf(x: Any) -> Any:
    """GELU by the error function: x Q(-x), Q(t) = exp(-t^2 / 2) times a rational function of t for t >= 0."""
    t, zero, half = absolute(x), splat(F(0)), splat(F(-0.5))
    t = where_less(t, splat(_GELU_END), t, splat(_GELU_END))
    square = mul(t, t)
    e = exp(mul(square, half))
    e = fma(mul(e, half), fma(t, t, negative(square)), e)
    above, below = splat(_MILLS_ABOVE[0]), splat(_MILLS_BELOW[0])
    for i in range(1, 5):
        above = fma(above, t, splat(_MILLS_ABOVE[i]))
    for i in range(1, 6):
        below = fma(below, t, splat(_MILLS_BELOW[i]))
    g = div(mul(where_less(x, zero, x, t), above), below)
    return where_less(x, zero, mul(g, e), fma(negative(g), e, x))


@inner()
def combine_lanes(a: Any, b: Any, c: Any, d: Any) -> Any:
    """The end of the sum rule for 64 lanes: 32 apart, 16 apart, then within sixteen -> the sum in every lane."""
    return fold(add(add(a, c), add(b, d)))
