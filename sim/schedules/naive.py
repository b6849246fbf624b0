"""Standard attention: one kernel after another, with the score matrix S and the weights P in HBM between them.

FlashAttention, arXiv 2205.14135, Algorithm 0 (and Algorithm 2's mask and dropout, as the separate elementwise kernels that
an unfused framework runs). Each kernel reads its operands once and writes its result once, as the paper counts: that is
what no sequence of separate kernels can beat, whatever its tiles. A real product re-reads K for each row tile and relies
on the cache for it; those re-reads are counted on the SRAM side, and go to HBM too when an L2 is simulated and is too small.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from nanokv.attention import Partial, combine
from sim.formats import BYTE
from sim.gpus import GPU
from sim.memory import Counts, Machine, Range, Tensor
from sim.problem import Problem
from sim.schedules.base import (
    OnChip,
    Outputs,
    best_tile,
    clip,
    kv_tensors,
    new_tensor,
    outputs,
    prefill_steps,
    query_tensor,
    read_kv,
    row_blocks,
    row_bytes,
    softmax_scale,
    with_peaks,
)
from sim.schedules.gradients import hide
from sim.schedules.passes import elementwise, outer, over_keys
from sim.shape import Shape, TileSize, key_tiles


@dataclass(frozen=True)
class Naive:
    """`mask`: a kernel of its own reads S and writes it masked (otherwise softmax masks as it reads). `dropout`: a kernel
    reads P, writes it dropped and writes the mask, a byte an element. Neither changes the values: nothing is dropped."""

    name: ClassVar[str] = "naive"
    backward: ClassVar[bool] = False
    mask: bool = False
    dropout: bool = False

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape = problem.shape
        q_all, (k_all, v_all), out = query_tensor(problem), kv_tensors(problem), new_tensor(problem, "O", shape.head_dim)
        scores, weights = new_tensor(problem, "S", shape.seq), new_tensor(problem, "P", shape.seq)
        machine.kernel("QK^T")
        outer(machine, shape, tile, q_all, k_all, scores, softmax_scale(shape))
        if self.mask:
            masked = new_tensor(problem, "S masked", shape.seq)
            machine.kernel("mask")
            elementwise(machine, shape, tile, [scores], [masked], lambda s, rows, keys: hide(s, shape, rows, keys))
            scores = masked
        machine.kernel("softmax")
        self._softmax(machine, shape, tile, scores, weights)
        if self.dropout:
            keep, dropped = Tensor("dropout mask", shape.seq, BYTE), replace(weights, name="P dropped")
            machine.kernel("dropout")
            elementwise(machine, shape, tile, [weights], [keep, dropped])
            weights = dropped
        machine.kernel("PV")
        over_keys(machine, shape, tile, weights, v_all, out)
        return outputs(out)

    def _softmax(self, machine: Machine, shape: Shape, tile: TileSize, scores: Tensor, weights: Tensor) -> None:
        """Twice over a row tile's scores: maximum and sum first (the second read comes from a cache), then the weights."""
        for kv, head, rows in row_blocks(machine, shape, tile):
            with machine.hold("m, l", 2 * (rows[1] - rows[0])):
                state: Partial | None = None
                for keys in key_tiles(shape, tile):
                    with machine.load(scores, head, rows, keys) as s:
                        if machine.computes(kv):
                            state = _statistics(state, self._seen(s.values, shape, rows, keys))
                for keys in key_tiles(shape, tile):
                    with machine.load(scores, head, rows, keys, cached=True) as s:
                        p = None
                        if state is not None:
                            p = np.exp(self._seen(s.values, shape, rows, keys) - state.m) / state.l
                        machine.store(weights, head, rows, p, keys)

    def _seen(self, scores: np.ndarray, shape: Shape, rows: Range, keys: Range) -> np.ndarray:
        return scores if self.mask else hide(scores, shape, rows, keys)

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Bytes: 2 reads and 2 writes of N x S elements, one of each of Q, K, V and O; the masks' passes beside them."""
        counts = Counts()
        square = shape.all_heads * shape.rows * shape.dtype.row_bytes(shape.seq)
        line = shape.all_heads * shape.rows * shape.dtype.row_bytes(shape.head_dim)
        flops = 2 * shape.all_heads * shape.rows * shape.seq * shape.head_dim
        kv_rows = shape.all_kv_heads * shape.seq
        again = kv_rows * (shape.group * -(-shape.rows // tile.rows) - 1)

        kernel = counts.kernel("QK^T")
        kernel.moved("Q").hbm_read = line
        read_kv(kernel, shape, kv_rows, again, ["K"])
        kernel.moved("S").hbm_write = square
        kernel.flops = flops
        last = "S"
        if self.mask:
            kernel = counts.kernel("mask")
            kernel.moved("S").hbm_read = kernel.moved("S masked").hbm_write = square
            last = "S masked"
        kernel = counts.kernel("softmax")
        kernel.moved(last).hbm_read = kernel.moved(last).cache_read = kernel.moved("P").hbm_write = square
        last = "P"
        if self.dropout:
            kernel = counts.kernel("dropout")
            kernel.moved("P").hbm_read = kernel.moved("P dropped").hbm_write = square
            kernel.moved("dropout mask").hbm_write = shape.all_heads * shape.rows * shape.seq
            last = "P dropped"
        kernel = counts.kernel("PV")
        kernel.moved(last).hbm_read = square
        read_kv(kernel, shape, kv_rows, again, ["V"])
        kernel.moved("O").hbm_write = line
        kernel.flops = flops
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        """Q and K tiles, then P and V tiles; the product's accumulator in registers."""
        rows, keys = clip(shape, tile)
        other = max(rows * row_bytes(shape, shape.dtype), rows * shape.dtype.row_bytes(keys))
        return OnChip(other + keys * row_bytes(shape, shape.kv), 4 * rows * max(keys, shape.head_dim, 2))

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return best_tile(self, shape, gpu, lambda counts: counts.total.hbm)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return (5 + self.mask + self.dropout) * prefill_steps(shape, tile)

    def check(self, shape: Shape, tile: TileSize) -> None:
        """Any shape and tile will do."""


def _statistics(state: Partial | None, scores: np.ndarray) -> Partial:
    """The running maximum and sum of a row (Milakov and Gimelshein 2018, arXiv 1805.02867); every row sees a key."""
    m = np.maximum(scores.max(axis=-1, keepdims=True), np.finfo(scores.dtype).min)
    each = Partial(m, np.exp(scores - m).sum(axis=-1, keepdims=True), np.zeros_like(m))
    return each if state is None else combine(state, each)
