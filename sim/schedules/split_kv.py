"""Flash-Decoding (Dao et al. 2023): the keys are cut into parts that run side by side, so that one long sequence keeps all
multiprocessors busy. Each part writes a normalised partial O and its log-sum-exp, in float32; a second kernel reduces them.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nanokv.attention import Partial, finish
from nanokv.errors import UsageError
from sim.formats import FLOAT32
from sim.gpus import GPU
from sim.memory import Counts, Machine, Range, Tensor
from sim.problem import Problem
from sim.schedules.base import OnChip, Outputs, heads_of, kv_tensors, new_tensor, outputs, query_tensor, with_peaks
from sim.schedules.decode import (
    Decode,
    attend_counts,
    decode_on_chip,
    decode_step,
    load_queries,
    needs_one_query,
    tile_that_fits,
    visible_tiles,
    widest_tile,
)
from sim.shape import Shape, TileSize, tile_count


@dataclass(frozen=True)
class SplitKV:
    """`splits` parts of whole tiles, or, if None, as many as occupy `multiprocessors` once. One part needs no reduction."""

    name: ClassVar[str] = "split-kv"
    backward: ClassVar[bool] = False
    splits: int | None = None
    multiprocessors: int = 108

    def __post_init__(self) -> None:
        if self.splits is not None and self.splits < 1:
            raise UsageError(f"splits must be at least 1, not {self.splits}")

    def parts(self, shape: Shape, tile: TileSize) -> list[list[Range]]:
        """The key tiles of each split."""
        tile_count(shape.seq, tile.keys)
        tiles = list(visible_tiles(shape, tile))
        wanted = self.splits or -(-self.multiprocessors // shape.all_kv_heads)
        each = -(-len(tiles) // min(wanted, len(tiles)))
        return [tiles[i : i + each] for i in range(0, len(tiles), each)]

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape = problem.shape
        parts = self.parts(shape, tile)
        if len(parts) == 1:
            return Decode().run(machine, problem, tile)
        q_all, tensors = query_tensor(problem), kv_tensors(problem)
        room = (problem.zeros(shape.group, len(parts), width) for width in (shape.head_dim, 1))
        partial_o, partial_lse = (
            Tensor(name, width, FLOAT32, data)
            for name, width, data in zip(("partial O", "partial LSE"), (shape.head_dim, 1), room, strict=True)
        )
        out = new_tensor(problem, "O", shape.head_dim)
        machine.kernel("attention")
        members = range(shape.group)
        for kv in machine.each(shape.all_kv_heads):
            for split, part in enumerate(parts):
                with ExitStack() as held:
                    query = load_queries(held, machine, shape, q_all, kv, members)
                    state: Partial | None = None
                    for keys in part:
                        state = decode_step(machine, shape, tile, tensors, kv, keys, query, shape.group, state)
                    for member, head in enumerate(heads_of(shape, kv)):
                        row = lse = None
                        if state is not None:
                            own = Partial(*(a[:, member] for a in state))
                            row, lse = finish(own), own.m + np.log(own.l)
                        machine.store(partial_o, head, (split, split + 1), row)
                        machine.store(partial_lse, head, (split, split + 1), lse)
        machine.kernel("reduction")
        for kv in machine.each(shape.all_kv_heads):
            for head in heads_of(shape, kv):
                with ExitStack() as held:
                    sums = [held.enter_context(machine.load(partial_lse, head, (i, i + 1))) for i in range(len(parts))]
                    held.enter_context(machine.hold("O", shape.head_dim))
                    total = None
                    if machine.computes(kv):
                        lse = np.concatenate([each.values for each in sums])  # [splits, 1]
                        share = np.exp(lse - lse.max())
                        share /= share.sum()
                        total = np.zeros((1, shape.head_dim), dtype=np.float32)
                    for split in range(len(parts)):
                        with machine.load(partial_o, head, (split, split + 1)) as o:
                            if total is not None:
                                total += share[split] * o.values
                    machine.store(out, head, (0, 1), total)
        return outputs(out)

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Decode's bytes, and each partial result written once and read once, in float32."""
        splits = len(self.parts(shape, tile))
        if splits == 1:
            return Decode().closed_form(shape, tile)
        counts = Counts()
        kernel = counts.kernel("attention")
        row = shape.all_heads * shape.dtype.row_bytes(shape.head_dim)
        partial = {"partial O": shape.all_heads * splits * FLOAT32.row_bytes(shape.head_dim),
                   "partial LSE": shape.all_heads * splits * FLOAT32.row_bytes(1)}  # fmt: skip
        kernel.moved("Q").hbm_read = splits * row
        for name, nbytes in partial.items():
            kernel.moved(name).hbm_write = nbytes
        attend_counts(kernel, shape, shape.all_kv_heads)
        kernel = counts.kernel("reduction")
        for name, nbytes in partial.items():
            kernel.moved(name).hbm_read = nbytes
        kernel.moved("O").hbm_write = row
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        need = decode_on_chip(shape, widest_tile(*shape.key_range((0, 1)), tile.keys), shape.group)
        splits = len(self.parts(shape, tile))
        reduction = splits * FLOAT32.row_bytes(1) + FLOAT32.row_bytes(shape.head_dim)
        return need if splits == 1 else OnChip(max(need.sram, reduction), need.registers)

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return tile_that_fits(self, shape, gpu)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return -(-shape.seq // tile.keys)

    def check(self, shape: Shape, tile: TileSize) -> None:
        needs_one_query(self.name, shape)
