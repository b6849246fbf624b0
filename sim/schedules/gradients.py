"""What the tiled backward passes share (FlashAttention, arXiv 2205.14135, Algorithm 4): keys outside, queries inside; dK and
dV gather on chip, over a group too, and dQ is read and written at each meeting.

dV = P^T dO, dP = dO V^T, dS = P o (dP - D) with D = rowsum(dO o O), dQ = dS K, dK = dS^T Q, the softmax scale in each.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from sim.fold import product
from sim.memory import Kernel, Machine, Range, Tensor
from sim.problem import Problem
from sim.schedules.base import (
    STATISTIC,
    OnChip,
    Outputs,
    clip,
    heads_of,
    kv_tensors,
    new_tensor,
    outputs,
    read_kv,
    row_bytes,
    softmax_scale,
)
from sim.shape import Shape, TileSize, hidden, key_tiles, row_tiles

Loaded = Mapping[str, np.ndarray]  # tensor -> the values of its tile


@dataclass(frozen=True)
class Gather:
    """One backward pass. `operands` are loaded for every block of rows, Q, dO and dQ among them, those of `uncounted` without
    bytes; `weights` gives P and D from the scores [R, T] and what was loaded. `skips`: pairs of tiles that no row sees are
    left out. `zeros`: the gradients that are first written as zeros."""

    operands: tuple[Tensor, ...]
    weights: Callable[[np.ndarray, Loaded], tuple[np.ndarray, np.ndarray]]
    skips: bool
    zeros: Collection[str]
    uncounted: Collection[str] = ()

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape = problem.shape
        (k_all, v_all), (dk_all, dv_all) = kv_tensors(problem), key_gradients(problem)
        (dq_all,) = (each for each in self.operands if each.name == "dQ")
        machine.kernel("attention backward")
        for kv in machine.each(shape.all_kv_heads):
            if "dQ" in self.zeros:
                for head in heads_of(shape, kv):
                    for rows in row_tiles(shape, tile):
                        machine.store(dq_all, head, rows, None)
            for tensor in (each for each in (dk_all, dv_all) if each.name in self.zeros):
                for keys in key_tiles(shape, tile):
                    machine.store(tensor, kv, keys, None)
            for keys in key_tiles(shape, tile):
                sums = np.zeros((2, keys[1] - keys[0], shape.head_dim), dtype=np.float32)
                with (
                    machine.load(k_all, kv, keys) as k,
                    machine.load(v_all, kv, keys) as v,
                    machine.hold("dK, dV", sums.size),
                ):
                    values = (k.values, v.values) if machine.computes(kv) else None
                    for head in heads_of(shape, kv):
                        for rows in row_tiles(shape, tile):
                            if not self.skips or _meets(shape, rows, keys):
                                self._step(machine, shape, dq_all, head, rows, keys, values, sums)
                    machine.store(dk_all, kv, keys, sums[0] if values else None)
                    machine.store(dv_all, kv, keys, sums[1] if values else None)
        return outputs(dq_all, dk_all, dv_all)

    def _step(self, machine: Machine, shape: Shape, dq_all: Tensor, head: int, rows: Range, keys: Range,
              values: tuple[np.ndarray, np.ndarray] | None, sums: np.ndarray) -> None:  # fmt: skip
        """One block of rows against the keys on chip; `sums` [2, T, D] are dK and dV."""
        count = (rows[1] - rows[0]) * (keys[1] - keys[0])
        with ExitStack() as held:
            tiles = {
                each.name: held.enter_context(machine.load(each, head, rows, counted=each.name not in self.uncounted))
                for each in self.operands
            }
            held.enter_context(machine.hold("P, dP", 2 * count))
            new = None
            if values is not None:
                loaded = {name: each.values for name, each in tiles.items()}
                new = loaded["dQ"] + self._gradients(shape, rows, keys, loaded, *values, sums)
            machine.multiply(10 * count * shape.head_dim)
            machine.store(dq_all, head, rows, new)

    def _gradients(self, shape: Shape, rows: Range, keys: Range, loaded: Loaded, k: np.ndarray, v: np.ndarray,
                   sums: np.ndarray) -> np.ndarray:  # fmt: skip
        """Adds to dK and dV and returns what it adds to dQ [R, D]."""
        scaled, scale = loaded["Q"] * softmax_scale(shape), softmax_scale(shape)
        weights, row_sum = self.weights(hide(product(scaled, k.T), shape, rows, keys), loaded)
        sums[1] += product(weights.T, loaded["dO"])
        ds = weights * (product(loaded["dO"], v.T) - row_sum)
        sums[0] += product(ds.T, scaled)
        return product(ds, k) * scale


def gather_counts(kernel: Kernel, shape: Shape, visits: int, pairs: int, lines: Iterable[str], statistics: Iterable[str],
                  zeros: Collection[str]) -> None:  # fmt: skip
    """The bytes of a Gather: K, V read and dK, dV written once; `lines` and `statistics` of a row read, and dQ written, at each
    of a head's `visits` (rows, once for each key tile they meet); first zeros beside. `pairs` of rows and keys multiplied."""
    row, own = shape.dtype.row_bytes(shape.head_dim), shape.all_heads * shape.rows
    met = shape.all_heads * visits
    read_kv(kernel, shape, shape.all_kv_heads * shape.seq)
    for name in lines:
        kernel.moved(name).hbm_read = met * row
    for name in statistics:
        kernel.moved(name).hbm_read = met * STATISTIC.row_bytes(1)
    kernel.moved("dQ").hbm_write = (met + own * ("dQ" in zeros)) * row
    for name in ("dK", "dV"):
        kernel.moved(name).hbm_write = (1 + (name in zeros)) * shape.all_kv_heads * shape.seq * row
    kernel.flops = 10 * shape.all_heads * pairs * shape.head_dim


def gather_on_chip(shape: Shape, tile: TileSize, lines: int, statistics: int) -> OnChip:
    """K, V and a block's lines and statistics; dK, dV, P and dP in registers."""
    rows, keys = clip(shape, tile)
    block = rows * (lines * row_bytes(shape, shape.dtype) + statistics * STATISTIC.row_bytes(1))
    return OnChip(2 * keys * row_bytes(shape, shape.kv) + block, 4 * 2 * keys * (shape.head_dim + rows))


def key_gradients(problem: Problem) -> tuple[Tensor, Tensor]:
    """Room for dK and dV: a row for each key of each key-value head, in the shape's dtype."""
    shape = problem.shape
    dk, dv = (Tensor(name, shape.head_dim, shape.dtype, problem.zeros(1, shape.seq, shape.head_dim)) for name in ("dK", "dV"))
    return dk, dv


def query_gradient(problem: Problem) -> Tensor:
    """Room for dQ."""
    return new_tensor(problem, "dQ", problem.shape.head_dim)


def hide(scores: np.ndarray, shape: Shape, rows: Range, keys: Range) -> np.ndarray:
    """scores [R, T] -> minus infinity where a row may not see a key."""
    mask = hidden(shape, rows, keys)
    return scores if mask is None else np.where(mask, np.float32(-np.inf), scores)


def _meets(shape: Shape, rows: Range, keys: Range) -> bool:
    """Whether some of these rows may see some of these keys."""
    first, last = shape.key_range(rows)
    return keys[0] < last and first < keys[1]
