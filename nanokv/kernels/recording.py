"""Programs written: an operation's name and arrays -> the line that nanokv/kernels/program.py reads, and the call that runs it.

Arrays are named by their addresses, so a program keeps hold of them. Rows of a program are as many as it is told when it is
run: its arrays have room for the most.

Symbols as in nanokv/kernels/rows.py and attention.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanokv.backend import address_of
from nanokv.errors import UsageError
from nanokv.kernels import layout
from nanokv.kernels.attention import attend_rows, attend_tiles, attention_words, combine_runs
from nanokv.kernels.compiling import CFunction
from nanokv.kernels.encoding import append_kernel
from nanokv.kernels.linear import linear_kernel, linear_words
from nanokv.kernels.matrix import FORMATS, Matrix
from nanokv.kernels.program import run
from nanokv.kernels.rows import (
    embed_kernel,
    gelu_kernel,
    layer_norm_kernel,
    norm_words,
    rms_norm_kernel,
    rotate_kernel,
    swiglu_kernel,
)

F, I = np.float32, np.int64  # noqa: E741
Place = np.ndarray | int  # an array or an address inside one


@dataclass(frozen=True)
class Tables:
    """What attention and append look up in a run, one for all layers: see layout.py. Runs of few rows come first in a set;
    `listed` are their tiles, `owner` the runs of those, `places` where a run's begin there, `most` the rows of the longest."""

    positions: np.ndarray = field(default_factory=lambda: np.zeros((0,), I))  # [R]
    sets: np.ndarray = field(default_factory=lambda: np.zeros((1, layout.SET_COLUMNS), I))
    runs: np.ndarray = field(default_factory=lambda: np.zeros((0, layout.RUN_COLUMNS), I))
    listed: np.ndarray = field(default_factory=lambda: np.zeros((0,), I))  # [n]
    owner: np.ndarray = field(default_factory=lambda: np.zeros((0,), I))  # [n]
    places: np.ndarray = field(default_factory=lambda: np.zeros((0,), I))  # [runs]
    tiles: np.ndarray = field(default_factory=lambda: np.zeros((0, layout.TILE_COLUMNS), I))
    sources: np.ndarray = field(default_factory=lambda: np.zeros((1, 0, 7), I))  # [L, S, 7]
    which: np.ndarray = field(default_factory=lambda: np.zeros((0,), I))  # [N]
    homes: np.ndarray = field(default_factory=lambda: np.zeros((0,), I))  # [R]
    units: np.ndarray = field(default_factory=lambda: np.zeros((0, 1), I))  # [N, T / unit_size]
    unit_size: int = layout.TILE
    fixed: float = 1.0
    most: int = 0


def arranged(groups: Sequence[np.ndarray], alike: Sequence[int], **others: Any) -> Tables:
    """Tables from groups of runs, in any order, whose tiles lie among all `tiles`; a set for each of `alike`: its group."""
    sets, runs, most = np.zeros((len(groups), layout.SET_COLUMNS), I), [], 0
    listed: list[int] = []
    owner: list[int] = []
    places: list[int] = []
    for line, group in zip(sets, groups, strict=True):
        rows = group[:, layout.END] - group[:, layout.BEGIN]
        few = rows <= layout.FEW
        line[layout.FEW_RUNS], line[layout.FEW_TILES] = len(places), len(listed)
        for each in group[few].tolist():
            tiles = range(each[layout.FIRST], each[layout.LAST])
            owner += [len(places)] * len(tiles)
            places.append(len(listed))
            listed += tiles
        line[layout.MANY_RUNS], line[layout.TILES_END] = len(places), len(listed)
        most = max(most, int(rows[few].max(initial=0)))
        runs += [group[few], group[~few]]
        places += [-1] * int((~few).sum())
        line[layout.SET_END] = len(places)
    return Tables(
        sets=sets[list(alike)],
        runs=np.concatenate(runs),
        listed=np.array(listed, I),
        owner=np.array(owner, I),
        places=np.array(places, I),
        most=most,
        **others,
    )


