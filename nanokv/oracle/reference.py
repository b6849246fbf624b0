"""The right answer: one sequence's attention as whole matrices in float64, by nanokv's naive attention, which shares nothing
with the fold over tiles that it judges. Beside it, the bound of what a right kernel may differ by.

Symbols: R rows, S keys, Hq query heads, H key-value heads (Hkv, or Hq where a fault has spread them), D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanokv.attention import naive_scores, naive_softmax, naive_sum
from nanokv.kv.tile import CAUSAL, Visibility
from nanokv.oracle.bounds import TANH_ULPS, Arithmetic, Terms, forward_bound
from nanokv.rope import Rope, rotate


@dataclass(frozen=True)
class Everything(Visibility):
    """No mask."""

    def sees(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        return np.ones(np.broadcast_shapes(query.shape, key.shape), dtype=bool)


@dataclass(frozen=True)
class Problem:
    """q [R, Hq, D] at `positions` [R], k, v [S, H, D] at 0 .. S-1, all float64; masks, scale and the rest as in a Spec.

    `slopes` [Hq] are ALiBi's (a score loses slope times distance); `sinks_at`, where sinks have positions inside the cache, is
    that of the newest token, sinks + window - 1. `q_angles` are the positions that `rope`
    turns queries by, where a fault has its own.
    `softmax`, where a fault has its own, makes weights [Hq, R, S] of scores.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    positions: np.ndarray
    scale: float
    visibility: Visibility = CAUSAL
    softcap: float | None = None
    slopes: np.ndarray | None = None
    sinks_at: int | None = None
    rope: Rope | None = None
    q_angles: np.ndarray | None = None
    softmax: Callable[[np.ndarray], np.ndarray] = naive_softmax

    def distances(self) -> np.ndarray:
        """[R, S] how many positions a key lies before a query, as ALiBi counts."""
        keys = np.arange(len(self.k))
        distance = self.positions[:, None] - keys
        if self.sinks_at is None:
            return distance
        inside = np.minimum(self.positions, self.sinks_at)[:, None] - keys
        return np.where(keys < self.visibility.sinks, inside, distance)


class Solved(NamedTuple):
    """out [R, Hq, D], lse [R, Hq] (natural logarithm, minus infinity for an empty row), and how far each may be off."""

    out: np.ndarray
    lse: np.ndarray
    bound: np.ndarray
    lse_bound: np.ndarray


def attend_exactly(problem: Problem) -> np.ndarray:
    """out [R, Hq, D] alone."""
    z, _ = _scores(problem)
    return naive_sum(problem.softmax(z), problem.v) if problem.k.size else np.zeros_like(problem.q)


def solve(problem: Problem, dtype: str, stored: str, arithmetic: Arithmetic) -> Solved:
    """The answer and its bounds for a kernel with `arithmetic`, output in `dtype`, K and V in `stored`."""
    rows, heads, dim = problem.q.shape
    if problem.k.size == 0:
        return Solved(*(np.full(shape, value) for shape, value in (
            (problem.q.shape, 0.0), ((rows, heads), -np.inf), (problem.q.shape, 0.0), ((rows, heads), 0.0))))  # fmt: skip
    z, bent = _scores(problem)
    weights = naive_softmax(z)
    out = naive_sum(weights, problem.v)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.maximum(z.max(axis=-1), np.finfo(np.float64).min)
        lse = (top + np.log(np.exp(z - top[..., None]).sum(axis=-1))).T  # [R, Hq]
    terms = Terms(z, weights, *_magnitudes(problem), bent, _turned(problem), problem.v, out, lse)
    return Solved(out, lse, *forward_bound(terms, dim, dtype, stored, arithmetic))


def _scores(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """z [Hq, R, S], and what a soft cap or a bias may add to its error, in units of u."""
    q, k = problem.q, problem.k
    if problem.rope is not None:
        q, k = (_turn(x, angles, problem.rope) for x, angles in zip((q, k), _angles(problem), strict=True))
    bias = 0.0 if problem.slopes is None else -problem.slopes[:, None, None] * problem.distances()
    cap = problem.softcap

    def transform(scores: np.ndarray) -> np.ndarray:
        return cap * np.tanh(scores / cap) if cap else scores + bias

    z = naive_scores(q, k, problem.positions, problem.scale, problem.visibility, transform)
    size = np.abs(np.where(np.isfinite(z), z, 0))
    if cap:
        bent = 2 * TANH_ULPS * size
    else:
        bent = np.zeros_like(size) if problem.slopes is None else 2 * (np.abs(bias) + size)
    return z, bent


def _angles(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    q_angles = problem.positions if problem.q_angles is None else problem.q_angles
    return q_angles, np.arange(len(problem.k))


def _turn(x: np.ndarray, angles: np.ndarray, rope: Rope) -> np.ndarray:
    return rotate(x, *rope.tables(angles, x), rope.adjacent)


def _turned(problem: Problem) -> np.ndarray:
    """[R, S]: a rotation rounds its cosine, sine, products and sum, and its angle, whose error grows with the position."""
    if problem.rope is None:
        return np.zeros((len(problem.q), len(problem.k)))
    q_angles, k_angles = _angles(problem)
    each = 2 * TANH_ULPS + 4
    return 2 * each + 2 * TANH_ULPS * (np.abs(q_angles)[:, None] + np.abs(k_angles))


def _magnitudes(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Scale times the sum over D of |q| |k| [Hq, R, S], and of |q| alone [Hq, R, 1]. Of a rotated pair both count with the
    pair's length: |a| + |b| <= sqrt(2) length, on either side."""
    sizes = []
    for x in (problem.q, problem.k):
        size = np.abs(x)
        if problem.rope is not None:
            half = x.shape[-1] // 2
            pairs = (size[..., 0::2], size[..., 1::2]) if problem.rope.adjacent else (size[..., :half], size[..., half:])
            size = np.repeat(np.hypot(*pairs), 2, axis=-1)
        sizes.append(size)
    reach = problem.scale * sizes[0].sum(axis=-1).T[..., None]
    return naive_scores(sizes[0], sizes[1], problem.positions, problem.scale, Everything()), reach
