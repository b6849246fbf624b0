"""What nanokv.attention does with compiled kernels: tables of which rows fold which tiles, and one call for all of them.

Keys and values are read where they lie (nanokv/kv/pages.py); the arithmetic is nanokv/kernels/attention.py.

Symbols as in nanokv/attention.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from nanokv.backend import Array, module_of
from nanokv.errors import UsageError
from nanokv.kernels import layout
from nanokv.kv.pages import tile_line
from nanokv.kv.tile import TILE, Batch, Cache, Tiles, Visibility, members_of
from nanokv.numerics import compiled_kernels

if TYPE_CHECKING:
    from nanokv.kernels.recording import Tables


@dataclass(frozen=True)
class _Run:
    """Rows begin .. end - 1, which lie in one tile, and what they fold: lines and places as Pages gives them."""

    begin: int
    end: int
    visibility: Visibility
    lines: np.ndarray
    places: np.ndarray


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    positions: np.ndarray,
    cache: Cache | Batch,
    layer: int,
    scale: float | None,
    q_sinks: Array | None = None,
) -> Array:
    """nanokv.attention.cached_attention, all sequences in one call.

    `q_sinks` [R, Hq, D] meets the sinks in place of q, where a cache is streaming and has some.
    """
    groups: dict[tuple[int, float], list[_Run]] = {}
    cache.write(layer, k, v)
    for one, rows in members_of(cache, len(q)):
        for key, run in _runs_of(one, layer, rows.start, positions[rows], q_sinks is not None, k.shape[1:]):
            groups.setdefault(key, []).append(run)
    out = module_of(q).empty(q.shape, dtype=np.float32)
    for (unit_size, fixed), runs in groups.items():
        _fold(q, q if q_sinks is None else q_sinks, positions, runs, unit_size, k.shape[1], fixed, scale, out)
    return out


def _runs_of(
    one: Cache, layer: int, start: int, positions: np.ndarray, turned_twice: bool, shape: tuple[int, int]
) -> Iterator[tuple[tuple[int, float], _Run]]:
    """The runs of one sequence, whose rows begin at `start`, each with what those of one call have in common. A query that is
    `turned_twice` meets the sinks of a streaming cache apart. UsageError for a cache that is not for `shape`, H and D: its
    memory would be read past its end."""
    visibility = one.visibility(layer)
    for first, stop in _same_tile(positions):
        pages = one.pages(layer, int(positions[first]) // TILE)
        if pages.shape != shape:
            (cached, width), (heads, dim) = pages.shape, shape
            raise UsageError(
                f"the cache is for {cached} key-value heads of {width} numbers, the model has {heads} of {dim}: "
                "make it for this model's config"
            )
        lines, places = pages.table(), pages.places()
        if turned_twice and visibility.streaming and visibility.sinks:
            lines, places = _sinks_apart(lines, places, visibility.sinks)
        yield pages.key, _Run(first + start, stop + start, visibility, lines, places)


def step_tables(
    cache: Cache | Batch, positions: np.ndarray, turned_twice: bool, layers: int, shape: tuple[int, int]
) -> "tuple[Tables, np.ndarray] | None":
    """What attention and append look up in a step of all layers, and the slots [L, R] of its tokens; None where the caches
    have no place for that, or nothing in common: then layers go one by one, through cached_attention(). UsageError for a
    cache of another number of layers, or another `shape`, H and D."""
    from nanokv.kernels.recording import arranged

    members = list(members_of(cache, len(positions)))
    sources = [found for one, _ in members if (found := one.sources()) is not None]
    if len(sources) < len(members):
        return None
    for one, _ in members:
        if len(one.alike) != layers:
            raise UsageError(f"the cache has {len(one.alike)} layers, the model {layers}: make it for this model's config")
    which: dict[tuple[int, ...], int] = {}  # what tells groups of layers that see alike in all caches -> their number
    alike = [which.setdefault(each, len(which)) for each in zip(*(one.alike for one, _ in members), strict=True)]
    homes, slots = np.empty(len(positions), np.int64), np.empty((len(which), len(positions)), np.int64)
    groups: list[np.ndarray] = []
    every: list[_Run] = []
    owners: list[np.ndarray] = []
    keys, count = set(), 0
    for group in range(len(which)):
        runs, layer, source = [], alike.index(group), 0
        for (one, rows), own in zip(members, sources, strict=True):
            last_source = source + own.shape[1] - 1
            homes[rows], slots[group, rows] = last_source, one.step_slots(layer)
            for key, run in _runs_of(one, layer, rows.start, positions[rows], turned_twice, shape):
                keys.add(key)
                runs.append(run)
                in_full = run.lines[:, layout.CODEC] == layout.FLOAT32
                owners.append(np.where(in_full, last_source, source))
            source = last_source + 1
        groups.append(_run_table(runs, count))
        every += runs
        count = int(groups[-1][-1, layout.LAST])
    if len(keys) > 1:
        return None
    ((unit_size, fixed),) = keys
    tables = arranged(
        groups, alike, positions=positions, tiles=np.concatenate([run.lines for run in every]),
        sources=np.concatenate(sources, axis=1), which=np.concatenate(owners), homes=homes,
        units=np.concatenate([run.places for run in every]), unit_size=unit_size, fixed=fixed,
    )  # fmt: skip
    return tables, slots[alike]


def attend(
    q: np.ndarray,
    positions: np.ndarray,
    tiles: Tiles | Callable[[int], Sequence[Tiles]],
    scale: float | None,
    visibility: Visibility,
    q_sinks: np.ndarray | None = None,
) -> np.ndarray:
    """nanokv.attention.attend."""
    out = np.empty(q.shape, dtype=np.float32)
    kept, runs = [], []
    for begin, end in _same_tile(positions):
        last = int(positions[begin]) // TILE
        lines = []
        for each in [tiles] if isinstance(tiles, Tiles) else tiles(last):
            some = min(len(each.k), last + 1 - each.first)
            k, v = (np.ascontiguousarray(a[:some], dtype=np.float32) for a in (each.k, each.v))
            kept.append((k, v))  # what the lines point at
            lines += [tile_line(each.first + i, k[i], v[i]) for i in range(some)]
        table, places = np.array(lines), np.zeros((len(lines), 1), np.int64)
        if q_sinks is not None:
            table, places = _sinks_apart(table, places, visibility.sinks)
        runs.append(_Run(begin, end, visibility, table, places))
    if runs:
        _fold(q, q if q_sinks is None else q_sinks, positions, runs, TILE, kept[0][0].shape[2], 1.0, scale, out)
    return out


def _same_tile(positions: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ascending positions [R] -> the first row and the one past the last of each tile that they lie in."""
    if len(positions) == 1:
        yield 0, 1
    elif len(positions):
        last = positions // TILE
        yield from pairwise([0, *(np.flatnonzero(last[1:] != last[:-1]) + 1).tolist(), len(positions)])


