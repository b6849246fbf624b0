"""Attention over tiles read where they lie: blocks through their table, any KV format, all sequences of a step at once.

The order is docs/numerics.md's. A tile's keys of one head are decoded into a panel [D, 128], its values into [128, D'], D'
being D filled up to a multiple of 64; so scores and weighted values are products like any other. A few queries (decoding)
share the work by tiles, each task taking one tile of one sequence with all heads, so that every block streams through
memory once; many queries (a prefill) by heads and blocks of rows. Both give the same bits.

Symbols: R rows, Hq query heads, H key-value heads, G = Hq / H, D head width, T = 128 keys a tile, N tiles listed.
"""

from typing import Any

import numpy as np
from numba import prange

from nanokv.kernels.compiling import jit
from nanokv.kernels.decoding import decode_row
from nanokv.kernels.functions import LOWEST, F, combine_lanes, exp
from nanokv.kernels.layout import (
    BEGIN,
    CODEC,
    END,
    FIRST,
    FLOAT32,
    HIGH,
    KEYS,
    LAST,
    LOW,
    NUMBER,
    QUERY,
    SINKS,
    TILE,
    VALUES,
    WINDOW,
)  # fmt: skip
from nanokv.kernels.linear import SEGMENT
from nanokv.kernels.simd import add, first, fma1, load, product, splat, store, sub, transpose

_six, _one, _one_on = product(6, 4), product(1, 4), product(1, 4, continues=True)


@jit()
def _times(x: Any, x_row: Any, rows: Any, w: Any, w_row: Any, count: Any, width: Any, out: Any, out_row: Any) -> None:
    """out [rows, width] += x [rows, count] times w [count, width] by the product rule; width is a multiple of 64."""
    for column in range(0, width, 64):
        for k in range(0, count, SEGMENT):
            some, r = min(SEGMENT, count - k), 0
            weights = w + (k * w_row + column) * 4
            while r < rows:
                here, to = x + (r * x_row + k) * 4, out + (r * out_row + column) * 4
                if r + 6 <= rows:
                    _six(here, x_row, weights, w_row, some, to, out_row)
                    r += 6
                else:
                    _one(here, x_row, weights, w_row, some, to, out_row)
                    r += 1


