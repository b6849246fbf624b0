"""What every schedule offers: the loop that runs and counts, its closed form, and what it needs on chip."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from nanokv.errors import UsageError
from sim.formats import FLOAT32, Format
from sim.gpus import GPU
from sim.memory import Counts, Kernel, Machine, Range, Tensor
from sim.problem import Problem
from sim.shape import Shape, TileSize, row_tiles, spans


class TileSizeError(UsageError):
    """A tile needs more on-chip memory than a thread block has."""


Outputs = dict[str, np.ndarray]  # "O", and "L" where it is kept, or "dQ", "dK", "dV"; empty when only counting
STATISTIC = FLOAT32  # row maxima, sums and log-sum-exps: float32 in every published kernel


@dataclass(frozen=True)
class OnChip:
    """The most bytes that one thread block holds at once."""

    sram: int
    registers: int

    def fits(self, gpu: GPU) -> bool:
        return self.sram <= gpu.sram and (gpu.registers is None or self.registers <= gpu.registers)


class Schedule(Protocol):
    """An algorithm as loops over load, fold and store.

    `run` and `closed_form` give the same Counts, test by test: `run` also computes, `closed_form` costs at most one step a
    row tile. `on_chip` is the peak that `run` reaches.
    """

    name: ClassVar[str]
    backward: ClassVar[bool]

    def run(self, machine: Machine, problem: Problem, tile: TileSize) -> Outputs: ...

    def closed_form(self, shape: Shape, tile: TileSize) -> Counts: ...

    def on_chip(self, shape: Shape, tile: TileSize) -> OnChip: ...

    def auto_tile(self, shape: Shape, gpu: GPU) -> TileSize: ...

    def steps(self, shape: Shape, tile: TileSize) -> int:
        """Tile pairs that `run` goes through for one key-value head: what the loop costs."""
        ...

    def check(self, shape: Shape, tile: TileSize) -> None:
        """UsageError where this schedule cannot run this shape or tile."""
        ...


def heads_of(shape: Shape, kv: int) -> range:
    """The query heads that read key-value head `kv`, numbered over the batch."""
    return range(kv * shape.group, (kv + 1) * shape.group)


def row_blocks(machine: Machine, shape: Shape, tile: TileSize) -> Iterator[tuple[int, int, Range]]:
    """(key-value head, query head, rows): the row tiles of every head that the machine runs."""
    for kv in machine.each(shape.all_kv_heads):
        for head in heads_of(shape, kv):
            for rows in row_tiles(shape, tile):
                yield kv, head, rows


def clip(shape: Shape, tile: TileSize) -> tuple[int, int]:
    """Rows and keys that a tile really has: no more than there are."""
    return min(tile.rows, shape.rows), min(tile.keys, shape.seq)


def row_bytes(shape: Shape, form: Format) -> int:
    """Bytes of one row of head_dim elements with its scales."""
    return form.row_bytes(shape.head_dim) + form.scale_bytes(shape.head_dim)


def read_kv(kernel: Kernel, shape: Shape, rows: int, cached: int = 0, tensors: Iterable[str] = ("K", "V")) -> None:
    """Counts `rows` rows of K and V from HBM and `cached` more from the cache, codes and scales apart."""
    parts = {"": shape.kv.row_bytes(shape.head_dim), " scales": shape.kv.scale_bytes(shape.head_dim)}
    for name in tensors:
        for suffix, nbytes in parts.items():
            if nbytes:
                moved = kernel.moved(name + suffix)
                moved.hbm_read += rows * nbytes
                moved.cache_read += cached * nbytes


def with_peaks(counts: Counts, need: OnChip) -> Counts:
    """The counts with what one thread block holds at most."""
    counts.sram_peak, counts.register_peak = need.sram, need.registers
    return counts


def prefill_steps(shape: Shape, tile: TileSize) -> int:
    """Tile pairs of a whole group, causal or not."""
    return shape.group * -(-shape.rows // tile.rows) * -(-shape.seq // tile.keys)


def skipping_steps(shape: Shape, tile: TileSize) -> int:
    """Tile pairs of a whole group, those that no row sees left out."""
    return shape.group * spans(shape, tile).visits


def needs_prefill(name: str, shape: Shape) -> None:
    """UsageError for a pass that only exists for training."""
    if shape.rows != shape.seq:
        raise UsageError(f"{name} needs q_len = seq, not {shape.rows} of {shape.seq}: a backward pass has no cache")


PAPER_BLOCKS = (64, 128)  # FlashAttention-2, arXiv 2307.08691, section 3.3: {64, 128} x {64, 128}
SMALLER_BLOCKS = (1, 2, 4, 8, 16, 32)


def best_tile(schedule: Schedule, shape: Shape, gpu: GPU, cost: Callable[[Counts], int]) -> TileSize:
    """Of the paper's block sizes that fit, or else of smaller powers of two, the cheapest; the larger of equals."""
    for sizes in (PAPER_BLOCKS, SMALLER_BLOCKS):
        fitting = [
            tile
            for tile in (TileSize(rows, keys) for rows in sizes for keys in sizes)
            if schedule.on_chip(shape, tile).fits(gpu)
        ]
        if fitting:
            return min(fitting, key=lambda tile: (cost(schedule.closed_form(shape, tile)), -tile.rows * tile.keys))
    raise no_tile(schedule, shape, gpu)


