"""How far a float32 schedule may lie from the float64 reference: a first-order rounding analysis, doubled for the rest.

u is the unit roundoff of float32, gamma(n) = n u / (1 - n u) what a sum of n products may lose (Higham, Accuracy and Stability
of Numerical Algorithms, section 3.1). The inputs are the same float32 numbers on both sides.

Scores: q is scaled (one rounding) and multiplied, so |s' - s| <= gamma(D + 1) scale |q|.|k| = E.
Weights: exp(s - m) of a score off by E, with the subtraction's rounding u |s - m| and four ulp of exp. A running softmax
multiplies by exp(m - m') at each of n tiles: the same two terms again for each. So a weight is off by a relative
    eta = E + (n + 1) (u spread + 5 u),   spread = max |s - m|.
Sums: l and o add T keys a tile and n tiles, gamma(T + n + 1) each, and a product and a division a tile where the state is
stored normalised. All of it is relative to sum w |v| / sum w <= max |v|, once for o and once for l:
    |o' - o| <= 2 (eta + gamma(T + 3 n + 2)) max |v|.

Backward: P off by eta relative. dP = dO V^T by gamma(D) |dO|.|V|; D = rowsum(dO o O) by gamma(D) |dO|.|O|; so
dS = P (dP - D) is off by eta P |dP - D| + P (gamma(D + 2) (|dO|.|V| + |dO|.|O|)), where |dP - D| is taken from the same
bound; and dQ, dK, dV are sums of N terms of it, gamma(N + 2) more.
"""

import numpy as np

from sim.problem import Problem

UNIT = 2.0**-24


def gamma(terms: int) -> float:
    return terms * UNIT / (1 - terms * UNIT)


def _weight_error(problem: Problem, tiles: int) -> float:
    """eta: the relative error of a weight."""
    shape, arrays = problem.shape, problem.arrays
    scale = shape.head_dim**-0.5
    q, k = (np.abs(a.astype(np.float64)) for a in (arrays.q, arrays.k))
    k = np.repeat(k, shape.group, axis=0)
    largest = float((scale * q @ k.transpose(0, 2, 1)).max())  # |q|.|k|, which bounds |s| too
    return gamma(shape.head_dim + 1) * largest + (tiles + 1) * (2 * largest + 5) * UNIT


def output_bound(problem: Problem, keys: int) -> float:
    """The largest difference that any schedule with tiles of `keys` keys may show."""
    tiles = -(-problem.shape.seq // keys)
    eta = _weight_error(problem, tiles)
    return 2 * 2 * (eta + gamma(keys + 3 * tiles + 2)) * float(np.abs(problem.arrays.v).max())


def lse_bound(problem: Problem, keys: int) -> float:
    """The same for the log-sum-exp m + log l: its sums, log and addition round once more each."""
    tiles = -(-problem.shape.seq // keys)
    eta = _weight_error(problem, tiles) + gamma(keys + 3 * tiles + 2)
    return 2 * (eta + 4 * UNIT * (1 + float(np.abs(problem.gradients.lse).max())))


def gradient_bound(problem: Problem, keys: int) -> float:
    """The same for dQ, dK and dV, over all their elements."""
    shape, arrays = problem.shape, problem.arrays
    exact, scale = problem.gradients, shape.head_dim**-0.5
    # A schedule is given the forward pass's results rounded to float32: one more relative error of u in P and O.
    eta = _weight_error(problem, -(-shape.seq // keys)) + 2 * UNIT * (1 + float(np.abs(exact.lse).max()))
    grad, q, out = (np.abs(a.astype(np.float64)) for a in (arrays.grad, arrays.q, exact.out))
    k, v = (np.repeat(np.abs(a.astype(np.float64)), shape.group, axis=0) for a in (arrays.k, arrays.v))
    dp = grad @ v.transpose(0, 2, 1) + (grad * out).sum(axis=-1, keepdims=True)  # bounds |dP - D|
    off = exact.weights * dp * (eta + gamma(shape.head_dim + shape.seq + 4))  # of dS; naive sums D over the keys
    long = gamma(shape.rows * shape.group + shape.seq + 2)

    def over_group(a: np.ndarray) -> np.ndarray:
        return a.reshape(-1, shape.group, *a.shape[1:]).sum(axis=1)

    square = exact.weights * dp
    dq = scale * (off + long * square) @ k
    dk = over_group(scale * (off + long * square).transpose(0, 2, 1) @ q)
    dv = over_group(((eta + long) * exact.weights).transpose(0, 2, 1) @ grad)
    return 2 * float(max(dq.max(), dk.max(), dv.max()))
