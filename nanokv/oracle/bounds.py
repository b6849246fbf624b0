"""How far a right kernel may be from the exact result: an elementwise forward error bound for softmax attention.

Derived in docs/oracle.md, from Higham's gamma_n = n u / (1 - n u) for products and sums in any order (*Accuracy and
Stability of Numerical Algorithms*, sections 2.2, 3.1), and from how softmax carries an error of its scores (Blanchard, Higham
and Higham 2021, "Accurately computing the log-sum-exp and softmax functions"). No constant is fitted to a kernel.

Symbols: Hq query heads, R rows, S keys, D head width; u a unit roundoff; z scores as the softmax sees them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanokv.attention import naive_sum
from nanokv.oracle.formats import SCALED, Format, embeds, format_of

TANH_ULPS = 4  # of the tanh in a soft cap, and of sine, cosine and the power behind rotary angles
ARITHMETICS = ("fused", "eager")
FIXED_ROUNDINGS = 4  # of one output: the division (a reciprocal and a product), the last rescaling, log


@dataclass(frozen=True)
class Arithmetic:
    """What a kernel computes in, by names of formats.

    `product`: what enters a product (q, k, v, and the softmax's numerators before they multiply v). `accumulate`: sums,
    softmax, rescaling. `scores`: what scores are rounded to before the softmax, None for not at all. `query`: what q times
    the scale (or q and k, each times its root) is rounded to, None where the scale multiplies the sums. `tile`: the fewest
    keys between two rescalings of the running sums. `exp_ulps`: how good the exponential is, in units in the last place of
    `accumulate`.
    """

    product: str
    accumulate: str
    scores: str | None = None
    query: str | None = None
    tile: int = 16
    exp_ulps: float = 4.0


def default_arithmetic(dtype: str, kind: str = "fused") -> Arithmetic:
    """What kernels for q in `dtype` do: half-precision products with float32 sums, everything in one format otherwise.
    `eager` kernels store the score matrix in `dtype` and may scale q in it, `fused` ones do not."""
    accumulate = "float64" if dtype == "float64" else "float32"
    between = dtype if kind == "eager" else None
    return Arithmetic(dtype, accumulate, between, between)


class Terms(NamedTuple):
    """What the bound needs to know of one sequence. Arrays of keys hold zeros where a key is hidden, z minus infinity."""

    z: np.ndarray  # [Hq, R, S]
    weights: np.ndarray  # [Hq, R, S]
    magnitudes: np.ndarray  # [Hq, R, S] sum over D of |q| |k|, times the scale
    reach: np.ndarray  # [Hq, R, 1] sum over D of |q|, times the scale
    bent: np.ndarray  # [Hq, R, S] error that a soft cap or a bias adds to z, in units of u
    turned: np.ndarray  # [R, S] relative error of rotating q and k, in units of u; 0 without rope
    v: np.ndarray  # [S, H, D]
    out: np.ndarray  # [R, Hq, D]
    lse: np.ndarray  # [R, Hq]


def gamma(n: np.ndarray | float, u: float) -> np.ndarray:
    """Higham's gamma_n, infinite where n u reaches 1: there is no bound then."""
    product = np.asarray(n, dtype=np.float64) * u
    return np.where(product < 1, product / np.maximum(1 - product, 1e-300), np.inf)


def forward_bound(terms: Terms, dim: int, dtype: str, stored: str, arithmetic: Arithmetic) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of |out - exact| [R, Hq, D] and |lse - exact| [R, Hq], for `dtype` out and float32 lse (float64 for float64)."""
    product, sums, output = (format_of(name) for name in (arithmetic.product, arithmetic.accumulate, dtype))
    u = sums.roundoff
    narrow = 0.0 if embeds(sums, product) else product.roundoff  # what rounding to a product's format costs
    rotated = bool(terms.turned.any())
    q_error, k_error = (_entering(name, product, u, narrow, rotated) for name in (dtype, stored))
    v_error = _entering(stored, product, u, narrow)
    small = product.lost if v_error else 0.0  # what a k or v below the product's normal range loses
    seen = np.isfinite(terms.z)
    count = seen.sum(axis=-1, keepdims=True)  # [Hq, R, 1]
    folds = 1 + np.ceil(count / arithmetic.tile)

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        errors = np.where(seen, _score_errors(terms, dim, u, (1 + q_error) * (1 + k_error), arithmetic), 0.0)
        errors += small * terms.reach
        top = np.max(np.abs(terms.z), axis=-1, keepdims=True, initial=0.0, where=seen)
        errors += u * (3 * (np.where(seen, np.abs(terms.z), 0) + top) + (folds + 1) * (2 * arithmetic.exp_ulps + 2))
        shift = np.where(seen, np.expm1(errors), 0.0)  # |relative error of a numerator|
        moved = (terms.weights * shift).sum(axis=-1)  # [Hq, R]
        rest = np.where(moved < 1, 1 - moved, np.nan)

        def rows(x: np.ndarray) -> np.ndarray:  # [Hq, R] -> [R, Hq, 1]
            return x.T[:, :, None]

        size, square = np.abs(terms.v), terms.v**2
        second = naive_sum(terms.weights, square)
        variance = np.maximum(second - terms.out**2, 0) + 1e-14 * second
        spread = np.sqrt(rows((terms.weights * shift**2).sum(axis=-1)) * variance)  # Cauchy and Schwarz
        apart = naive_sum(terms.weights * shift, size) + np.abs(terms.out) * rows(moved)
        softmax = np.minimum(spread, apart) / rows(rest)
        summed = gamma(rows((count + folds)[..., 0]), u)
        denominator = (1 + summed) * (1 + narrow) - 1  # a kernel may sum the numerators that it rounded for the product
        weighed = naive_sum(terms.weights * (1 + shift), size) / rows(rest)
        numerators = ((1 + denominator) * (1 + v_error) - 1) * weighed
        numerators += (1 + denominator) * small * rows(1 + moved) / rows(rest)
        reach = np.abs(terms.out) + softmax
        total = softmax + (numerators + denominator * reach) / (1 - denominator)
        total += FIXED_ROUNDINGS * u * (reach + total)
        lost = max(product.lost, sums.lost)
        total += lost * naive_sum(seen.astype(np.float64), size)  # the denominator is at least 1
        total += output.roundoff * (np.abs(terms.out) + total) + output.lost

        lse_u = format_of("float64" if dtype == "float64" else "float32").roundoff
        each = -np.log1p(-np.minimum(1 - (1 - moved.T) * (1 - summed[..., 0]), 1))
        level = np.abs(np.where(np.isfinite(terms.lse), terms.lse, 0))
        lse = each + FIXED_ROUNDINGS * u * (level + top[..., 0].T + 1) + lse_u * level
    empty = (count == 0)[..., 0].T
    total[empty] = 0
    lse[empty] = 0
    reference = 2.0 if sums.name == "float64" else 1.0  # the reference is in float64 too
    return np.where(np.isnan(total), np.inf, total * reference), np.where(np.isnan(lse), np.inf, lse * reference)


def _entering(stored: str, product: Format, u: float, narrow: float, rotated: bool = False) -> float:
    """Relative error of a stored number on its way into a product. `narrow` is what rounding from the sums' format costs:
    that is where a code meets its scale, and where rotary angles turn."""
    if stored in SCALED:
        return (1 + u) * (1 + narrow) - 1
    return max(0.0 if embeds(format_of(stored), product) else product.roundoff, narrow if rotated else 0.0)


def _score_errors(terms: Terms, dim: int, u: float, entering: float, arithmetic: Arithmetic) -> np.ndarray:
    """|computed z - z| [Hq, R, S]: the products, the scale, the rotation, the soft cap or bias, the rounding of scores."""
    query = (1 + format_of(arithmetic.query).roundoff) ** 2 if arithmetic.query else 1 + u
    factor = query * entering * (1 + u * terms.turned) * (1 + gamma(dim + 1, u)) - 1
    errors = factor * terms.magnitudes + u * terms.bent
    if arithmetic.scores:  # the product, the scaled product, and what a soft cap or a bias makes of it
        times = 2 + (terms.bent > 0)
        growth = (1 + format_of(arithmetic.scores).roundoff) ** times - 1
        errors = errors + growth * (np.abs(np.where(np.isfinite(terms.z), terms.z, 0)) + terms.bent + errors)
    return errors