@jit()
def _load_keys(
    tile: Any, units: Any, unit_size: Any, fixed: Any, h: Any, heads: Any, dim: Any, count: Any, rows: Any, keys: Any
) -> None:
    """The first `count` keys of head h of a tile -> keys [D'', 128], one a column; D'' is D filled up to a multiple of 16.

    rows [16, D''] is where sixteen keys are decoded before they are turned; float32 in blocks of 16 or more needs no decoding.
    """
    width, to = rows.shape[1], keys.ctypes.data
    for t in range(0, count, 16):
        source, step = rows.ctypes.data, width
        if tile[CODEC] == FLOAT32 and width == dim and unit_size >= 16:
            slot = units[t // unit_size] * unit_size + t % unit_size
            source, step = tile[KEYS] + (slot * heads + h) * dim * 4, heads * dim
        else:
            for i in range(min(16, count - t)):
                slot = units[(t + i) // unit_size] * unit_size + (t + i) % unit_size
                decode_row(tile[CODEC], fixed, tile[KEYS:VALUES], True, slot, h, heads, dim, source + i * width * 4)
        for d in range(0, width, 16):
            transpose(source + d * 4, step, to + (d * TILE + t) * 4, TILE)


@jit()
def _load_values(
    tile: Any, units: Any, unit_size: Any, fixed: Any, h: Any, heads: Any, dim: Any, count: Any, values: Any
) -> None:
    """The first `count` values of head h of a tile -> values [128, D']."""
    for t in range(count):
        slot = units[t // unit_size] * unit_size + t % unit_size
        to = values.ctypes.data + t * values.shape[1] * 4
        decode_row(tile[CODEC], fixed, tile[VALUES:QUERY], False, slot, h, heads, dim, to)


@jit()
def _values_in_place(
    weights: Any, tile: Any, units: Any, unit_size: Any, h: Any, heads: Any, dim: Any, count: Any, chain: Any, o: Any
) -> None:
    """o [rows, D] = weights [rows, 128] times the values of head h, float32, read from their blocks; D is a multiple of 64."""
    o[:] = F(0)
    step = heads * dim
    for r in range(len(o)):
        for k in range(0, count, SEGMENT):
            chain[:] = F(0)
            end, t = min(k + SEGMENT, count), k
            while t < end:
                some = min(unit_size - t % unit_size, end - t)
                slot = units[t // unit_size] * unit_size + t % unit_size
                source = tile[VALUES] + (slot * heads + h) * dim * 4
                for column in range(0, dim, 64):
                    _one_on(
                        weights[r].ctypes.data + t * 4,
                        TILE,
                        source + column * 4,
                        step,
                        some,
                        chain.ctypes.data + column * 4,
                        dim,
                    )
                t += some
            for d in range(dim):
                o[r, d] += chain[d]


@jit()
def _weigh(scores: Any, tile: Any, count: Any, position: Any, window: Any, sinks: Any) -> Any:
    """A row of scores [128] of a tile's keys becomes weights in place -> m, l."""
    start = tile[NUMBER] * TILE
    inside = start >= tile[LOW] and start + count <= tile[HIGH] and (window == 0 or position - start < window)
    if not inside or start + count - 1 > position:
        for t in range(count):
            key = start + t
            gone = window > 0 and position - key >= window and key >= sinks
            if key > position or gone or key < tile[LOW] or key >= tile[HIGH]:
                scores[t] = F(-np.inf)
    for t in range(count, TILE):
        scores[t] = F(-np.inf)
    m = LOWEST
    for t in range(count):
        if scores[t] > m:
            m = scores[t]
    at, top = scores.ctypes.data, splat(m)
    for t in range(0, TILE, 16):
        store(at, t, exp(sub(load(at, t), top)))
    a, b = add(load(at, 0), load(at, 64)), add(load(at, 16), load(at, 80))
    c, d = add(load(at, 32), load(at, 96)), add(load(at, 48), load(at, 112))
    return m, first(combine_lanes(a, b, c, d))


@jit()
def _score(
    query: Any,
    group: Any,
    positions: Any,
    run: Any,
    tile: Any,
    count: Any,
    keys: Any,
    scores: Any,
    m: Any,
    l: Any,  # noqa: E741
) -> None:
    """One tile's m, l [R G] and, in scores [R G, 128], weights, for query [R G, D]: G heads of each row of `positions`."""
    rows, dim = query.shape
    scores[:] = F(0)
    _times(query.ctypes.data, dim, rows, keys.ctypes.data, TILE, dim, TILE if count > 64 else 64, scores.ctypes.data, TILE)
    for r in range(rows):
        m[r], l[r] = _weigh(scores[r], tile, count, positions[r // group], run[WINDOW], run[SINKS])


@jit()
def _sum_values(weights: Any, count: Any, values: Any, o: Any) -> None:
    """o [R G, D'] = weights [R G, 128] times values [128, D']."""
    o[:] = F(0)
    wide = values.shape[1]
    _times(weights.ctypes.data, TILE, len(o), values.ctypes.data, wide, count, wide, o.ctypes.data, wide)
    for r in range(len(o)):
        _silence(weights[r], values, count, o[r])


@jit()
def _finite(o: Any) -> Any:
    total = F(0)
    for r in range(len(o)):
        for d in range(o.shape[1]):
            total += o[r, d] * F(0)
    return total == F(0)


@jit()
def _silence(weights: Any, values: Any, count: Any, o: Any) -> None:
    """Zero times a value that is not finite is NaN, but a key that weighs nothing must not show: where a sum is not finite it
    is made again without those keys. (Where it is finite, leaving them out changes nothing.)"""
    for d in range(len(o)):
        if not np.isfinite(o[d]):
            total = F(0)
            for k in range(0, count, SEGMENT):
                chain = F(0)
                for t in range(k, min(k + SEGMENT, count)):
                    if weights[t] != F(0):
                        chain = fma1(weights[t], values[t, d], chain)
                total += chain
            o[d] = total


@jit()
def _exp1(x: Any) -> Any:
    return first(exp(splat(x)))


@jit()
def _combine(m: Any, l: Any, o: Any, m2: Any, l2: Any, o2: Any) -> Any:  # noqa: E741
    """The partial result (m, l, o [D']) followed by another -> m, l; o in place."""
    top = max(m, m2)
    old, new = _exp1(m - top), _exp1(m2 - top)
    for d in range(len(o)):
        o[d] = fma1(o[d], old, o2[d] * new)
    return top, fma1(l, old, l2 * new)


@jit()
def _finish(l: Any, o: Any, out: Any) -> None:  # noqa: E741
    for d in range(len(out)):
        out[d] = F(0) if l == F(0) else o[d] / l


@jit()
def _seen(tile: Any, positions: Any) -> Any:
    """How many of a tile's keys the last of `positions` may see."""
    return min(TILE, positions[len(positions) - 1] + 1 - tile[NUMBER] * TILE)


@jit()
def _queries(q: Any, h: Any, group: Any, scale: Any, out: Any) -> None:
    """q [R, Hq, D] -> out [R G, D]: the scaled queries of key-value head h."""
    for r in range(len(q)):
        for g in range(group):
            for d in range(q.shape[2]):
                out[r * group + g, d] = q[r, h * group + g, d] * scale


@jit(parallel=True)
def attend_few(
    q: Any,
    q_sinks: Any,
    runs: Any,
    positions: Any,
    tiles: Any,
    units: Any,
    unit_size: Any,
    heads: Any,
    fixed: Any,
    scale: Any,
    out: Any,
) -> None:
    """Runs of at most FEW rows, by tiles. q, q_sinks, out [R, Hq, D], positions [R], runs and tiles as in layout.py, the units
    of each tile [N, 128 / unit_size]."""
    group, dim = q.shape[1] // heads, q.shape[2]
    wide, width = (dim + 63) // 64 * 64, (dim + 15) // 16 * 16
    lines = 0
    owner = np.full(len(tiles), -1, np.int64)  # the run of each tile; some may belong to runs that are not given
    for n in range(len(runs)):
        owner[runs[n, FIRST] : runs[n, LAST]] = n
        lines = max(lines, (runs[n, END] - runs[n, BEGIN]) * group)
    m, l = np.empty((len(tiles), heads, lines), np.float32), np.empty((len(tiles), heads, lines), np.float32)  # noqa: E741
    o = np.empty((len(tiles), heads, lines, wide), np.float32)
    listed = np.flatnonzero(owner >= 0)
    for task in prange(len(listed)):
        at = listed[task]
        run = runs[owner[at]]
        here, where = q[run[BEGIN] : run[END]], positions[run[BEGIN] : run[END]]
        rows, count = len(here) * group, _seen(tiles[at], where)
        query, scores = np.empty((rows, dim), np.float32), np.empty((rows, TILE), np.float32)
        keys, values = np.empty((width, TILE), np.float32), np.zeros((TILE, wide), np.float32)
        decoded, chain = np.zeros((16, width), np.float32), np.empty(dim, np.float32)
        for h in range(heads):
            _queries(here if tiles[at, QUERY] == 0 else q_sinks[run[BEGIN] : run[END]], h, group, scale, query)
            _load_keys(tiles[at], units[at], unit_size, fixed, h, heads, dim, count, decoded, keys)
            _score(query, group, where, run, tiles[at], count, keys, scores, m[at, h, :rows], l[at, h, :rows])
            sums, done = o[at, h, :rows], False
            if tiles[at, CODEC] == FLOAT32 and dim == wide:
                _values_in_place(scores, tiles[at], units[at], unit_size, h, heads, dim, count, chain, sums)
                done = _finite(sums)
            if not done:
                _load_values(tiles[at], units[at], unit_size, fixed, h, heads, dim, count, values)
                _sum_values(scores, count, values, sums)
    for task in prange(len(runs) * heads):
        run, h = runs[task // heads], task % heads
        for line in range((run[END] - run[BEGIN]) * group):
            top, total, value = m[run[FIRST], h, line], l[run[FIRST], h, line], o[run[FIRST], h, line]
            for at in range(run[FIRST] + 1, run[LAST]):
                top, total = _combine(top, total, value, m[at, h, line], l[at, h, line], o[at, h, line])
            _finish(total, value, out[run[BEGIN] + line // group, h * group + line % group])


@jit(parallel=True)
def attend_many(
    q: Any,
    q_sinks: Any,
    runs: Any,
    positions: Any,
    tiles: Any,
    units: Any,
    unit_size: Any,
    heads: Any,
    fixed: Any,
    scale: Any,
    out: Any,
) -> None:
    """Runs of any number of rows, by runs and heads. Arguments as attend_few's."""
    group, dim = q.shape[1] // heads, q.shape[2]
    wide, width = (dim + 63) // 64 * 64, (dim + 15) // 16 * 16
    for task in prange(len(runs) * heads):
        run, h = runs[task // heads], task % heads
        here, where = q[run[BEGIN] : run[END]], positions[run[BEGIN] : run[END]]
        rows = len(here) * group
        query, scores = np.empty((rows, dim), np.float32), np.empty((rows, TILE), np.float32)
        keys, values = np.empty((width, TILE), np.float32), np.zeros((TILE, wide), np.float32)
        decoded = np.zeros((16, width), np.float32)
        m, l, o = np.empty((2, rows), np.float32), np.empty((2, rows), np.float32), np.empty((2, rows, wide), np.float32)  # noqa: E741
        for at in range(run[FIRST], run[LAST]):
            if at == run[FIRST] or tiles[at, QUERY] != tiles[at - 1, QUERY]:
                _queries(here if tiles[at, QUERY] == 0 else q_sinks[run[BEGIN] : run[END]], h, group, scale, query)
            count = _seen(tiles[at], where)
            _load_keys(tiles[at], units[at], unit_size, fixed, h, heads, dim, count, decoded, keys)
            _load_values(tiles[at], units[at], unit_size, fixed, h, heads, dim, count, values)
            which = 0 if at == run[FIRST] else 1
            _score(query, group, where, run, tiles[at], count, keys, scores, m[which], l[which])
            _sum_values(scores, count, values, o[which])
            if which:
                for r in range(rows):
                    m[0, r], l[0, r] = _combine(m[0, r], l[0, r], o[0, r], m[1, r], l[1, r], o[1, r])
        for r in range(rows):
            _finish(l[0, r], o[0, r], out[run[BEGIN] + r // group, h * group + r % group])
