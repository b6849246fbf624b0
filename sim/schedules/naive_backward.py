"""Standard attention's backward pass: FlashAttention, arXiv 2205.14135, Algorithm 3, and Algorithm 2's masks undone.

Kernels, each reading its operands and writing its result once: dV = P^T dO; dP = dO V^T; dS = P o (dP - rowsum(P o dP));
dQ = dS K; dK = dS^T Q. Seven passes over N x S elements and eight over N x D.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from sim.formats import BYTE
from sim.gpus import GPU
from sim.memory import Counts, Machine, Tensor
from sim.problem import Problem
from sim.schedules.base import (
    OnChip,
    Outputs,
    best_tile,
    clip,
    kv_tensors,
    needs_prefill,
    new_tensor,
    output_gradient,
    outputs,
    prefill_steps,
    query_tensor,
    read_kv,
    row_blocks,
    row_bytes,
    softmax_scale,
    with_peaks,
)
from sim.schedules.gradients import key_gradients
from sim.schedules.passes import elementwise, outer, over_keys, over_rows
from sim.shape import Shape, TileSize, key_tiles


@dataclass(frozen=True)
class NaiveBackward:
    """`mask`: a kernel reads dS and writes it masked. `dropout`: a kernel reads dP and the mask and writes dP again."""

    name: ClassVar[str] = "naive-backward"
    backward: ClassVar[bool] = True
    mask: bool = False
    dropout: bool = False

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape = problem.shape
        q_all, (k_all, v_all) = query_tensor(problem), kv_tensors(problem)
        p_all, grad_all = new_tensor(problem, "P", shape.seq), output_gradient(problem)
        if p_all.data is not None:
            p_all.data[:] = problem.gradients.weights
        kept = replace(p_all, name="P dropped") if self.dropout else p_all
        dp_all, ds_all = new_tensor(problem, "dP", shape.seq), new_tensor(problem, "dS", shape.seq)
        dq_all, (dk_all, dv_all) = new_tensor(problem, "dQ", shape.head_dim), key_gradients(problem)

        machine.kernel("dV = P^T dO")
        over_rows(machine, shape, tile, kept, grad_all, dv_all)
        machine.kernel("dP = dO V^T")
        outer(machine, shape, tile, grad_all, v_all, dp_all)
        if self.dropout:
            dropped = replace(dp_all, name="dP dropped")
            machine.kernel("dropout")
            elementwise(machine, shape, tile, [dp_all, Tensor("dropout mask", shape.seq, BYTE)], [dropped])
            dp_all = dropped
        machine.kernel("dS = P o (dP - D)")
        self._softmax(machine, shape, tile, p_all, dp_all, ds_all)
        if self.mask:
            masked = replace(ds_all, name="dS masked")
            machine.kernel("mask")
            elementwise(machine, shape, tile, [ds_all], [masked])
            ds_all = masked
        machine.kernel("dQ = dS K")
        over_keys(machine, shape, tile, ds_all, k_all, dq_all, softmax_scale(shape))
        machine.kernel("dK = dS^T Q")
        over_rows(machine, shape, tile, ds_all, q_all, dk_all, softmax_scale(shape))
        return outputs(dq_all, dk_all, dv_all)

    def _softmax(self, machine: Machine, shape: Shape, tile: TileSize, p_all: Tensor, dp_all: Tensor, ds_all: Tensor) -> None:
        """Twice over a row tile: the row sum of P o dP first (the second read comes from a cache), then dS."""
        for kv, head, rows in row_blocks(machine, shape, tile):
            row_sum = np.zeros((rows[1] - rows[0], 1), dtype=np.float32)
            with machine.hold("D", rows[1] - rows[0]):
                for keys in key_tiles(shape, tile):
                    with machine.load(p_all, head, rows, keys) as p, machine.load(dp_all, head, rows, keys) as dp:
                        if machine.computes(kv):
                            row_sum += (p.values * dp.values).sum(axis=-1, keepdims=True)
                for keys in key_tiles(shape, tile):
                    with (
                        machine.load(p_all, head, rows, keys, cached=True) as p,
                        machine.load(dp_all, head, rows, keys, cached=True) as dp,
                    ):
                        value = p.values * (dp.values - row_sum) if machine.computes(kv) else None
                        machine.store(ds_all, head, rows, value, keys)

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Seven N x S and eight N x D passes; re-reads of the small operands come from a cache."""
        counts = Counts()
        square = shape.all_heads * shape.rows * shape.dtype.row_bytes(shape.seq)
        line = shape.all_heads * shape.rows * shape.dtype.row_bytes(shape.head_dim)
        key_line = shape.all_kv_heads * shape.seq * shape.dtype.row_bytes(shape.head_dim)
        row_trips, key_trips = -(-shape.rows // tile.rows), -(-shape.seq // tile.keys)
        kv_rows = shape.all_kv_heads * shape.seq
        flops = 2 * shape.all_heads * shape.rows * shape.seq * shape.head_dim
        weights = "P dropped" if self.dropout else "P"

        kernel = counts.kernel("dV = P^T dO")
        kernel.moved(weights).hbm_read = square
        kernel.moved("dO").hbm_read, kernel.moved("dO").cache_read = line, (key_trips - 1) * line
        kernel.moved("dV").hbm_write, kernel.flops = key_line, flops
        kernel = counts.kernel("dP = dO V^T")
        kernel.moved("dO").hbm_read = line
        read_kv(kernel, shape, kv_rows, kv_rows * (shape.group * row_trips - 1), ["V"])
        kernel.moved("dP").hbm_write, kernel.flops = square, flops
        last = "dP"
        if self.dropout:
            kernel, last = counts.kernel("dropout"), "dP dropped"
            kernel.moved("dP").hbm_read = kernel.moved(last).hbm_write = square
            kernel.moved("dropout mask").hbm_read = shape.all_heads * shape.rows * shape.seq
        kernel = counts.kernel("dS = P o (dP - D)")
        for name in ("P", last):
            kernel.moved(name).hbm_read = kernel.moved(name).cache_read = square
        kernel.moved("dS").hbm_write = square
        last = "dS"
        if self.mask:
            kernel, last = counts.kernel("mask"), "dS masked"
            kernel.moved("dS").hbm_read = kernel.moved(last).hbm_write = square
        kernel = counts.kernel("dQ = dS K")
        kernel.moved(last).hbm_read = square
        read_kv(kernel, shape, kv_rows, kv_rows * (shape.group * row_trips - 1), ["K"])
        kernel.moved("dQ").hbm_write, kernel.flops = line, flops
        kernel = counts.kernel("dK = dS^T Q")
        kernel.moved(last).hbm_read = square
        kernel.moved("Q").hbm_read, kernel.moved("Q").cache_read = line, (key_trips - 1) * line
        kernel.moved("dK").hbm_write, kernel.flops = key_line, flops
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        """The largest pair of operand tiles of any kernel; the product's accumulator in registers."""
        rows, keys = clip(shape, tile)
        square, element = rows * shape.dtype.row_bytes(keys), row_bytes(shape, shape.dtype)
        kv = keys * row_bytes(shape, shape.kv)
        sram = max(2 * square, square + rows * element, square + kv, rows * element + kv)
        if self.dropout:
            sram = max(sram, square + rows * keys)
        return OnChip(sram, 4 * max(keys * shape.head_dim, rows * shape.head_dim, rows * keys))

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return best_tile(self, shape, gpu, lambda counts: counts.total.hbm)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return (6 + self.mask + self.dropout) * prefill_steps(shape, tile)

    def check(self, shape: Shape, tile: TileSize) -> None:
        needs_prefill(self.name, shape)
