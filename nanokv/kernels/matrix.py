"""A weight matrix as the kernels want it: in panels of 64 outputs, in float32 or a smaller format.

    float32         as it is
    bf16, fp16      rounded to nearest even
    int8            32 weights of one output share a scale: d * q, q = -127 .. 127, d float16 (GGUF's Q8_0)
    int8-row        all weights of one output share a scale: d * q, as int8
    int4            32 weights of one output share a scale: d * (q - 8), q = 0 .. 15, d float16 (GGUF's Q4_0); with a plane of
                    lowest values m, d * q + m (Q4_1)

A product with a matrix has the bits of the float32 product with its decoded weights, to_array().

Symbols: N outputs, K inputs, P panels, G groups of 32 inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nanokv.errors import UsageError

PANEL = 64
GROUP = 32
PIECE = 1 << 18  # weights packed at once
FORMATS = ("float32", "bf16", "fp16", "int8", "int4", "int8-row")


@dataclass(frozen=True)
class Matrix:
    """[N, K]. `codes` [P, K, 64] (int4: [P, 4 G, 64] words of eight inputs), `scales` and `lows` [P, G, 64] float16
    (int8-row: [P, 1, 64]).

    It stands where a model has an array of weights: it has a shape, a dtype (of its decoded weights) and a size in bytes,
    and an index gives rows.
    """

    form: str
    shape: tuple[int, int]
    codes: np.ndarray
    scales: np.ndarray | None = None
    lows: np.ndarray | None = None

    on_host = True
    dtype = np.dtype(np.float32)
    ndim = 2

    @property
    def planes(self) -> list[np.ndarray]:
        return [plane for plane in (self.codes, self.scales, self.lows) if plane is not None]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, the filling of the last panel included."""
        return sum(plane.nbytes for plane in self.planes)

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Of the planes; 0 for one that is not there."""
        found = [plane.__array_interface__["data"][0] for plane in self.planes]
        codes, scales, lows = (*found, 0, 0)[:3]
        return codes, scales, lows

    def __getstate__(self) -> dict[str, Any]:
        """A copy's planes lie elsewhere: it finds their addresses itself."""
        return {name: value for name, value in vars(self).items() if name != "addresses"}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Decoded rows, as an array's: an index, a slice or indices [R] -> [K] or [R, K] float32."""
        wanted = np.arange(self.shape[0])[rows]
        panel, lane = np.divmod(wanted, PANEL)
        codes = self.codes[panel, :, lane]
        if self.scales is None:
            return _FROM_CODES[self.form](codes)
        if self.form == "int8-row":
            return codes.astype(np.float32) * self.scales[panel, 0, lane].astype(np.float32)[..., None]
        scales = self._spread(self.scales, panel, lane)
        if self.form == "int8":
            return codes.astype(np.float32) * scales
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        q = (codes[..., None] >> shifts & np.uint32(15)).reshape(*codes.shape[:-1], -1)[..., : self.shape[1]].astype(np.float32)
        if self.lows is None:
            return (q - np.float32(8)) * scales
        return q * scales + self._spread(self.lows, panel, lane)

    def _spread(self, groups: np.ndarray, panel: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """A scale for each group -> one for each input, float32."""
        return np.repeat(groups[panel, :, lane].astype(np.float32), GROUP, axis=-1)[..., : self.shape[1]]

    def to_array(self) -> np.ndarray:
        """[N, K] float32: the weights as they are computed with."""
        return self[:]


_FROM_CODES = {
    "float32": lambda codes: codes,
    "bf16": lambda codes: (codes.astype(np.uint32) << np.uint32(16)).view(np.float32),
    "fp16": lambda codes: codes.view(np.float16).astype(np.float32),
}


def pack(weight: np.ndarray, form: str = "float32", name: str = "a weight matrix") -> Matrix:
    """A float32 array [N, K] in one of FORMATS, some rows after others, so that little memory is taken on the way. UsageError
    for an unknown format, and for weights that a scale cannot hold (not finite, or beyond float16's range), by `name`."""
    if form not in FORMATS:
        raise UsageError(f"unknown weight format {form!r}: choose one of {', '.join(FORMATS)}")
    weight = np.asarray(weight)
    each = max(PANEL, PIECE // max(1, weight.shape[1]) // PANEL * PANEL)
    planes: list[np.ndarray] = []
    for begin in range(0, max(1, len(weight)), each):
        piece = _packed(np.ascontiguousarray(weight[begin : begin + each], dtype=np.float32), form, name)
        if len(piece) == len(weight):
            return piece
        planes = planes or [np.empty((-(-len(weight) // PANEL), *plane.shape[1:]), plane.dtype) for plane in piece.planes]
        for plane, part in zip(planes, piece.planes, strict=True):
            plane[begin // PANEL : begin // PANEL + len(part)] = part
    return Matrix(form, weight.shape, *planes)


def _packed(weight: np.ndarray, form: str, name: str) -> Matrix:
    """pack(), all rows at once."""
    if form == "float32":
        return Matrix(form, weight.shape, to_panels(weight))
    if form == "bf16":
        import ml_dtypes

        return Matrix(form, weight.shape, to_panels(weight.astype(ml_dtypes.bfloat16).view(np.uint16)))
    if form == "fp16":
        with np.errstate(over="ignore"):
            return Matrix(form, weight.shape, to_panels(weight.astype(np.float16).view(np.uint16)))
    grouped = weight[:, None] if form == "int8-row" else _grouped(weight)  # [N, G, weights that share a scale]
    extreme = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=-1)[..., None], axis=-1)[..., 0]  # [N, G], its sign kept
    with np.errstate(over="ignore"):
        scales = (extreme / np.float32(-8) if form == "int4" else np.abs(extreme) / np.float32(127)).astype(np.float16)
    if not np.isfinite(scales).all():
        raise UsageError(f"{name} holds weights that {form} cannot: not finite, or too large for its scales")
    wide = scales.astype(np.float32)[..., None]
    fractions = np.divide(grouped, wide, out=np.zeros_like(grouped), where=wide != 0)
    if form != "int4":
        return from_int8(np.clip(np.rint(fractions), -127, 127).astype(np.int8), scales, weight.shape, form)
    return from_int4(np.clip(np.rint(fractions) + 8, 0, 15).astype(np.uint8), scales, None, weight.shape)


def _grouped(weight: np.ndarray) -> np.ndarray:
    """[N, K] -> [N, G, 32], filled up with zeros."""
    return np.pad(weight, ((0, 0), (0, -weight.shape[1] % GROUP))).reshape(len(weight), -1, GROUP)


def from_int8(codes: np.ndarray, scales: np.ndarray, shape: tuple[int, int], form: str = "int8") -> Matrix:
    """Codes [N, G, 32] int8 and float16 scales [N, G], as Q8_0 stores them; for int8-row [N, 1, K] and [N, 1]."""
    flat = codes.reshape(len(codes), -1)[:, : shape[1]]
    return Matrix(form, shape, to_panels(flat), to_panels(scales))


def from_int4(codes: np.ndarray, scales: np.ndarray, lows: np.ndarray | None, shape: tuple[int, int]) -> Matrix:
    """Codes [N, G, 32] of 0 .. 15, float16 scales and, for Q4_1, lowest values [N, G]."""
    words = np.zeros((len(codes), codes.shape[1] * GROUP // 8), np.uint32)
    eights = codes.reshape(len(codes), -1, 8)
    for j in range(8):
        words |= eights[:, :, j].astype(np.uint32) << np.uint32(4 * j)
    return Matrix("int4", shape, to_panels(words), to_panels(scales), None if lows is None else to_panels(lows))


def to_panels(rows: np.ndarray) -> np.ndarray:
    """[N, K] -> [P, K, 64], any type of element; the last panel filled up with zeros."""
    outputs, inputs = rows.shape
    panels = np.zeros((-(-outputs // PANEL), inputs, PANEL), rows.dtype)
    for p in range(len(panels)):
        some = rows[p * PANEL : (p + 1) * PANEL]
        panels[p, :, : len(some)] = some.T
    return panels


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Several matrices of one format one below the other; panels stay whole, so all but the last need N a multiple of 64."""
    first = matrices[0]
    shape = sum(len(each) for each in matrices), first.shape[1]
    planes = [np.concatenate(each) for each in zip(*(each.planes for each in matrices), strict=True)]
    return Matrix(first.form, shape, *planes)
