"""FlashAttention 2 (arXiv 2307.08691, Algorithms 1 and 2): queries outside, keys inside.

A block of Q is loaded once; its O, m and l stay in registers until its last key, so only O and the log-sum-exp L are
written. Blocks of keys that no row of the tile may see are skipped (causal, window). The price is that K and V are read
again for each row tile: 2 N S D / Br elements without a cache. A query head of a group reads its key-value head by index.
The backward pass keeps dK and dV on chip and updates dQ in HBM.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nanokv.attention import Partial, finish
from sim.fold import fold, lane, padded
from sim.gpus import GPU
from sim.memory import Counts, Machine, Range, Tensor
from sim.problem import Problem
from sim.schedules.base import (
    STATISTIC,
    OnChip,
    Outputs,
    best_tile,
    clip,
    heads_of,
    kv_tensors,
    needs_prefill,
    new_tensor,
    output_gradient,
    outputs,
    query_tensor,
    read_kv,
    row_blocks,
    row_bytes,
    skipping_steps,
    softmax_scale,
    with_peaks,
)
from sim.schedules.gradients import Gather, Loaded, gather_counts, gather_on_chip, query_gradient
from sim.shape import Shape, TileSize, hidden, key_tiles, row_tiles, spans


@dataclass(frozen=True)
class FlashAttention2:
    """The fold is the runtime's: with 128 keys a tile the output has the runtime's bits."""

    name: ClassVar[str] = "flash2"
    backward: ClassVar[bool] = False

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape = problem.shape
        q_all, tensors = query_tensor(problem), kv_tensors(problem)
        o_all, lse_all = new_tensor(problem, "O", shape.head_dim), new_tensor(problem, "L", 1, STATISTIC)
        machine.kernel("attention")
        for kv in machine.each(shape.all_kv_heads):
            for member, head in enumerate(heads_of(shape, kv)):
                for rows in row_tiles(shape, tile):
                    count = rows[1] - rows[0]
                    with machine.load(q_all, head, rows) as q, machine.hold("O, m, l", count * (shape.head_dim + 2)):
                        scaled = lane(q.values * softmax_scale(shape), shape.group, member) if machine.computes(kv) else None
                        state: Partial | None = None
                        for keys in key_tiles(shape, tile, rows):
                            state = _step(machine, shape, tile, tensors, kv, rows, keys, scaled, state)
                        out = lse = None
                        if state is not None:
                            own = Partial(*(a[:, member] for a in state))
                            out, lse = finish(own), own.m + np.log(own.l)
                        machine.store(o_all, head, rows, out)
                        machine.store(lse_all, head, rows, lse)
        return outputs(o_all, lse_all)

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Bytes: Q, O and L once; of K and V what each row tile may see, rounded out to whole key tiles."""
        counts = Counts()
        kernel = counts.kernel("attention")
        seen = spans(shape, tile)
        line = shape.all_heads * shape.rows * shape.dtype.row_bytes(shape.head_dim)
        kernel.moved("Q").hbm_read = kernel.moved("O").hbm_write = line
        kernel.moved("L").hbm_write = shape.all_heads * shape.rows * STATISTIC.row_bytes(1)
        read_kv(kernel, shape, shape.all_heads * seen.keys)
        kernel.flops = 4 * shape.all_heads * seen.pairs * shape.head_dim
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        """Q, K and V tiles; O, m, l and S in registers. The first row tile and the first key tile it meets are the largest."""
        rows, _ = clip(shape, tile)
        first = shape.key_range((0, shape.rows))[0] // tile.keys * tile.keys
        keys = min(tile.keys, shape.seq - first)
        sram = rows * row_bytes(shape, shape.dtype) + 2 * keys * row_bytes(shape, shape.kv)
        return OnChip(sram, 4 * rows * (shape.head_dim + 2 + keys))

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return best_tile(self, shape, gpu, lambda counts: counts.total.hbm)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return skipping_steps(shape, tile)

    def check(self, shape: Shape, tile: TileSize) -> None:
        """Any shape and tile will do."""


def _step(machine: Machine, shape: Shape, tile: TileSize, tensors: tuple[Tensor, Tensor], kv: int, rows: Range, keys: Range,
          scaled: np.ndarray | None, state: Partial | None) -> Partial | None:  # fmt: skip
    """One tile of keys, folded at its full size: its last keys padded and hidden, as the runtime's are."""
    pairs = (rows[1] - rows[0]) * (keys[1] - keys[0])
    k_all, v_all = tensors
    with machine.load(k_all, kv, keys) as k, machine.load(v_all, kv, keys) as v, machine.hold("S", pairs):
        machine.multiply(4 * pairs * shape.head_dim)
        if scaled is None:
            return None
        mask = hidden(shape, rows, (keys[0], keys[0] + tile.keys))
        return fold(state, scaled, padded(k.values, tile.keys), padded(v.values, tile.keys), mask)


@dataclass(frozen=True)
class FlashAttention2Backward:
    """Algorithm 2: D = rowsum(dO o O) by a kernel of its own, then keys outside; dQ starts as zeros in HBM and is read and
    written at each meeting. dK and dV gather over the group on chip."""

    name: ClassVar[str] = "flash2-backward"
    backward: ClassVar[bool] = True

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape, grad = problem.shape, output_gradient(problem)
        out = new_tensor(problem, "O", shape.head_dim)
        lse, row_sum = (new_tensor(problem, name, 1, STATISTIC) for name in "LD")
        if problem.computed:
            forward = problem.gradients
            out.fill(forward.out)
            lse.fill(forward.lse)
        machine.kernel("D = rowsum(dO o O)")
        for kv, head, rows in row_blocks(machine, shape, tile):
            with machine.load(out, head, rows) as o, machine.load(grad, head, rows) as g:
                value = (o.values * g.values).sum(axis=-1, keepdims=True) if machine.computes(kv) else None
                machine.store(row_sum, head, rows, value)
        operands = (query_tensor(problem), grad, query_gradient(problem), lse, row_sum)
        return Gather(operands, _weights, skips=True, zeros=("dQ",)).run(machine, problem, tile)

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Bytes: K, V read and dK, dV written once; Q, dO, dQ, L, D read and dQ written for each key tile a row tile meets."""
        counts = Counts()
        lines, seen = shape.all_heads * shape.rows, spans(shape, tile)
        kernel = counts.kernel("D = rowsum(dO o O)")
        kernel.moved("O").hbm_read = kernel.moved("dO").hbm_read = lines * shape.dtype.row_bytes(shape.head_dim)
        kernel.moved("D").hbm_write = lines * STATISTIC.row_bytes(1)
        gather_counts(counts.kernel("attention backward"), shape, seen.row_visits, seen.pairs, ("Q", "dO", "dQ"), "LD", ("dQ",))
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        """K, V, Q, dO, dQ, L and D."""
        return gather_on_chip(shape, tile, 3, 2)

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return best_tile(self, shape, gpu, lambda counts: counts.total.hbm)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return 2 * skipping_steps(shape, tile)

    def check(self, shape: Shape, tile: TileSize) -> None:
        needs_prefill(self.name, shape)


def _weights(scores: np.ndarray, loaded: Loaded) -> tuple[np.ndarray, np.ndarray]:
    """P from the log-sum-exp (line 11 of Algorithm 2), and D as the first kernel left it."""
    return np.exp(scores - loaded["L"]), loaded["D"]
