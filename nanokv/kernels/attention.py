"""Attention over tiles read where they lie: blocks through their table, any KV format, all sequences of a step at once.

The order is docs/numerics.md's. A tile's keys of one head are decoded into a panel [D, 128], its values into [128, D'], D'
being D filled up to a multiple of 64; so scores and weighted values are products like any other. A few queries (decoding)
share the work by tiles, each task taking one tile of one sequence with all heads, so that every block streams through
memory once; many queries (a prefill) by heads and blocks of rows. Both give the same bits.

Symbols: R rows, Hq query heads, H key-value heads, G = Hq / H, D head width, T = 128 keys a tile, N tiles listed.
"""

from typing import Any

import numpy as np

from nanokv.kernels import layout as at
from nanokv.kernels.compiling import inner
from nanokv.kernels.decoding import decode_row
from nanokv.kernels.functions import LOWEST, F, combine_lanes, exp
from nanokv.kernels.layout import BEGIN, END, FIRST, FLOAT32, HIGH, LAST, LOW, NUMBER, QUERY, SINKS, TILE, WINDOW
from nanokv.kernels.linear import LEAST_TASKS, SEGMENT
from nanokv.kernels.simd import (
    add,
    first,
    float32_of_bits,
    fma1,
    integers,
    load,
    matrix,
    number,
    prefetch,
    product,
    splat,
    store,
    sub,
    table,
    transpose,
    vector,
)

_six, _two, _one, _one_on = product(6, 4), product(2, 4), product(1, 4), product(1, 4, continues=True)


@inner()
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
                elif r + 2 <= rows:
                    _two(here, x_row, weights, w_row, some, to, out_row)
                    r += 2
                else:
                    _one(here, x_row, weights, w_row, some, to, out_row)
                    r += 1