def no_tile(schedule: Schedule, shape: Shape, gpu: GPU) -> TileSizeError:
    """The error for a head so wide that not even one row of it fits."""
    return TileSizeError(f"{schedule.name}: not one row of head_dim {shape.head_dim} fits in {gpu.name}'s {gpu.sram} bytes")


def largest_square(schedule: Schedule, shape: Shape, gpu: GPU) -> int:
    """The largest B for which a tile of B x B fits, 0 where none does; no larger than the shape has rows and keys."""
    low, high = 0, max(shape.rows, shape.seq)
    while low < high:
        middle = (low + high + 1) // 2
        if schedule.on_chip(shape, TileSize(middle, middle)).fits(gpu):
            low = middle
        else:
            high = middle - 1
    return low


def kv_tensors(problem: Problem) -> tuple[Tensor, Tensor]:
    """K and V in HBM."""
    shape, arrays = problem.shape, problem.arrays
    k, v = (None, None) if arrays is None else (arrays.k, arrays.v)
    return Tensor("K", shape.head_dim, shape.kv, k), Tensor("V", shape.head_dim, shape.kv, v)


def query_tensor(problem: Problem) -> Tensor:
    """Q in HBM."""
    return query_like(problem, "Q", None if problem.arrays is None else problem.arrays.q)


def query_like(problem: Problem, name: str, data: np.ndarray | None) -> Tensor:
    """A tensor of Q's shape and dtype with these values."""
    return Tensor(name, problem.shape.head_dim, problem.shape.dtype, data)


def output_gradient(problem: Problem) -> Tensor:
    """dO in HBM."""
    return query_like(problem, "dO", None if problem.arrays is None else problem.arrays.grad)


def new_tensor(problem: Problem, name: str, columns: int, form: Format | None = None, fill: float = 0.0) -> Tensor:
    """A tensor with a row for each query row of each head, in the shape's dtype unless told."""
    shape = problem.shape
    return Tensor(name, columns, form or shape.dtype, problem.zeros(shape.group, shape.rows, columns, fill))


def outputs(*tensors: Tensor) -> Outputs:
    """What the caller gets: the values by name."""
    return {tensor.name: tensor.data for tensor in tensors if tensor.data is not None}


def softmax_scale(shape: Shape) -> np.float32:
    """1/sqrt(D), as the runtime multiplies it into q."""
    return np.float32(shape.head_dim**-0.5)
