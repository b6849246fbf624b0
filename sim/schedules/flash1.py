"""FlashAttention 1, exactly as its Algorithms 1 and 4 (arXiv 2205.14135): keys outside, queries inside.

Every block of K and V is loaded once and meets all blocks of Q; so O (normalised), l and m of a row go to HBM and come back
at each meeting. The backward pass writes dQ at each meeting and recomputes the weights from Q, K, l and m. Causal blocks
are masked, not skipped. HBM: Theta(N D + N D Tc) elements, Tc = ceil(N / Bc) (theorem 2 and its proof).

Block sizes: Bc = ceil(M / 4D) and Br = min(Bc, D) with M the elements of the storage dtype that SRAM holds (line 1). The
algorithm charges Q, K, V and O to M and leaves S and the row statistics to registers; where its rounding, or the backward
pass's dO and dQ, go over the capacity, Br is cut until all fits, which changes no byte of HBM traffic.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nanokv.attention import Partial, finish
from sim.fold import fold, lane
from sim.gpus import GPU
from sim.memory import Counts, Machine, Range
from sim.problem import Problem
from sim.schedules.base import (
    STATISTIC,
    OnChip,
    Outputs,
    clip,
    heads_of,
    kv_tensors,
    needs_prefill,
    new_tensor,
    no_tile,
    output_gradient,
    outputs,
    prefill_steps,
    query_tensor,
    read_kv,
    row_bytes,
    softmax_scale,
    with_peaks,
)
from sim.schedules.gradients import Gather, Loaded, gather_counts, gather_on_chip, query_gradient
from sim.shape import Shape, TileSize, hidden, key_tiles, row_tiles


def _paper_tile(schedule: "FlashAttention1 | FlashAttention1Backward", shape: Shape, gpu: GPU) -> TileSize:
    """Line 1 of Algorithm 1; Br, and only then Bc, cut down to what fits."""
    elements = gpu.sram * 8 // shape.dtype.bits
    keys = -(-elements // (4 * shape.head_dim))
    for limit in (keys, *range(keys - 1, 0, -1)):
        rows = min(limit, shape.head_dim)
        while rows and not schedule.on_chip(shape, TileSize(rows, limit)).fits(gpu):
            rows -= 1
        if rows:
            return TileSize(rows, limit)
    raise no_tile(schedule, shape, gpu)


@dataclass(frozen=True)
class FlashAttention1:
    """`init`: count the writes of O = 0, l = 0, m = -inf (line 2). `stats`: count l and m at all."""

    name: ClassVar[str] = "flash1"
    backward: ClassVar[bool] = False
    init: bool = True
    stats: bool = True

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape, state = problem.shape, _State(problem)
        k_all, v_all = kv_tensors(problem)
        machine.kernel("attention")
        for kv in machine.each(shape.all_kv_heads):
            for head in heads_of(shape, kv):
                for rows in row_tiles(shape, tile) if self.init else ():
                    self._store(machine, state, head, rows, None)
                for keys in key_tiles(shape, tile):
                    with machine.load(k_all, kv, keys) as k, machine.load(v_all, kv, keys) as v:
                        values = (k.values, v.values) if machine.computes(kv) else None
                        for rows in row_tiles(shape, tile):
                            self._step(machine, state, shape, head, rows, keys, values)
        return outputs(state.o)

    def _step(self, machine: Machine, state: "_State", shape: Shape, head: int, rows: Range, keys: Range,
              values: tuple[np.ndarray, np.ndarray] | None) -> None:  # fmt: skip
        """Lines 8 to 13: one block of rows against the keys on chip."""
        count = (rows[1] - rows[0]) * (keys[1] - keys[0])
        with (
            machine.load(state.q, head, rows) as q,
            machine.load(state.o, head, rows) as o,
            machine.load(state.l, head, rows, counted=self.stats) as l,  # noqa: E741 - the paper's name
            machine.load(state.m, head, rows, counted=self.stats) as m,
            machine.hold("S", count),
        ):
            new: Partial | None = None
            if values is not None:
                old = Partial(*(a[:, None] for a in (m.values, l.values, o.values * l.values)))
                scaled = lane(q.values * softmax_scale(shape), 1, 0)
                new = Partial(*(a[:, 0] for a in fold(old, scaled, *values, hidden(shape, rows, keys))))
            machine.multiply(4 * count * shape.head_dim)
            self._store(machine, state, head, rows, new)

    def _store(self, machine: Machine, state: "_State", head: int, rows: Range, new: Partial | None) -> None:
        """O, l and m of a block of rows back to HBM."""
        o, l, m = (None, None, None) if new is None else (finish(new), new.l, new.m)  # noqa: E741 - the paper's name
        machine.store(state.o, head, rows, o)
        machine.store(state.l, head, rows, l, counted=self.stats)
        machine.store(state.m, head, rows, m, counted=self.stats)

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Bytes: K and V once a query head; Q read, O read and written Tc times, with l and m; the first writes beside."""
        counts = Counts()
        kernel = counts.kernel("attention")
        trips = -(-shape.seq // tile.keys)
        lines = shape.all_heads * shape.rows
        line, statistic = lines * shape.dtype.row_bytes(shape.head_dim), lines * STATISTIC.row_bytes(1)
        for name, nbytes in {"O": line, **({"l": statistic, "m": statistic} if self.stats else {})}.items():
            kernel.moved(name).hbm_read = trips * nbytes
            kernel.moved(name).hbm_write = (trips + self.init) * nbytes
        read_kv(kernel, shape, shape.all_heads * shape.seq)
        kernel.moved("Q").hbm_read = trips * line
        kernel.flops = 4 * lines * shape.seq * shape.head_dim
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        """K, V, Q, O, l and m tiles; S in registers."""
        rows, keys = clip(shape, tile)
        statistics = 2 * STATISTIC.row_bytes(1) if self.stats else 0
        sram = 2 * keys * row_bytes(shape, shape.kv) + rows * (2 * row_bytes(shape, shape.dtype) + statistics)
        return OnChip(sram, 4 * rows * keys)

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return _paper_tile(self, shape, gpu)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return 2 * prefill_steps(shape, tile)

    def check(self, shape: Shape, tile: TileSize) -> None:
        """Any shape and tile will do."""


@dataclass(frozen=True)
class FlashAttention1Backward:
    """Algorithm 4. `init`: count the writes of dQ = dK = dV = 0. `stats`: count the reads of l and m.

    Over a group, dK and dV gather on chip and K and V are loaded once: with one query head a group it is the paper's.
    """

    name: ClassVar[str] = "flash1-backward"
    backward: ClassVar[bool] = True
    init: bool = True
    stats: bool = True

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        out = new_tensor(problem, "O", problem.shape.head_dim)
        total, top = (new_tensor(problem, name, 1, STATISTIC) for name in "lm")
        if problem.computed:
            forward = problem.gradients
            for tensor, values in ((out, forward.out), (total, forward.total), (top, forward.top)):
                tensor.fill(values)
        operands = (query_tensor(problem), out, output_gradient(problem), query_gradient(problem), total, top)
        uncounted = () if self.stats else ("l", "m")
        return Gather(operands, _weights, skips=False, zeros=self._zeros, uncounted=uncounted).run(machine, problem, tile)

    @property
    def _zeros(self) -> tuple[str, ...]:
        return ("dQ", "dK", "dV") if self.init else ()

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Bytes: K, V read and dK, dV written once; Q, O, dO, dQ read and dQ written Tc times, with l and m."""
        counts = Counts()
        visits, statistics = shape.rows * -(-shape.seq // tile.keys), "lm" if self.stats else ""
        gather_counts(counts.kernel("attention backward"), shape, visits, shape.rows * shape.seq, ("Q", "O", "dO", "dQ"),
                      statistics, self._zeros)  # fmt: skip
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        """K, V, Q, O, dO, dQ, l and m."""
        return gather_on_chip(shape, tile, 4, 2 if self.stats else 0)

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return _paper_tile(self, shape, gpu)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return 2 * prefill_steps(shape, tile)

    def check(self, shape: Shape, tile: TileSize) -> None:
        needs_prefill(self.name, shape)


class _State:
    """Q, and O, l and m as line 2 leaves them in HBM; m's minus infinity is the lowest finite number."""

    def __init__(self, problem: Problem):
        self.q, self.o = query_tensor(problem), new_tensor(problem, "O", problem.shape.head_dim)
        self.l = new_tensor(problem, "l", 1, STATISTIC)
        self.m = new_tensor(problem, "m", 1, STATISTIC, fill=float(np.finfo(np.float32).min))


def _weights(scores: np.ndarray, loaded: Loaded) -> tuple[np.ndarray, np.ndarray]:
    """P and D of a block of rows from l, m and O (lines 13 and 19 of Algorithm 4)."""
    return np.exp(scores - loaded["m"]) / loaded["l"], (loaded["dO"] * loaded["O"]).sum(axis=-1, keepdims=True)