@dataclass
class Program:
    """A list of operations, to be written by its methods and then run as often as one likes."""

    lines: list[list[int]] = field(default_factory=list)
    words: int = 0  # scratch that the greediest operation needs, without attention
    kept: list[Any] = field(default_factory=list)
    shape: tuple[int, int, int] = (0, 0, 0)  # attention's H, G and D

    def _write(self, kernel: CFunction, *numbers: Any, real: float = 0.0) -> int:
        """`numbers` follow the rows; an array stands for its address. The operation's place in the list."""
        arrays = [each for each in numbers if isinstance(each, np.ndarray)]
        assert all(array.flags.c_contiguous and array.dtype in (F, I) for array in arrays)
        self.kept += arrays
        line = [address_of(each) if isinstance(each, np.ndarray) else int(each) for each in numbers]
        empty = [0] * (layout.REAL - layout.FIRST_OWN - len(line))
        self.lines.append([kernel.address, 0, *line, *empty, _bits(real)])
        return len(self.lines) - 1

    def linear(self, x: np.ndarray, matrix: Matrix, bias: np.ndarray | None, out: np.ndarray, adds: bool = False) -> int:
        """x [R, K], bias [N] -> out [R, N], or added to it; its place in the list."""
        outputs, inputs = matrix.shape
        self.kept.append(matrix)
        self.words = max(self.words, linear_words())
        form, more = FORMATS.index(matrix.form), 0 if bias is None else _vector(bias, outputs)
        x, out = _rows(x, inputs), _rows(out, outputs)
        return self._write(linear_kernel, x, form, *matrix.addresses, more, adds, out, inputs, outputs)

    def rms_norm(
        self, x: Place, weight: np.ndarray, eps: float, out: np.ndarray, heads: int = 1, stride: int | None = None
    ) -> None:
        """x [R, H, K] with rows `stride` elements apart -> out [R, H, K]."""
        width = out.shape[-1]
        self.words, gap = max(self.words, norm_words(width)), heads * width if stride is None else stride
        self._write(rms_norm_kernel, x, gap, heads, _vector(weight, width), out, width, real=eps)

    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, out: np.ndarray) -> None:
        """x, out [R, K]"""
        width = out.shape[-1]
        self.words = max(self.words, norm_words(width))
        x, weight, bias = _rows(x, width), _vector(weight, width), _vector(bias, width)
        self._write(layer_norm_kernel, width, x, weight, bias, out, real=eps)

    def gelu(self, x: np.ndarray, out: np.ndarray, width: int, by_erf: bool) -> None:
        """x, out [R, I]; by the error function, or by tanh."""
        self.words = max(self.words, 16)
        self._write(gelu_kernel, width, _rows(x, width), _rows(out, width), by_erf)

    def swiglu(self, gate_up: np.ndarray, out: np.ndarray, inner: int) -> None:
        """gate_up [R, 2 I] -> out [R, I]"""
        self.words = max(self.words, 16)
        self._write(swiglu_kernel, inner, _rows(gate_up, 2 * inner), _rows(out, inner))

    def rotate(
        self, x: Place, heads: int, dim: int, cos: np.ndarray, sin: np.ndarray, adjacent: bool, out: np.ndarray,
        stride: int | None = None,
    ) -> int:  # fmt: skip
        """x [R, H, D] with rows `stride` elements apart, cos, sin [R, D / 2] -> out [R, H, D]; its place in the list."""
        cos, sin, out = _rows(cos, dim // 2), _rows(sin, dim // 2), _rows(out, heads * dim)
        return self._write(rotate_kernel, x, heads * dim if stride is None else stride, heads, dim, cos, sin, adjacent, out)

    def embed(
        self, tokens: np.ndarray, matrix: Matrix, places: np.ndarray | None, positions: np.ndarray, out: np.ndarray
    ) -> None:
        """tokens [R] int64, a matrix [V, E] -> out [R, E]; plus the rows of `places` [., E] at positions [R]."""
        self.kept.append(matrix)
        form, width = FORMATS.index(matrix.form), matrix.shape[1]
        table = 0 if places is None else solid(_rows(places, width))
        self._write(embed_kernel, width, tokens, form, *matrix.addresses, table, positions, _rows(out, width))

    def append(
        self, x: Place, heads: int, dim: int, slots: np.ndarray, layer: int, values: bool, stride: int | None = None
    ) -> None:
        """x [R, H, D] with rows `stride` elements apart into the slots [R] of a layer, as keys or `values`."""
        self._write(append_kernel, x, heads * dim if stride is None else stride, heads, dim, slots, layer, values)

    def attend(
        self, q: Place, q_sinks: Place, shape: tuple[int, int, int], layer: int, which: int, scale: float,
        out: np.ndarray, strides: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """q, q_sinks [R, Hq, D], rows `strides` elements apart, over the runs of set `which` -> out [R, Hq, D]; `shape` is
        H, G, D."""
        heads, group, dim = self.shape = shape
        both = strides or (heads * group * dim,) * 2
        common = q, both[0], q_sinks, both[1], layer, which, *shape
        self._write(attend_tiles, *common, real=scale)
        self._write(combine_runs, which, *shape, _rows(out, heads * group * dim))
        self._write(attend_rows, *common, out, real=scale)

    def ready(self) -> "Ready":
        """The program, to be run."""
        return Ready(self)


def _bits(real: float) -> int:
    """Of a float32."""
    return int(np.float32(real).view(np.int32))


def solid(array: np.ndarray) -> np.ndarray:
    """Float32, rows one after the other in memory, as the kernels take what they read: the array itself, or a copy."""
    return np.require(array, F, ["C_CONTIGUOUS", "ALIGNED"])


def _rows(array: np.ndarray, width: int) -> np.ndarray:
    """The array, whose rows are of `width` numbers. UsageError where they are not: a kernel would go past its end."""
    if math.prod(array.shape[1:]) != width:
        raise UsageError(f"rows of {math.prod(array.shape[1:])} numbers where {width} are needed")
    return array


def _vector(array: np.ndarray, width: int) -> np.ndarray:
    """A constant [1, width] of what must be [width]."""
    return solid(_rows(array[None], width))


class Ready:
    """A program that is written. It has scratch memory of its own: one run at a time."""

    def __init__(self, program: Program):
        self._program, self._shape, self._words = np.array(program.lines, I), program.shape, program.words
        self._kept = program.kept
        self._counters = np.zeros((len(program.lines), layout.COUNTER_BYTES // 8), I)
        self._scratch = self._partial = np.empty(0, F)
        self._block = np.zeros(layout.BLOCK, I)
        self._block[[layout.PROGRAM, layout.COUNTERS]] = address_of(self._program), address_of(self._counters)

    def point(self, operation: int, column: int, array: np.ndarray) -> None:
        """Another array in place of the one that an operation was written with; the caller keeps hold of it."""
        self._program[operation, column] = address_of(array)

    def run(self, rows: int, threads: int, tables: Tables | None = None, skip: tuple[int, ...] = ()) -> None:
        """On `threads` threads; operations `skip` are left out. `tables`: for a program with attention or append."""
        self._make_room(tables, threads)
        if tables is not None:
            self._tell(tables)
        self._program[:, layout.ROWS] = rows
        self._program[list(skip), layout.ROWS] = 0
        self._counters[:] = 0
        self._block[layout.STEPS], self._block[layout.THREADS] = len(self._program), threads
        run(threads, address_of(self._block), address_of(self._scratch))

    def _tell(self, tables: Tables) -> None:
        """Tells the kernels where tables lie."""
        block = self._block
        for column, number in (
            (layout.NUM_ROWS, len(tables.positions)), (layout.NUM_SETS, len(tables.sets)), (layout.NUM_RUNS, len(tables.runs)),
            (layout.NUM_LISTED, len(tables.listed)), (layout.NUM_TILES, len(tables.tiles)),
            (layout.NUM_SOURCES, tables.sources.shape[1]), (layout.UNIT_SIZE, tables.unit_size),
            (layout.FIXED, _bits(tables.fixed)),
        ):  # fmt: skip
            block[column] = number
        for column, array in (
            (layout.POSITIONS, tables.positions), (layout.HOMES, tables.homes), (layout.SETS, tables.sets),
            (layout.RUNS, tables.runs), (layout.PLACES, tables.places), (layout.LISTED, tables.listed),
            (layout.OWNER, tables.owner), (layout.TILES, tables.tiles), (layout.WHICH, tables.which),
            (layout.UNITS, tables.units), (layout.SOURCES, tables.sources),
        ):  # fmt: skip
            assert array.flags.c_contiguous
            assert array.dtype == I
            block[column] = address_of(array)

    def _make_room(self, tables: Tables | None, threads: int) -> None:
        """Scratch memory for this run; fresh where what there is does not suffice."""
        (heads, group, dim), words, block = self._shape, self._words, self._block
        if heads:
            assert tables is not None
            longest = int((tables.runs[:, layout.END] - tables.runs[:, layout.BEGIN]).max(initial=0))
            lines, wide = tables.most * group, -(-dim // 64) * 64
            words = max(words, attention_words(lines, longest * group, heads, dim))
            partial = len(tables.listed) * heads * lines
            if self._partial.size < partial * (wide + 2):
                self._partial = np.empty(partial * (wide + 2), F)
            o = address_of(self._partial)
            m = o + partial * wide * 4
            block[layout.LINES], block[layout.PART_M : layout.PART_O + 1] = lines, (m, m + partial * 4, o)
        each = -(-words // 16) * 16
        if self._scratch.size < each * threads:
            self._scratch = np.empty(each * threads, F)
        block[layout.SCRATCH_BYTES] = each * 4
