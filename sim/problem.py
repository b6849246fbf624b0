"""The values of a simulated attention call, and what its output must be."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nanokv.attention import attend, naive_attention
from nanokv.kv.tile import TILE, Tiles
from sim.memory import Values
from sim.shape import Shape


class Arrays(NamedTuple):
    """q, grad [heads, N, D], k, v [kv heads, S, D]; `grad` is the gradient of the output."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    grad: np.ndarray


@dataclass(frozen=True)
class Problem:
    """A shape and, unless it is only counted, float32 values of the heads that are computed: all, or the first
    key-value head's alone. The storage dtype decides
    the bytes that are counted; values are float32 whatever it is, so that the output can be held against the runtime's.
    """

    shape: Shape
    values: Values
    arrays: Arrays | None = None

    @property
    def computed(self) -> int:
        """Key-value heads whose values are computed."""
        return 0 if self.arrays is None else len(self.arrays.k)

    def zeros(self, a_head: int, rows: int, columns: int, fill: float = 0.0) -> np.ndarray | None:
        """Room for a tensor with `a_head` instances for each key-value head; None when only counting."""
        if not self.computed:
            return None
        return np.full((self.computed * a_head, rows, columns), fill, dtype=np.float32)

    @cached_property
    def reference(self) -> np.ndarray:
        """reference() of this problem, once."""
        return reference(self)

    @cached_property
    def gradients(self) -> "Gradients":
        """reference_gradients() of this problem, once."""
        return reference_gradients(self)

    @cached_property
    def runtime(self) -> np.ndarray:
        """runtime_output() of this problem, once."""
        return runtime_output(self)

    def error(self, outputs: Mapping[str, np.ndarray]) -> float:
        """The largest difference of an output "O", or of "dQ", "dK" and "dV", from the float64 reference."""
        if "O" in outputs:
            return float(np.abs(outputs["O"] - self.reference).max())
        return max(float(np.abs(outputs[name] - getattr(self.gradients, name.lower())).max()) for name in ("dQ", "dK", "dV"))


def make_problem(shape: Shape, values: Values, seed: int = 0) -> Problem:
    """Normal values of unit variance, the same for the same seed."""
    if values is Values.NONE:
        return Problem(shape, values)
    rng = np.random.default_rng(seed)
    kv_heads = shape.all_kv_heads if values is Values.ALL else 1
    queries, keys = (kv_heads * shape.group, shape.rows), (kv_heads, shape.seq)
    arrays = (rng.standard_normal((*size, shape.head_dim), dtype=np.float32) for size in (queries, keys, keys, queries))
    return Problem(shape, values, Arrays(*arrays))


def _values(problem: Problem) -> Arrays:
    assert problem.arrays is not None, "this problem is only counted"
    return problem.arrays


def _by_position(a: np.ndarray) -> np.ndarray:
    """[heads, rows, D] -> [rows, heads, D], the runtime's layout; heads of a batch are so many more heads."""
    return a.transpose(1, 0, 2)


def reference(problem: Problem) -> np.ndarray:
    """The whole-matrix attention of the runtime in float64 -> [heads, N, D]."""
    shape, arrays = problem.shape, _values(problem)
    q, k, v = (_by_position(a.astype(np.float64)) for a in arrays[:3])
    out = naive_attention(q, k, v, shape.positions((0, shape.rows)), visibility=shape.visibility)
    return _by_position(out)


def runtime_output(problem: Problem) -> np.ndarray:
    """What the runtime's attention gives for the same values in exact numerics -> [heads, N, D]."""
    shape, arrays = problem.shape, _values(problem)
    k, v = (_tiled(a, shape) for a in (arrays.k, arrays.v))
    q = np.ascontiguousarray(_by_position(arrays.q))
    return _by_position(attend(q, shape.positions((0, shape.rows)), Tiles(k, v), visibility=shape.visibility))


def _tiled(a: np.ndarray, shape: Shape) -> np.ndarray:
    """[kv heads, S, D] -> [n, T, kv heads, D], the last tile padded with zeros."""
    count = -(-shape.seq // TILE)
    room = np.zeros((count * TILE, len(a), shape.head_dim), dtype=np.float32)
    room[: shape.seq] = _by_position(a)
    return room.reshape(count, TILE, len(a), shape.head_dim)


@dataclass(frozen=True)
class Gradients:
    """float64: output [heads, N, D], weights [heads, N, S], the rows' maxima and sums [heads, N, 1], and the gradients,
    those of k and v summed over their group's heads."""

    out: np.ndarray
    weights: np.ndarray
    top: np.ndarray
    total: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    @property
    def lse(self) -> np.ndarray:
        """[heads, N, 1] log-sum-exp of the rows' scores."""
        return self.top + np.log(self.total)


def reference_gradients(problem: Problem) -> Gradients:
    """Forward and backward by whole matrices in float64 (FlashAttention, arXiv 2205.14135, appendix B.2)."""
    shape = problem.shape
    q, k, v, grad = (a.astype(np.float64) for a in _values(problem))
    k, v = (np.repeat(a, shape.group, axis=0) for a in (k, v))
    scale = shape.head_dim**-0.5
    scores = scale * q @ k.transpose(0, 2, 1)  # [heads, N, S]
    seen = shape.visibility.sees(shape.positions((0, shape.rows))[:, None], np.arange(shape.seq)[None])
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    weights /= total
    out = weights @ v
    dp = grad @ v.transpose(0, 2, 1)
    ds = weights * (dp - (grad * out).sum(axis=-1, keepdims=True))

    def over_group(a: np.ndarray) -> np.ndarray:
        return a.reshape(-1, shape.group, *a.shape[1:]).sum(axis=1)

    return Gradients(
        out, weights, top, total, scale * ds @ k,
        over_group(scale * ds.transpose(0, 2, 1) @ q), over_group(weights.transpose(0, 2, 1) @ grad),
    )  # fmt: skip
