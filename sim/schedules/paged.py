"""Decoding over a paged cache (PagedAttention, arXiv 2309.06180): a block table is read, and whole blocks, so that unused
slots of the first and the last one are read for nothing; they are counted apart.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nanokv.attention import Partial, finish
from nanokv.errors import UsageError
from sim.formats import Format
from sim.gpus import GPU
from sim.memory import Counts, Machine, Range, Tensor
from sim.problem import Problem
from sim.schedules.base import (
    OnChip,
    Outputs,
    heads_of,
    kv_tensors,
    new_tensor,
    outputs,
    query_tensor,
    read_kv,
    with_peaks,
)
from sim.schedules.decode import (
    aligned_tiles,
    attend_counts,
    decode_on_chip,
    decode_step,
    load_queries,
    needs_one_query,
    query_and_output,
    tile_that_fits,
    widest_tile,
)
from sim.shape import Shape, TileSize

BLOCK_TABLE = Format("int32", 32)


@dataclass(frozen=True)
class PagedDecode:
    """By group over a paged cache: blocks of `block_size` tokens in random physical order, found through a block table of
    int32 that each thread block reads. A tile is a whole number of blocks, or a part of one."""

    name: ClassVar[str] = "paged"
    backward: ClassVar[bool] = False
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UsageError(f"block size must be at least 1, not {self.block_size}")

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape = problem.shape
        q_all, out = query_tensor(problem), new_tensor(problem, "O", shape.head_dim)
        table, pool = self._pool(problem)
        unused = [Tensor(f"{each.name} unused slots", shape.head_dim, shape.kv) for each in pool]
        table_all = Tensor("block table", 1, BLOCK_TABLE)
        first, last = shape.key_range((0, 1))
        machine.kernel("attention")
        for kv in machine.each(shape.all_kv_heads):
            with ExitStack() as held:
                query = load_queries(held, machine, shape, q_all, kv, range(shape.group))
                state: Partial | None = None
                for read in aligned_tiles(*self._read(shape), tile.keys):
                    start = min(max(read[0], first), read[1])
                    keys = start, max(min(read[1], last), start)
                    blocks = read[0] // self.block_size, -(-read[1] // self.block_size)
                    with ExitStack() as extra:
                        extra.enter_context(machine.load(table_all, kv // shape.num_kv_heads, blocks))
                        for place in ((read[0], keys[0]), (keys[1], read[1])):
                            for tensor in unused if place[0] < place[1] else []:
                                extra.enter_context(machine.load(tensor, kv, place))
                        if keys[0] < keys[1]:
                            slots = None if table is None else _slots(table, keys, self.block_size)
                            state = decode_step(machine, shape, tile, pool, kv, keys, query, shape.group, state, slots)
                for member, head in enumerate(heads_of(shape, kv)):
                    row = None if state is None else finish(Partial(*(a[:, member] for a in state)))
                    machine.store(out, head, (0, 1), row)
        return outputs(out)

    def _pool(self, problem: Problem) -> tuple[np.ndarray | None, tuple[Tensor, Tensor]]:
        """The block table [blocks] and K and V scattered over physical blocks; unused slots hold NaN."""
        shape = problem.shape
        k, v = kv_tensors(problem)
        if k.data is None or v.data is None:
            return None, (k, v)
        count = -(-shape.seq // self.block_size)
        table = np.random.default_rng(count).permutation(count)
        slots = _slots(table, (0, shape.seq), self.block_size)
        pools = []
        for tensor, data in ((k, k.data), (v, v.data)):
            pool = np.full((len(data), count * self.block_size, shape.head_dim), np.nan, dtype=np.float32)
            pool[:, slots] = data
            pools.append(Tensor(tensor.name, tensor.columns, tensor.format, pool))
        return table, (pools[0], pools[1])

    def _read(self, shape: Shape) -> Range:
        """The slots read: the visible keys, rounded out to whole blocks."""
        first, last = shape.key_range((0, 1))
        size = self.block_size
        return first // size * size, -(-last // size) * size

    def waste(self, shape: Shape) -> int:
        """Slots that are read for nothing by each key-value head."""
        first, last = self._read(shape)
        seen = shape.key_range((0, 1))
        return (last - first) - (seen[1] - seen[0])

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Decode's bytes, the table, and the slots read for nothing."""
        counts = Counts()
        kernel = counts.kernel("attention")
        query_and_output(kernel, shape)
        first, last = self._read(shape)
        entries = (last - first) // min(self.block_size, tile.keys)  # a block larger than the tile is looked up again
        kernel.moved("block table").hbm_read = shape.all_kv_heads * entries * BLOCK_TABLE.row_bytes(1)
        attend_counts(kernel, shape, shape.all_kv_heads)
        read_kv(kernel, shape, shape.all_kv_heads * self.waste(shape), tensors=("K unused slots", "V unused slots"))
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        widest = widest_tile(*self._read(shape), tile.keys)
        need = decode_on_chip(shape, widest, shape.group)
        visible = widest_tile(*shape.key_range((0, 1)), tile.keys)
        table = BLOCK_TABLE.row_bytes(1) * max(1, widest // self.block_size)
        return OnChip(need.sram + table, decode_on_chip(shape, visible, shape.group).registers)

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return tile_that_fits(self, shape, gpu)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return -(-shape.seq // tile.keys)

    def check(self, shape: Shape, tile: TileSize) -> None:
        needs_one_query(self.name, shape)
        if tile.keys % self.block_size and self.block_size % tile.keys:
            raise UsageError(f"a tile of {tile.keys} keys and blocks of {self.block_size} tokens do not divide each other")


def _slots(table: np.ndarray, keys: Range, block_size: int) -> np.ndarray:
    """[keys] the physical slot of each logical position."""
    places = np.arange(*keys)
    return table[places // block_size] * block_size + places % block_size
