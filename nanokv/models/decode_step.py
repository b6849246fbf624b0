"""One decoded token for each of B sequences as launches over fixed memory: what a CUDA graph can hold.

    step = params.beside(Steps).run(params, tokens, cache)   # None where only forward() can serve
    step.logits, step.chosen                                 # [B, V] and [B], on the card, until the next run
    cache.commit()

A run makes blocks and tables on the host, sends them in one copy, and launches: kernel by kernel, from the second time on as
one graph.

What changes from step to step (tokens, positions, block tables) the launches read from the card's memory, so a graph that was
captured once serves every step of up to B sequences and so many tiles each. The launches are those that the model describes
for the processor too (write_layers), and the bits are forward()'s. Rows that no sequence has are computed and looked at by
nobody.

Symbols: B sequences, D head width, N tiles of the list, T = 128 keys a tile.
"""

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from nanokv.backend import Array, module_of
from nanokv.errors import CapacityError, UsageError
from nanokv.kernels import layout
from nanokv.kernels.cuda.card import Card
from nanokv.kernels.cuda.launches import WIDEST_HEAD, Tables
from nanokv.kernels.cuda.recording import Program, Stored
from nanokv.kv.codec import codec_number
from nanokv.kv.pages import sources_of
from nanokv.kv.storage import Storage
from nanokv.kv.tile import TILE, Batch, Cache, Visibility, members_of
from nanokv.models.families import Params, module_for
from nanokv.models.llama import LlamaParams, check_visibility
from nanokv.models.recorded import Room, Told
from nanokv.models.tokens import check_positions, check_tokens

LEAST_TILES = 8
F, I = np.float32, np.int32  # noqa: E741