def _sinks_apart(lines: np.ndarray, places: np.ndarray, sinks: int) -> tuple[np.ndarray, np.ndarray]:
    """The tiles that hold sinks once more, first, for the other query and for the sinks alone; all for the rest."""
    count = int((lines[:, layout.NUMBER] * TILE < sinks).sum())  # they come first
    both = np.concatenate([lines[:count], lines])
    both[:count, [layout.QUERY, layout.HIGH]] = 1, sinks
    both[count:, layout.LOW] = sinks
    return both, np.concatenate([places[:count], places])


def _run_table(runs: Sequence[_Run], first: int = 0) -> np.ndarray:
    """layout.py's columns of runs whose tiles are listed one run after the other, from `first` on."""
    table = np.empty((len(runs), layout.RUN_COLUMNS), np.int64)
    for i, run in enumerate(runs):
        last = first + len(run.lines)
        table[i] = run.begin, run.end, first, last, run.visibility.window or 0, run.visibility.sinks
        first = last
    return table


def _fold(
    q: Array,
    q_sinks: Array,
    positions: np.ndarray,
    runs: Sequence[_Run],
    unit_size: int,
    kv_heads: int,
    fixed: float,
    scale: float | None,
    out: Array,
) -> None:
    lines, places = (
        (runs[0].lines, runs[0].places)
        if len(runs) == 1
        else (np.concatenate([run.lines for run in runs]), np.concatenate([run.places for run in runs]))
    )
    scale = q.shape[2] ** -0.5 if scale is None else scale
    table = _run_table(runs)
    compiled_kernels(q).attend(q, q_sinks, positions, table, lines, places, unit_size, kv_heads, fixed, scale, out)
