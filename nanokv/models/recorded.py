"""All layers of a model as one program of compiled kernels (nanokv/kernels/program.py), recorded once and run for every step.

A model says what it is made of by a function (params, program, room) that writes its operations; the room is memory for the
rows of a step, used again by every layer and every step. The bits are those of the same operations called one by one. The
same function writes the launches of a card (decode_step.py): program and room are then the card's.

Symbols: R rows, E width, Hq query heads, H key-value heads, D head width, I inner width, V vocabulary, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nanokv.backend import Array, address_of
from nanokv.compiled_attention import step_tables
from nanokv.kernels import layout
from nanokv.kernels.matrix import Matrix
from nanokv.kv.tile import Batch, Cache, members_of

if TYPE_CHECKING:
    from nanokv.kernels.recording import Program

LEAST_ROWS = 16
KEPT_ROWS = 1024  # a longer step makes its program anew, in some milliseconds, and gives the memory back
F, I = np.float32, np.int64  # noqa: E741


@dataclass(frozen=True)
class Sizes:
    """What a model's rooms are made for. `wide` and `inner`: what the two products of a feed-forward give and take;
    `turned`: whether queries and keys are rotated."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    wide: int
    inner: int
    turned: bool


@dataclass(frozen=True)
class Told:
    """What changes from step to step: ids and positions [R], `slots[layer]` [R] of the layer's storage, and cos and sin
    [R, D / 2] of rotations, and of those that meet the sinks."""

    tokens: Array
    positions: Array
    slots: Any  # an array for each layer
    cos: Array
    sin: Array
    sinks_cos: Array
    sinks_sin: Array


class Room:
    """Memory for at most `rows` rows, of the array library `xp`."""

    def __init__(self, rows: int, sizes: Sizes, told: Told, xp: ModuleType = np):
        def floats(*shape: int) -> Array:
            return xp.empty((rows, *shape), dtype=F)

        heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.dim
        self.rows, self.told, self._on_host = rows, told, xp is np
        self.layers, self.cached = sizes.layers, (kv_heads, dim)
        self.x, self.h = floats(sizes.width), floats(sizes.width)
        self.qkv, self.mixed = floats(heads + 2 * kv_heads, dim), floats(heads, dim)
        self.wide, self.inner = floats(sizes.wide), floats(sizes.inner)
        self.q, self.q_sinks, self.k, self.normed_k = (
            floats(each if sizes.turned else 0, dim) for each in (heads, heads, kv_heads, kv_heads)
        )
        parts = heads, heads + kv_heads
        self.parts = self._part(0, parts[0]), self._part(*parts), self._part(parts[1], None)  # queries, keys, values of qkv

    @classmethod
    def on_host(cls, rows: int, sizes: Sizes) -> "Room":
        """Host memory, in which what a step is told is written before each run."""
        angles = sizes.dim // 2 if sizes.turned else 0
        turns = (np.empty((rows, angles), F) for _ in range(4))
        return cls(rows, sizes, Told(np.zeros(rows, I), np.zeros(rows, I), np.zeros((sizes.layers, rows), I), *turns))

    def _part(self, first: int, stop: int | None) -> Any:
        """Some heads of `qkv`, as a program takes what has gaps: on the host by its address, else as a view."""
        view = self.qkv[:, first:stop]
        return address_of(view) if self._on_host else view


class Recorded:
    """A model's layers, for at most `rows` rows. `write_layers` (program, room) writes them, and gives the places of what only
    a cache of sinks needs."""

    def __init__(self, rows: int, sizes: Sizes, write_layers: Callable[["Program", Room], list[int]]):
        from nanokv.kernels.recording import Program

        program, self.rows, self.room = Program(), rows, Room.on_host(rows, sizes)
        self._twice = tuple(write_layers(program, self.room))
        self._program, self._lock = program.ready(), Lock()

    def run(
        self,
        tokens: np.ndarray,
        inside: np.ndarray,
        positions: np.ndarray,
        cache: Cache | Batch,
        turns: tuple[np.ndarray, ...] = (),
    ) -> np.ndarray | None:
        """The last layer's output [R, E] for ids and positions [R], those that the model is told `inside`; keys and values go
        into the cache. `turns`: cos and sin [R, 1, D / 2] and, where sinks are met by other queries, those of these. None,
        with nothing done, where the caches cannot be served by one program."""
        from numba import get_num_threads

        rows, told = len(tokens), self.room.told
        found = step_tables(cache, positions, len(turns) > 2, self.room.layers, self.room.cached)
        if found is None:
            return None
        tables, slots = found
        with self._lock:
            told.tokens[:rows], told.positions[:rows], told.slots[:, :rows] = tokens, inside, slots
            for to, turn in zip((told.cos, told.sin, told.sinks_cos, told.sinks_sin), turns, strict=False):
                to[:rows] = turn[:, 0]
            self._program.run(rows, get_num_threads(), tables, () if len(turns) > 2 else self._twice)
            hidden = self.room.x[:rows].copy()
        for one, _ in members_of(cache, rows):
            one.written()
        return hidden


class RecordedHead:
    """A model's last norm and its head, for at most `rows` rows. `write_norm` (program, x, out) writes the norm."""

    def __init__(self, rows: int, head: Matrix, write_norm: Callable[["Program", np.ndarray, np.ndarray], None]):
        from nanokv.kernels.recording import Program

        self.rows, self._outputs = rows, len(head)
        self._x, self._h = np.empty((rows, head.shape[1]), F), np.empty((rows, head.shape[1]), F)
        program, no_logits = Program(), np.empty((0, len(head)), F)
        write_norm(program, self._x, self._h)
        self._last = program.linear(self._h, head, None, no_logits)
        self._program, self._lock = program.ready(), Lock()

    def run(self, x: np.ndarray) -> np.ndarray:
        """[R, E] -> logits [R, V]"""
        from numba import get_num_threads

        logits = np.empty((len(x), self._outputs), F)
        with self._lock:
            self._x[: len(x)] = x
            self._program.point(self._last, layout.LINEAR_OUT, logits)
            self._program.run(len(x), get_num_threads())
        return logits


Made = TypeVar("Made", Recorded, RecordedHead)
Other = TypeVar("Other")


@dataclass(frozen=True)
class Recordable:
    """Parameters of a model that can be recorded; programs lie beside them, and a copy of them makes its own."""

    def recorded(self, rows: int, record: Callable[[Any, int], Made]) -> Made:
        """What `record` makes for that many rows, the one of before if it has room."""
        if rows > KEPT_ROWS:
            return record(self, rows)
        programs = self.__dict__.setdefault("_programs", {})
        found = programs.get(record)
        if found is None or found.rows < rows:
            found = programs[record] = record(self, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
        return found

    def beside(self, make: Callable[[], Other]) -> Other:
        """What `make` gave when it was first asked for these parameters."""
        programs = self.__dict__.setdefault("_programs", {})
        if make not in programs:
            programs[make] = make()
        found: Other = programs[make]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_programs"}


def can_record(table: Any) -> bool:
    """Whether a model whose embedding is `table` is packed in host memory."""
    return isinstance(table, Matrix)