class _Sent:
    """Arrays of fixed shapes that go to the card together: written on the host, sent by one copy."""

    def __init__(self, xp: ModuleType, **shapes: tuple[tuple[int, ...], Any]):
        sizes = [-(-int(np.prod(shape)) * np.dtype(kind).itemsize // 16) * 16 for shape, kind in shapes.values()]
        self._host, self._there = np.zeros(sum(sizes), np.uint8), xp.zeros(sum(sizes), dtype=np.uint8)
        self.host: dict[str, np.ndarray] = {}
        self.there: dict[str, Array] = {}
        start = 0
        for (name, (shape, kind)), size in zip(shapes.items(), sizes, strict=True):
            stop = start + int(np.prod(shape)) * np.dtype(kind).itemsize
            self.host[name] = self._host[start:stop].view(kind).reshape(shape)
            self.there[name] = self._there[start:stop].view(kind).reshape(shape)
            start += size

    def send(self) -> None:
        self._there.set(self._host)


def obstacle(cache: Cache) -> str | None:
    """Why no fixed step can work on a sequence, if none can."""
    if cache.storage is None:
        return "keys and values that lie in one memory, encoded token by token"
    if len(set(cache.alike)) > 1 or cache.visibility(0).streaming:
        return "layers that all see alike and count absolute positions"
    return None


def tiles_seen(visibility: Visibility, tokens: int) -> int:
    """Tiles that the queries of a sequence of `tokens` tokens fold, at most."""
    tiles = -(-tokens // TILE)
    if visibility.window is None:
        return tiles
    return min(tiles, -(-visibility.sinks // TILE) + (visibility.window + TILE - 2) // TILE + 1)


class DecodeStep:
    """For at most `batch` sequences of at most `most_tokens` tokens (whatever their number, where a window bounds what is seen)
    that lie where `cache` does. See the module; UsageError where there is an obstacle()."""

    def __init__(self, params: Params, cache: Cache, batch: int, most_tokens: int):
        storage, needed = cache.storage, obstacle(cache)
        if storage is None or needed:
            raise UsageError(f"a fixed step needs {needed}")
        config, family, xp = params.config, module_for(params), module_of(storage.k[0])
        self._xp, self._visibility, self._positions = xp, cache.visibility(0), config.num_positions
        self.batch, self.tiles = batch, tiles_seen(self._visibility, most_tokens)
        self._rope = getattr(config, "rope", None)
        count, row, half = batch * self.tiles, ((batch,), I), ((batch, config.head_dim // 2), F)
        self._sent = _Sent(
            xp, tokens=row, positions=row, slots=row, run_of=row, runs=((batch, layout.RUN_COLUMNS), np.int64), cos=half,
            sin=half, tiles=((count, 5), I), units=((count, TILE // storage.unit_size), I), owner=((count,), I),
        )  # fmt: skip
        there = self._sent.there
        stored = Stored(codec_number(storage.codec), storage.fixed, storage.k, storage.v)
        sources, nothing = xp.asarray(sources_of(storage)[:, None]), xp.empty((0, 2), dtype=I)
        tables = [
            Tables(
                there["positions"], there["runs"], there["tiles"], each, there["units"], there["owner"], there["run_of"],
                nothing, storage.unit_size, 1,
            )
            for each in map(sources.__getitem__, range(config.num_layers))
        ]  # fmt: skip
        program, turns = Program(Card(xp), xp, batch, stored, tables), (there["cos"], there["sin"])
        told = Told(there["tokens"], there["positions"], [there["slots"]] * config.num_layers, *turns, *turns)
        room = Room(batch, family.sizes(config), told, xp)
        program.leave_out(family.write_layers(params, program, room))
        self.logits, self.chosen = xp.empty((batch, config.vocab_size), dtype=F), xp.empty((batch,), dtype=I)
        family.write_norm(params, program, room.x, room.h)
        program.linear(room.h, params.head, None, self.logits)
        program.argmax(self.logits, self.chosen)
        self._program, self.runs = program, 0
        self._graph: Any = None

    def run(self, caches: Sequence[Cache], tokens: Sequence[int]) -> None:
        """prepare() and launch(); what the caches then hold counts when they are committed."""
        self.prepare(caches, tokens)
        self.launch()

    def prepare(self, caches: Sequence[Cache], tokens: Sequence[int]) -> None:
        """Room for one token in each cache, and all that the kernels look up, sent in one copy. CapacityError, before
        anything is changed, for too many sequences, one that sees too many tiles, and past the model's positions."""
        lengths = [cache.length for cache in caches]
        check_positions(np.array(lengths), self._positions)
        if len(caches) > self.batch or tiles_seen(self._visibility, max(lengths) + 1) > self.tiles:
            raise CapacityError(f"this step was made for {self.batch} sequences of {self.tiles} tiles: make a larger one")
        host, seen, at = self._sent.host, self._visibility, 0
        for name, nothing in (("tokens", 0), ("positions", 0), ("slots", -1), ("run_of", -1), ("owner", -1)):
            host[name][:] = nothing
        for b, (cache, token) in enumerate(zip(caches, tokens, strict=True)):
            position = int(cache.extend(1)[0])
            pages = cache.pages(0, position // TILE)
            stop = at + len(pages.numbers)
            host["tokens"][b], host["positions"][b], host["run_of"][b] = token, position, b
            host["slots"][b] = cache.step_slots(0)[0]
            host["runs"][b] = b, b + 1, at, stop, seen.window or 0, seen.sinks
            host["tiles"][at:stop] = 0
            host["tiles"][at:stop, 0], host["tiles"][at:stop, 4] = pages.numbers, np.iinfo(I).max
            host["units"][at:stop], host["owner"][at:stop], at = pages.units, b, stop
        if self._rope is not None:
            turn = self._rope.tables(host["positions"].astype(np.int64), like=host["cos"])
            host["cos"][:], host["sin"][:] = (each[:, 0] for each in turn)
        self._sent.send()

    def launch(self) -> None:
        """The launches, by the graph where one was captured."""
        if self._graph is None:
            self._program.run()
        else:
            self._graph.launch()
        self.runs += 1

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def capture(self) -> None:
        """From now on launch() launches one graph. Kernels must have been loaded: launch() once before."""
        with self._xp.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                self._program.run()
            finally:  # whatever happens, the stream must not stay in the middle of a capture
                graph = stream.end_capture()
        self._graph = graph


class Steps:
    """A model's fixed steps: of each memory that sequences lie in one for each size of a batch, sizes being powers of two. They
    go with that memory."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Storage, dict[int, DecodeStep]] = WeakKeyDictionary()
        self._graphs = True

    def run(self, params: Params, tokens: Sequence[int] | np.ndarray, cache: Cache | Batch) -> DecodeStep | None:
        """The step that has computed these tokens, one for each sequence, as forward() up to the commit. None, with nothing
        done, where it cannot: more tokens of one sequence, caches apart, layers that see differently, a tile kept apart."""
        members = list(members_of(cache, len(tokens)))
        found, storage = [one for one, _ in members], members[0][0].storage
        if any(rows.stop - rows.start != 1 or one.storage is not storage or obstacle(one) for one, rows in members):
            return None
        if storage is None or params.config.head_dim > WIDEST_HEAD:
            return None
        ids = check_tokens(np.asarray(tokens), params.config.vocab_size).tolist()
        if isinstance(params, LlamaParams):
            check_visibility(params.config, cache, len(ids))
        step = self._find(params, storage, found)
        if self._graphs and step.runs and not step.captured:
            self._capture(step)
        step.run(found, ids)
        return step

    def _find(self, params: Params, storage: Storage, caches: Sequence[Cache]) -> DecodeStep:
        batch, longest = 1 << (len(caches) - 1).bit_length(), max(cache.length for cache in caches) + 1
        made = self._made.setdefault(storage, {})
        step, needed = made.get(batch), tiles_seen(caches[0].visibility(0), longest)
        if step is None or step.tiles < needed:
            tiles = max(LEAST_TILES, 1 << (needed - 1).bit_length())
            step = made[batch] = DecodeStep(params, caches[0], batch, tiles * TILE)
        return step

    def _capture(self, step: DecodeStep) -> None:
        try:
            step.capture()
        except Exception as error:  # CuPy promises no type; the launches themselves do the same work
            self._graphs = False
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logging.getLogger("nanokv").warning("no CUDA graph (%s): a decoded token is launched kernel by kernel", reason)
