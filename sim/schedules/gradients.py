"""What the tiled backward passes share (FlashAttention, arXiv 2205.14135, appendix B): dV = P^T dO, dP = dO V^T,
dS = P o (dP - D) with D = rowsum(dO o O), dQ = dS K, dK = dS^T Q, the softmax scale in each."""

import numpy as np

from sim.fold import product
from sim.memory import Kernel, Range, Tensor
from sim.problem import Problem
from sim.schedules.base import softmax_scale
from sim.shape import Shape, hidden


def key_gradients(problem: Problem) -> tuple[Tensor, Tensor]:
    """Room for dK and dV: a row for each key of each key-value head, in the shape's dtype."""
    shape = problem.shape
    dk, dv = (Tensor(name, shape.head_dim, shape.dtype, problem.zeros(1, shape.seq, shape.head_dim)) for name in ("dK", "dV"))
    return dk, dv


def masked_scores(shape: Shape, rows: Range, keys: Range, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q [R, D], k [T, D] -> [R, T], scaled, minus infinity where hidden."""
    scores = product(q * softmax_scale(shape), k.T)
    mask = hidden(shape, rows, keys)
    return scores if mask is None else np.where(mask, np.float32(-np.inf), scores)


def gradient_step(shape: Shape, q: np.ndarray, grad: np.ndarray, weights: np.ndarray, row_sum: np.ndarray, k: np.ndarray,
                  v: np.ndarray, sums: np.ndarray) -> np.ndarray:  # fmt: skip
    """One pair of tiles: adds to dK and dV in `sums` [2, T, D] and returns what it adds to dQ [R, D]."""
    scale = softmax_scale(shape)
    sums[1] += product(weights.T, grad)
    ds = weights * (product(grad, v.T) - row_sum)
    sums[0] += product(ds.T, q * scale)
    return product(ds, k) * scale


def gradient_writes(kernel: Kernel, shape: Shape, *, first: bool, trips: int) -> None:
    """dK and dV once, dQ `trips` times, and once more each when they are first written as zeros."""
    row = shape.dtype.row_bytes(shape.head_dim)
    kernel.moved("dQ").hbm_write = (trips + first) * shape.all_heads * shape.rows * row
    for name in ("dK", "dV"):
        kernel.moved(name).hbm_write = (1 + first) * shape.all_kv_heads * shape.seq * row
