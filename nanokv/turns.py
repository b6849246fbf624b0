"""cos and sin of whole multiples of a frequency, with the same bits on every machine.

A library's cos, sin and pow differ in their last bits from one version, processor or instruction set to another. Here is
nothing but IEEE +, -, *, rounding to a whole number and a choice, each of which has one result, on float64 arrays; what has
to be more precise than that is computed once a model in decimal.

An angle is counted in quarter turns: taking away the whole ones is exact then, and no multiple of pi is needed. A frequency
is hi + lo, hi of 31 bits, so that a position below 2^22 times hi is exact, and the angle is off by less than 2^-62 quarter
turns before its last rounding.
"""

import math
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

DIGITS = 50  # of decimal arithmetic: more than hi and lo hold
TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164194989")
_HI_BITS = 31

# cos(pi / 2 s) = 1 + z Q(z) and sin(pi / 2 s) = s P(z), z = s^2, abs(s) <= 0.51: Q and P interpolated at the Chebyshev nodes
# and rounded, the highest power first. Off by 2e-17 and 7e-17, most of it the rounding of the first coefficient.
_Q = (-6.327118256791765e-09, 4.7106624296825127e-07, -2.5202038611310655e-05, 9.19260274497239e-04, -2.0863480763338136e-02,
      2.5366950790104775e-01, -1.2337005501361697)  # fmt: skip
_P = (5.631615875725796e-08, -3.5986270978327216e-06, 1.6044114650211596e-04, -4.68175413183624e-03, 7.969262624601618e-02,
      -6.459640975062438e-01, 1.5707963267948966)  # fmt: skip
# cos after 0 .. 3 quarters and s more: cos s, -sin s, -cos s, sin s. What each begins with, and its polynomial [7, 4].
_START = np.array([1.0, 0.0, -1.0, 0.0])
_POLYNOMIAL = np.array([_Q, np.negative(_P), np.negative(_Q), _P]).T.copy()
_IS_SINE = np.array([False, True, False, True])


def quarter_turns(frequencies: Sequence[Decimal]) -> tuple[np.ndarray, np.ndarray]:
    """Radians a position -> quarter turns a position as hi and lo, float64 [n]. To be called with DIGITS of precision."""
    turns = [4 * each / TWO_PI for each in frequencies]
    hi = []
    for each in turns:
        fraction, exponent = math.frexp(each)
        hi.append(math.ldexp(round(math.ldexp(fraction, _HI_BITS)), exponent - _HI_BITS))
    lo = [float(each - Decimal(high)) for each, high in zip(turns, hi, strict=True)]
    return np.array(hi), np.array(lo)


def cos_sin(positions: np.ndarray, hi: np.ndarray, lo: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """positions [R] of frequencies hi + lo [n] in quarter turns -> cos and sin [R, n] float64.

    Within 2^-52 of 1 and 2.5 units in the last place for positions below 2^22; beyond, the error grows with the position, to
    2^-22 at 2^30. Rounded to float32 it is the correctly rounded result but for one in some 10^8.
    """
    count = len(hi)
    both = np.concatenate([hi, hi]), np.concatenate([lo, lo])  # a sine is the cosine a quarter earlier
    at = positions[:, None].astype(np.float64)
    s = at * both[0]
    whole = np.rint(s)
    s -= whole
    s += at * both[1]
    whole[:, count:] -= 1
    quarter = whole.astype(np.int64) & 3
    z = s * s
    highest, *coefficients = _POLYNOMIAL.take(quarter, axis=1)  # [R, 2 n] each
    out = highest * z
    for coefficient in coefficients[:-1]:
        out += coefficient
        out *= z
    out += coefficients[-1]
    out *= np.where(_IS_SINE.take(quarter), s, z)
    out += _START.take(quarter)
    return out[:, :count], out[:, count:]
