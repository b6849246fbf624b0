"""Programs of a card: the operations of nanokv/kernels/recording.py, by the same names and arguments, written as launches over
fixed memory, so that one function of a model describes its layers for both.

A program has as many rows as its arrays. Scratch memory is taken while it is written; running it allocates, copies and waits
for nothing, so a CUDA graph can hold it. Memory that has gaps between rows is named by views.

Symbols as in launches.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from nanokv.backend import Array
from nanokv.kernels.cuda import launches
from nanokv.kernels.cuda.launches import Device, PackedPlanes, Tables


@dataclass(frozen=True)
class Stored:
    """Where keys and values lie: `codec` is a number of nanokv.kernels.layout, `fixed` its one scale; planes [L, units, ...]
    of codes and perhaps of scales."""

    codec: int
    fixed: float
    k: Sequence[Array]
    v: Sequence[Array]


class Program:
    """A list of launches on `device`, to be written by its methods and then run as often as one likes."""

    def __init__(self, device: Device, xp: ModuleType, rows: int, stored: Stored, tables: Sequence[Tables]):
        """`tables[which]` are what attention looks up."""
        self._device, self._xp, self._rows, self._stored, self._tables = device, xp, rows, stored, tables
        self._lines: list[tuple[Any, ...]] = []
        self._scratch: dict[tuple[str, tuple[int, ...]], Array] = {}
        self._kept: list[PackedPlanes] = []  # matrices, whose planes launches know by their addresses

    def launch(self, *line: Any) -> None:
        """Writes a launch down: what launches.py asks of a device."""
        self._lines.append(line)

    def address(self, array: Array) -> int:
        return self._device.address(array)

    def __len__(self) -> int:
        return len(self._lines)

    def run(self) -> None:
        """Every launch, on the current stream."""
        for line in self._lines:
            self._device.launch(*line)

    def leave_out(self, places: Collection[int]) -> None:
        """Takes operations out of the list, those whose methods gave these places."""
        self._lines = [line for place, line in enumerate(self._lines) if place not in places]

    def linear(self, x: Array, matrix: PackedPlanes, bias: Array | None, out: Array, adds: bool = False) -> None:
        """x [R, K], bias [N] -> out [R, N], or added to it."""
        self._kept.append(matrix)
        to = self._room("sublayer", self._rows, matrix.shape[0]) if adds else out
        launches.linear(self, x, matrix, bias, to, self._room("sums", *launches.sums_shape(self._rows, matrix)))
        if adds:
            launches.add(self, out, to)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, heads: int = 1, stride: int | None = None) -> None:
        """x [R, K], or [R, H, K] with rows `stride` elements apart -> out, without gaps."""
        assert x.ndim == 2 or x.shape[1] == heads
        launches.rms_norm(self, x, weight, eps, out, stride)

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float, out: Array) -> None:
        """x, out [R, K]"""
        launches.layer_norm(self, x, weight, bias, eps, out)

    def gelu(self, x: Array, out: Array, width: int, by_erf: bool) -> None:
        """x, out [R, I]; by the error function, or by tanh."""
        (launches.gelu_erf if by_erf else launches.gelu_new)(self, self._cut(x, width), self._cut(out, width))

    def swiglu(self, gate_up: Array, out: Array, inner: int) -> None:
        """gate_up [R, 2 I] -> out [R, I]"""
        launches.swiglu(self, gate_up, self._cut(out, inner))

    def rotate(
        self, x: Array, heads: int, dim: int, cos: Array, sin: Array, adjacent: bool, out: Array, stride: int | None = None
    ) -> int:
        """x [R, H, D] with rows `stride` elements apart, cos, sin [R, D / 2] -> out [R, H, D]; its place in the list."""
        assert x.shape[1:] == (heads, dim)
        launches.rotate(self, x, cos, sin, adjacent, out, stride)
        return len(self._lines) - 1

    def embed(self, tokens: Array, matrix: PackedPlanes, places: Array | None, positions: Array, out: Array) -> None:
        """tokens [R] int32, a matrix [V, E] -> out [R, E]; plus the rows of `places` [., E] at positions [R]."""
        self._kept.append(matrix)
        launches.embed_rows(self, tokens, matrix, out)
        if places is not None:
            learned = self._room("sublayer", *out.shape)
            launches.embed(self, positions, places, positions, None, learned)
            launches.add(self, out, learned)

    def append(self, x: Array, heads: int, dim: int, slots: Array, layer: int, values: bool, stride: int | None = None) -> None:
        """x [R, H, D] with rows `stride` elements apart into the slots [R] of a layer, as keys or `values`."""
        assert x.shape[1:] == (heads, dim)
        stored = self._stored
        codes, scales = (*(plane[layer] for plane in (stored.v if values else stored.k)), None)[:2]
        launches.append(self, x, slots, stored.codec, codes, scales, stored.fixed, stride)

    def attend(
        self, q: Array, q_sinks: Array, shape: tuple[int, int, int], layer: int, which: int, scale: float, out: Array,
        strides: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """q, q_sinks [R, Hq, D], rows `strides` elements apart, over the tables `which` -> out [R, Hq, D]; `shape` is H, G, D.
        The tables say where a layer lies."""
        tables, (kv_heads, group, dim) = self._tables[which], shape
        stride = None if strides is None else strides[0]
        assert strides is None or strides[0] == strides[1]
        each = len(tables.tiles), tables.most, kv_heads * group
        partial = self._room("m", *each), self._room("l", *each), self._room("o", *each, dim)
        launches.attend(self, q, q_sinks, tables, kv_heads, self._stored.fixed, scale, out, partial, stride)

    def argmax(self, logits: Array, tokens: Array) -> None:
        """logits [R, V] -> tokens [R] int32"""
        launches.argmax(self, logits, tokens)

    def _cut(self, x: Array, width: int) -> Array:
        """The first R * width numbers of x as [R, width]."""
        return x.reshape(-1)[: self._rows * width].reshape(self._rows, width)

    def _room(self, name: str, *shape: int) -> Array:
        """Scratch memory, the same for all operations that ask for it by one name and shape: they follow each other."""
        if (name, shape) not in self._scratch:
            self._scratch[name, shape] = self._xp.empty(shape, dtype=np.float32)
        return self._scratch[name, shape]