@inner()
def _load_keys(
    codec: Any, planes: Any, units: Any, unit_size: Any, fixed: Any, h: Any, heads: Any, dim: Any, count: Any, rows: Any,
    keys: Any,
) -> None:  # fmt: skip
    """The first `count` keys of head h of a tile -> keys [D'', 128], one a column; D'' is D filled up to a multiple of 16.

    rows [16, D''] is where sixteen keys are decoded before they are turned; float32 in blocks of 16 or more needs no decoding.
    """
    width, to = rows.shape[1], keys.ctypes.data
    for t in range(0, count, 16):
        source, step = rows.ctypes.data, width
        if codec == FLOAT32 and width == dim and unit_size >= 16:
            slot = units[t // unit_size] * unit_size + t % unit_size
            source, step = planes[0] + (slot * heads + h) * dim * 4, heads * dim
        else:
            for i in range(min(16, count - t)):
                slot = units[(t + i) // unit_size] * unit_size + (t + i) % unit_size
                decode_row(codec, fixed, planes, True, slot, h, heads, dim, source + i * width * 4)
        for d in range(0, width, 16):
            transpose(source + d * 4, step, to + (d * TILE + t) * 4, TILE)


@inner()
def _load_values(
    codec: Any, planes: Any, units: Any, unit_size: Any, fixed: Any, h: Any, heads: Any, dim: Any, count: Any, values: Any
) -> None:
    """The first `count` values of head h of a tile -> values [128, D']."""
    for t in range(count):
        slot = units[t // unit_size] * unit_size + t % unit_size
        to = values.ctypes.data + t * values.shape[1] * 4
        decode_row(codec, fixed, planes, False, slot, h, heads, dim, to)
        values[t, dim:] = F(0)


@inner()
def _values_in_place(
    weights: Any, base: Any, units: Any, unit_size: Any, h: Any, heads: Any, dim: Any, count: Any, chain: Any, o: Any
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
                source = base + (slot * heads + h) * dim * 4
                for column in range(0, dim, 64):
                    _one_on(
                        weights.ctypes.data + (r * TILE + t) * 4,
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


@inner()
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


@inner()
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


@inner()
def _sum_values(weights: Any, count: Any, values: Any, o: Any) -> None:
    """o [R G, D'] = weights [R G, 128] times values [128, D']."""
    o[:] = F(0)
    wide = values.shape[1]
    _times(weights.ctypes.data, TILE, len(o), values.ctypes.data, wide, count, wide, o.ctypes.data, wide)
    for r in range(len(o)):
        _silence(weights[r], values, count, o[r])


@inner()
def _finite(o: Any) -> Any:
    total = F(0)
    for r in range(len(o)):
        for d in range(o.shape[1]):
            total += o[r, d] * F(0)
    return total == F(0)


@inner()
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


@inner()
def _exp1(x: Any) -> Any:
    return first(exp(splat(x)))


@inner()
def _combine(m: Any, l: Any, o: Any, m2: Any, l2: Any, o2: Any) -> Any:  # noqa: E741
    """The partial result (m, l, o [D']) followed by another -> m, l; o in place."""
    top = max(m, m2)
    old, new = _exp1(m - top), _exp1(m2 - top)
    for d in range(len(o)):
        o[d] = fma1(o[d], old, o2[d] * new)
    return top, fma1(l, old, l2 * new)


@inner()
def _finish(l: Any, o: Any, out: Any) -> None:  # noqa: E741
    for d in range(len(out)):
        out[d] = F(0) if l == F(0) else o[d] / l


@inner()
def _seen(tile: Any, positions: Any) -> Any:
    """How many of a tile's keys the last of `positions` may see."""
    return min(TILE, positions[len(positions) - 1] + 1 - tile[NUMBER] * TILE)


@inner()
def _queries(q: Any, stride: Any, begin: Any, rows: Any, h: Any, group: Any, scale: Any, out: Any) -> None:
    """The scaled queries of key-value head h in rows begin .. of q, `stride` apart -> out [R G, D]."""
    dim = out.shape[1]
    for r in range(rows):
        for g in range(group):
            one = vector(q + ((begin + r) * stride + (h * group + g) * dim) * 4, dim)
            for d in range(dim):
                out[r * group + g, d] = one[d] * scale


@inner()
def _ask_for(base: Any, units: Any, unit_size: Any, h: Any, heads: Any, dim: Any, count: Any) -> None:
    """Asks the memory for head h of a tile's first `count` tokens, float32."""
    for t in range(count):
        slot = units[t // unit_size] * unit_size + t % unit_size
        at = base + (slot * heads + h) * dim * 4
        for byte in range(0, dim * 4, 64):
            prefetch(at + byte)


@inner()
def _rounded(dim: Any, to: Any) -> Any:
    return (dim + to - 1) // to * to


def attention_words(lines: int, dim: int) -> int:
    """float32 numbers of scratch that a task needs for that many rows times heads of a group."""
    wide, width = -(-dim // 64) * 64, -(-dim // 16) * 16
    return lines * (dim + TILE + 4 + 2 * wide) + width * (TILE + 16) + TILE * wide + dim + 16 * 9


@inner()
def _cut(scratch: Any, rows: Any, columns: Any) -> Any:
    """A part of the scratch memory [rows, columns] -> where the rest begins, and the part."""
    return scratch + _rounded(rows * columns, 16) * 4, matrix(scratch, rows, columns)


@inner()
def parts_of(tiles: Any, heads: Any) -> Any:
    """Tasks that share one tile's heads: one, so that a tile streams through memory, where there are tiles enough."""
    return max(1, min(heads, LEAST_TASKS // max(1, tiles)))


@inner()
def _memory(op: Any, b: Any) -> Any:
    """Where an operation's keys and values lie: sources [S, 7] (codec and planes) of its layer, which [N] of them a tile lies
    in, units [N, 128 / unit_size], unit_size and fp8's scale."""
    sources = table(b[at.SOURCES] + op[6] * b[at.NUM_SOURCES] * 7 * 8, b[at.NUM_SOURCES], 7)
    units = table(b[at.UNITS], b[at.NUM_TILES], TILE // b[at.UNIT_SIZE])
    return sources, integers(b[at.WHICH], b[at.NUM_TILES]), units, b[at.UNIT_SIZE], float32_of_bits(b[at.FIXED])


@inner()
def _tiles_and_runs(b: Any) -> Any:
    """tiles, runs (layout.py) and positions [R]"""
    tiles, runs = table(b[at.TILES], b[at.NUM_TILES], at.TILE_COLUMNS), table(b[at.RUNS], b[at.NUM_RUNS], at.RUN_COLUMNS)
    return tiles, runs, integers(b[at.POSITIONS], b[at.NUM_ROWS])


@inner()
def attend_tile(task: Any, op: Any, scale: Any, b: Any, sets: Any, scratch: Any) -> None:
    """Some heads of one tile of a run of at most FEW rows -> m, l [N, H, lines], o [N, H, lines, D'] at that tile's place.

    An operation's numbers: q and its rows' stride, q_sinks and its rows' stride, layer, set, H, G, D.
    """
    q, q_stride, q_sinks, sinks_stride, heads, group, dim = op[2], op[3], op[4], op[5], op[8], op[9], op[10]
    first, end = sets[op[7], at.FEW_TILES], sets[op[7], at.TILES_END]
    parts = parts_of(end - first, heads)
    place, part = first + task // parts, task % parts
    tiles, runs, positions = _tiles_and_runs(b)
    sources, which, units, unit_size, fixed = _memory(op, b)
    number_of = integers(b[at.LISTED], b[at.NUM_LISTED])[place]
    run, tile, units = runs[integers(b[at.OWNER], b[at.NUM_LISTED])[place]], tiles[number_of], units[number_of]
    source = sources[which[number_of]]
    codec, keys_at, values_at = source[0], source[1:4], source[4:7]
    wide, width = _rounded(dim, 64), _rounded(dim, 16)
    begin, few = run[BEGIN], run[END] - run[BEGIN]
    where = positions[begin : run[END]]
    rows, count = few * group, _seen(tile, where)
    scratch, query = _cut(scratch, rows, dim)
    scratch, scores = _cut(scratch, rows, TILE)
    scratch, keys = _cut(scratch, width, TILE)
    scratch, values = _cut(scratch, TILE, wide)
    scratch, decoded = _cut(scratch, 16, width)
    scratch, chains = _cut(scratch, 1, dim)
    plain = codec == FLOAT32
    for h in range(heads * part // parts, heads * (part + 1) // parts):
        if plain:
            _ask_for(values_at[0], units, unit_size, h, heads, dim, count)
        if tile[QUERY] == 0:
            _queries(q, q_stride, begin, few, h, group, scale, query)
        else:
            _queries(q_sinks, sinks_stride, begin, few, h, group, scale, query)
        _load_keys(codec, keys_at, units, unit_size, fixed, h, heads, dim, count, decoded, keys)
        line = (number_of * heads + h) * b[at.LINES]
        m, l = vector(b[at.PART_M] + line * 4, rows), vector(b[at.PART_L] + line * 4, rows)  # noqa: E741
        _score(query, group, where, run, tile, count, keys, scores, m, l)
        sums, done = matrix(b[at.PART_O] + line * wide * 4, rows, wide), False
        if plain and h + 1 < heads:
            _ask_for(keys_at[0], units, unit_size, h + 1, heads, dim, count)
        if plain and dim == wide:
            _values_in_place(scores, values_at[0], units, unit_size, h, heads, dim, count, chains[0], sums)
            done = _finite(sums)
        if not done:
            _load_values(codec, values_at, units, unit_size, fixed, h, heads, dim, count, values)
            _sum_values(scores, count, values, sums)


@inner()
def combine_run(task: Any, op: Any, b: Any, sets: Any) -> None:
    """One head of one run whose tiles attend_tile has done -> out [R, Hq, D]. An operation's numbers: set, H, G, D, out."""
    heads, group, dim, out, lines = op[3], op[4], op[5], op[6], b[at.LINES]
    _, runs, _ = _tiles_and_runs(b)
    run, h, wide = runs[sets[op[2], at.FEW_RUNS] + task // heads], task % heads, _rounded(dim, 64)
    for line in range((run[END] - run[BEGIN]) * group):
        place = (run[FIRST] * heads + h) * lines + line
        top, total, value = number(b[at.PART_M], place), number(b[at.PART_L], place), vector(b[at.PART_O] + place * wide * 4, wide)
        for _ in range(run[FIRST] + 1, run[LAST]):
            place += heads * lines
            more = vector(b[at.PART_O] + place * wide * 4, wide)
            top, total = _combine(top, total, value, number(b[at.PART_M], place), number(b[at.PART_L], place), more)
        row = (run[BEGIN] + line // group) * heads * group + h * group + line % group
        _finish(total, value, vector(out + row * dim * 4, dim))


@inner()
def attend_rows(task: Any, op: Any, scale: Any, b: Any, sets: Any, scratch: Any) -> None:
    """One head of one run of many rows, tile after tile -> out [R, Hq, D]. Numbers as attend_tile's, then out."""
    q, q_stride, q_sinks, sinks_stride, heads, group, dim = op[2], op[3], op[4], op[5], op[8], op[9], op[10]
    tiles, runs, positions = _tiles_and_runs(b)
    sources, which, units, unit_size, fixed = _memory(op, b)
    run, h = runs[sets[op[7], at.MANY_RUNS] + task // heads], task % heads
    begin, many = run[BEGIN], run[END] - run[BEGIN]
    where = positions[begin : run[END]]
    rows, wide, width = many * group, _rounded(dim, 64), _rounded(dim, 16)
    scratch, query = _cut(scratch, rows, dim)
    scratch, scores = _cut(scratch, rows, TILE)
    scratch, keys = _cut(scratch, width, TILE)
    scratch, values = _cut(scratch, TILE, wide)
    scratch, decoded = _cut(scratch, 16, width)
    scratch, m = _cut(scratch, 2, rows)
    scratch, l = _cut(scratch, 2, rows)  # noqa: E741
    scratch, o = _cut(scratch, rows, wide)
    scratch, more = _cut(scratch, rows, wide)
    for n in range(run[FIRST], run[LAST]):
        if n == run[FIRST] or tiles[n, QUERY] != tiles[n - 1, QUERY]:
            if tiles[n, QUERY] == 0:
                _queries(q, q_stride, begin, many, h, group, scale, query)
            else:
                _queries(q_sinks, sinks_stride, begin, many, h, group, scale, query)
        source, count = sources[which[n]], _seen(tiles[n], where)
        _load_keys(source[0], source[1:4], units[n], unit_size, fixed, h, heads, dim, count, decoded, keys)
        _load_values(source[0], source[4:7], units[n], unit_size, fixed, h, heads, dim, count, values)
        if n == run[FIRST]:
            _score(query, group, where, run, tiles[n], count, keys, scores, m[0], l[0])
            _sum_values(scores, count, values, o)
        else:
            _score(query, group, where, run, tiles[n], count, keys, scores, m[1], l[1])
            _sum_values(scores, count, values, more)
            for r in range(rows):
                m[0, r], l[0, r] = _combine(m[0, r], l[0, r], o[r], m[1, r], l[1, r], more[r])
    for r in range(rows):
        row = (begin + r // group) * heads * group + h * group + r % group
        _finish(l[0, r], o[r], vector(op[11] + row * dim * 4, dim))
