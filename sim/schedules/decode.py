"""Decoding: one query a sequence over its cached keys and values, and what the ways of doing it share.

By group, a thread block for each key-value head serves its G query heads with one read of K and V: 2 S Hkv D + 2 Hq D
elements of HBM. By query head, each reads its own copy: G times the bytes of K and V. Keys before a window are not read.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nanokv.attention import Partial, finish
from nanokv.errors import UsageError
from nanokv.kv.tile import TILE
from sim.fold import fold, lane, padded
from sim.gpus import GPU
from sim.memory import Counts, Kernel, Machine, Range, Tensor
from sim.problem import Problem
from sim.schedules.base import (
    OnChip,
    Outputs,
    Schedule,
    kv_tensors,
    new_tensor,
    no_tile,
    outputs,
    query_tensor,
    read_kv,
    row_bytes,
    softmax_scale,
    with_peaks,
)
from sim.shape import Shape, TileSize, hidden


@dataclass(frozen=True)
class Decode:
    """`per_head`: a thread block for each query head instead of each key-value head, for contrast."""

    name: ClassVar[str] = "decode"
    backward: ClassVar[bool] = False
    per_head: bool = False

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs:
        shape = problem.shape
        q_all, tensors = query_tensor(problem), kv_tensors(problem)
        out = new_tensor(problem, "O", shape.head_dim)
        machine.kernel("attention")
        for kv in machine.each(shape.all_kv_heads):
            for members in _blocks(shape, self.per_head):
                heads = [kv * shape.group + member for member in members]
                with ExitStack() as held:
                    query = load_queries(held, machine, shape, q_all, kv, members)
                    state: Partial | None = None
                    for keys in visible_tiles(shape, tile):
                        state = decode_step(machine, shape, tile, tensors, kv, keys, query, len(members), state)
                    for head, member in zip(heads, members, strict=True):
                        row = None if state is None else finish(Partial(*(a[:, member] for a in state)))
                        machine.store(out, head, (0, 1), row)
        return outputs(out)

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts:
        """Bytes: Q and O once; what the query may see of K and V once a thread block."""
        counts = Counts()
        kernel = counts.kernel("attention")
        blocks = shape.all_heads if self.per_head else shape.all_kv_heads
        query_and_output(kernel, shape)
        attend_counts(kernel, shape, blocks)
        return with_peaks(counts, self.on_chip(shape, tile))

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip:
        return decode_on_chip(shape, widest_tile(*shape.key_range((0, 1)), tile.keys), 1 if self.per_head else shape.group)

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize:
        return tile_that_fits(self, shape, gpu)

    def steps(self, shape: Shape, tile: TileSize) -> int:
        return (shape.group if self.per_head else 1) * -(-shape.seq // tile.keys)

    def check(self, shape: Shape, tile: TileSize) -> None:
        needs_one_query(self.name, shape)


@dataclass(frozen=True)
class DecodePerHead(Decode):
    """The same, a thread block for each query head."""

    name: ClassVar[str] = "decode-per-head"
    per_head: bool = True


def _blocks(shape: Shape, per_head: bool) -> list[range]:
    """The group's members that each thread block serves."""
    return [range(i, i + 1) for i in range(shape.group)] if per_head else [range(shape.group)]


def needs_one_query(name: str, shape: Shape) -> None:
    if shape.rows != 1:
        raise UsageError(f"{name} has one query a sequence: use q_len 1, not {shape.rows}")


def visible_tiles(shape: Shape, tile: TileSize) -> Iterator[Range]:
    """What the query may see, cut into tiles that are aligned to position 0."""
    return aligned_tiles(*shape.key_range((0, 1)), tile.keys)


def aligned_tiles(first: int, last: int, size: int) -> Iterator[Range]:
    """[first, last) cut at multiples of `size`."""
    for start in range(first // size * size, last, size):
        yield max(start, first), min(start + size, last)


def load_queries(held: ExitStack, machine: Machine, shape: Shape, q_all: Tensor, kv: int, members: range) -> np.ndarray | None:
    """The thread block's queries into SRAM for as long as `held` is open -> [1, G, D] scaled, other heads zero."""
    tiles = [held.enter_context(machine.load(q_all, kv * shape.group + member, (0, 1))) for member in members]
    held.enter_context(machine.hold("O, m, l", len(members) * (shape.head_dim + 2)))
    if not machine.computes(kv):
        return None
    scaled = [tile.values * softmax_scale(shape) for tile in tiles]
    return lane(scaled[0], shape.group, members[0]) if len(members) < shape.group else np.stack(scaled, axis=1)


def decode_step(
    machine: Machine,
    shape: Shape,
    tile: TileSize,
    tensors: tuple[Tensor, Tensor],
    kv: int,
    keys: Range,
    query: np.ndarray | None,
    members: int,
    state: Partial | None,
    slots: np.ndarray | None = None,
) -> Partial | None:
    """Loads the visible keys of one tile, from their `slots` if they are not one run, and folds the whole padded tile."""
    count = keys[1] - keys[0]
    k_all, v_all = tensors
    with (
        machine.load(k_all, kv, keys, slots=slots) as k,
        machine.load(v_all, kv, keys, slots=slots) as v,
        machine.hold("S", members * count),
    ):
        if query is not None:
            at = keys[0] % tile.keys
            start = keys[0] - at
            mask = hidden(shape, (0, 1), (start, start + tile.keys))
            state = fold(state, query, padded(k.values, tile.keys, at), padded(v.values, tile.keys, at), mask)
        machine.multiply(4 * members * count * shape.head_dim)
    return state


def query_and_output(kernel: Kernel, shape: Shape) -> None:
    row = shape.all_heads * shape.dtype.row_bytes(shape.head_dim)
    kernel.moved("Q").hbm_read = kernel.moved("O").hbm_write = row


def attend_counts(kernel: Kernel, shape: Shape, blocks: int) -> None:
    """K and V of the visible keys for each of `blocks` thread blocks; every query head's products."""
    first, last = shape.key_range((0, 1))
    read_kv(kernel, shape, blocks * (last - first))
    kernel.flops = 4 * shape.all_heads * (last - first) * shape.head_dim


def widest_tile(first: int, last: int, size: int) -> int:
    """The longest of aligned_tiles(first, last, size)."""
    begin, end = first // size, (last - 1) // size
    if begin == end:
        return last - first
    return size if end - begin > 1 else max(size - first % size, (last - 1) % size + 1)


def decode_on_chip(shape: Shape, keys: int, members: int) -> OnChip:
    """`members` queries, a tile of `keys` keys and values; O, m, l and S in registers."""
    sram = members * row_bytes(shape, shape.dtype) + 2 * keys * row_bytes(shape, shape.kv)
    return OnChip(sram, 4 * members * (shape.head_dim + 2 + keys))


def tile_that_fits(schedule: Schedule, shape: Shape, gpu: GPU) -> TileSize:
    """The runtime's tile, or the largest power of two below it: the size of a tile changes no byte of K and V."""
    for keys in (TILE >> shift for shift in range(TILE.bit_length())):
        if schedule.on_chip(shape, TileSize(1, keys)).fits(gpu):
            return TileSize(1, keys)
    raise no_tile(schedule, shape, gpu)
