"""The CUDA kernels as functions of arrays on the card: what nanokv.numerics and nanokv.attention call there.

As nanokv/kernels/compiled.py, with the same bits: every function takes float32 and gives new float32 arrays, which come from
CuPy's memory pool, so that after the first steps the driver is asked for nothing. Nothing waits for the card and nothing is
copied from it; attend() sends its tables, in one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import numpy as np

from nanokv.backend import Array, module_of, to_numpy
from nanokv.kernels.choice import PackedMemory
from nanokv.kernels.cuda import launches
from nanokv.kernels.cuda.card import Card
from nanokv.kernels.cuda.launches import Tables
from nanokv.kernels.cuda.tables import ARRAYS, host_tables
from nanokv.kernels.layout import INT4
from nanokv.kernels.matrix import Matrix

F = np.float32


@cache
def _card(xp: ModuleType) -> Card:
    return Card(xp)


def _of(array: Array) -> Card:
    """The card that an array is on."""
    return _card(module_of(array))


def _solid(array: Array) -> Array:
    """Rows one after the other in memory, as the kernels take them."""
    return array if array.flags.c_contiguous else array.copy()


def _empty(like: Array, shape: tuple[int, ...]) -> Array:
    return module_of(like).empty(shape, dtype=F)


@dataclass(frozen=True)
class CardMatrix:
    """nanokv.kernels.matrix.Matrix on the card; it stands where a model has an array of weights."""

    form: str
    shape: tuple[int, int]
    codes: Array
    scales: Array | None = None
    lows: Array | None = None

    dtype = np.dtype(np.float32)
    ndim = 2

    @cached_property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in (self.codes, self.scales, self.lows) if plane is not None)

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def sent(cls, matrix: Matrix, xp: ModuleType) -> "CardMatrix":
        """A matrix of the host's, its planes as they are."""
        planes = (None if plane is None else xp.asarray(plane) for plane in (matrix.codes, matrix.scales, matrix.lows))
        return cls(matrix.form, matrix.shape, *planes)

    def to_host(self) -> Matrix:
        """The same in host memory."""
        rest = (None if plane is None else to_numpy(plane) for plane in (self.scales, self.lows))
        return Matrix(self.form, self.shape, to_numpy(self.codes), *rest)

    def beside(self, matrix: Matrix) -> "CardMatrix":
        """Another matrix of the host's on the same card."""
        return self.sent(matrix, module_of(self.codes))

    def __getitem__(self, rows: Array) -> Array:
        """Decoded rows: indices [R] on the card -> [R, K] float32."""
        out = _empty(self.codes, (len(rows), self.shape[1]))
        launches.embed_rows(_of(self.codes), rows.astype(np.int32), self, out)
        return out


@dataclass(frozen=True)
class CardMemory(PackedMemory):
    """The card's memory, in which a matrix of weights comes to lie in panels: made on the host, its planes sent as they are."""

    def keep(self, matrix: Matrix) -> CardMatrix:
        return CardMatrix.sent(matrix, self.xp)


def linear(x: Array, weight: CardMatrix, bias: Array | None) -> Array:
    """x [R, K], weight [N, K], bias [N] -> [R, N]"""
    out, sums = _empty(x, (len(x), len(weight))), _empty(x, launches.sums_shape(len(x), weight))
    launches.linear(_of(x), _solid(x), weight, bias, out, sums)
    return out


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """[R, K] -> [R, K]"""
    out = _empty(x, x.shape)
    launches.layer_norm(_of(x), _solid(x), weight, bias, eps, out)
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """[..., K] -> [..., K]"""
    out = _empty(x, x.shape)
    launches.rms_norm(_of(x), _solid(x), weight, eps, out)
    return out


def gelu_new(x: Array) -> Array:
    """[R, K] -> [R, K]"""
    out = _empty(x, x.shape)
    launches.gelu_new(_of(x), _solid(x), out)
    return out


def gelu_erf(x: Array) -> Array:
    """[R, K] -> [R, K]"""
    out = _empty(x, x.shape)
    launches.gelu_erf(_of(x), _solid(x), out)
    return out


def swiglu(gate_up: Array) -> Array:
    """[R, 2 I] -> [R, I]"""
    out = _empty(gate_up, (len(gate_up), gate_up.shape[1] // 2))
    launches.swiglu(_of(gate_up), _solid(gate_up), out)
    return out


def rotate(x: Array, cos: Array, sin: Array, adjacent: bool) -> Array:
    """x [R, H, D], cos, sin [R, 1, D / 2] -> [R, H, D]"""
    out = _empty(x, x.shape)
    launches.rotate(_of(x), _solid(x), cos, sin, adjacent, out)
    return out


def argmax(logits: Array, tokens: Array) -> None:
    """logits [R, V] -> tokens [R] int32, the lowest id of equals."""
    launches.argmax(_of(logits), _solid(logits), tokens)


def append(
    k: Array, v: Array, slots: Array, codec: int, k_planes: Sequence[Array], v_planes: Sequence[Array], fixed: float
) -> None:
    """k, v [R, H, D] into the slots [R] int32 of one layer's planes [slots, H, ...], codes and perhaps scales, in the KV format
    `codec`, a number of nanokv.kernels.layout: one launch each. int4 takes keys as launches.append_int4() does."""
    for x, planes in ((k, k_planes), (v, v_planes)):
        dense = x.strides[1:] == (x.shape[2] * x.itemsize, x.itemsize)  # heads side by side: rows may lie in a wider array
        rows = x if dense else x.copy()
        stride = rows.strides[0] // x.itemsize
        if codec == INT4:
            launches.append_int4(_of(x), rows, slots, planes, planes is k_planes, stride)
        else:
            codes, scales = (*planes, None)[:2]
            launches.append(_of(x), rows, slots, codec, codes, scales, fixed, stride)


def copy_unit(plane: Array, source: int, target: int) -> None:
    """plane [L, U, ...]: everything of unit `source` into unit `target`, all layers."""
    launches.copy_unit(_of(plane), plane, source, target)


def attend(
    q: Array,
    q_sinks: Array,
    positions: np.ndarray,
    runs: np.ndarray,
    tiles: np.ndarray,
    units: np.ndarray,
    unit_size: int,
    kv_heads: int,
    fixed: float,
    scale: float,
    out: Array,
) -> None:
    """nanokv.kernels.compiled.attend: the tables are the host's, their addresses the card's."""
    heads, dim = q.shape[1:]
    tables = sent(host_tables(positions, runs, tiles, units, unit_size, heads // kv_heads, dim), module_of(q))
    shape = len(tiles), tables.most, heads
    partial = _empty(q, shape), _empty(q, shape), _empty(q, (*shape, dim))
    solid = _solid(q)
    other = solid if q_sinks is q else _solid(q_sinks)
    launches.attend(_of(q), solid, other, tables, kv_heads, fixed, scale, out, partial)


def sent(tables: Tables, xp: ModuleType) -> Tables:
    """Tables in host memory -> on the card, by one copy: each a view of one piece of bytes."""
    found = {name: getattr(tables, name) for name in ARRAYS}
    starts = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in found.values())])
    piece = np.zeros(int(starts[-1]), np.uint8)
    for start, array in zip(starts, found.values(), strict=False):
        piece[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = xp.asarray(piece)
    views: dict[str, Any] = {
        name: there[int(start) : int(start) + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, (name, array) in zip(starts, found.items(), strict=False)
    }
    return Tables(**views, unit_size=tables.unit_size, most=tables.most)
