"""Attention over tiles read where they lie: blocks through their table, any KV format, all sequences of a step at once.

The order is docs/numerics.md's. A tile's keys of one head are decoded into a panel [D, 128], its values into [128, D'], D'
being D filled up to a multiple of 64; so scores and weighted values are products like any other. A few queries (decoding)
share the work by tiles, each task taking a run of them with all heads, so that blocks stream through memory once; float32 is
read where it lies, sixteen keys turned in registers. Many queries (a prefill) share it by heads. All give the same bits.

Symbols: R rows, Hq query heads, H key-value heads, G = Hq / H, D head width, T = 128 keys a tile, N tiles.
"""

from typing import Any

import numpy as np

from nanokv.kernels import layout as at
from nanokv.kernels.compiling import CFunction, inner
from nanokv.kernels.decoding import decode_row
from nanokv.kernels.functions import LOWEST, F, combine_lanes, exp
from nanokv.kernels.layout import BEGIN, END, FIRST, FLOAT32, HIGH, LAST, LOW, NUMBER, QUERY, SINKS, TILE, WINDOW
from nanokv.kernels.linear import RUNS, SEGMENT
from nanokv.kernels.simd import (
    add,
    dots,
    first,
    float_of,
    fma,
    fma1,
    fold,
    integers,
    largest,
    load,
    matrix,
    number,
    product,
    splat,
    store,
    sub,
    table,
    transpose,
    vector,
    where_less,
)

_product = product((6, 2, 1), 4)
_product_on = product((4, 3, 2, 1), 4, continues=True)
_dots = dots((4, 3, 2, 1))


@inner()
def _times(x: Any, x_row: Any, rows: Any, w: Any, w_row: Any, count: Any, width: Any, out: Any, out_row: Any) -> None:
    """out [rows, width] += x [rows, count] times w [count, width] by the product rule; width is a multiple of 64."""
    for column in range(0, width, 64):
        for k in range(0, count, SEGMENT):
            some, r = min(SEGMENT, count - k), 0
            weights = w + (k * w_row + column) * 4
            while r < rows:
                here, to = x + (r * x_row + k) * 4, out + (r * out_row + column) * 4
                r += _product(rows - r, here, x_row, weights, w_row, some, to, out_row)


@inner()
def _slot(units: Any, unit_size: Any, t: Any) -> Any:
    """The slot of a tile's token t."""
    return units[t // unit_size] * unit_size + t % unit_size


@inner()
def _place(base: Any, units: Any, unit_size: Any, t: Any, heads: Any, dim: Any, h: Any) -> Any:
    """Where head h of a tile's token t lies, float32."""
    return base + (_slot(units, unit_size, t) * heads + h) * dim * 4


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
            source, step = _place(planes[0], units, unit_size, t, heads, dim, h), heads * dim
        else:
            for i in range(min(16, count - t)):
                slot = _slot(units, unit_size, t + i)
                decode_row(codec, fixed, planes, True, slot, h, heads, dim, source + i * width * 4)
        for d in range(0, width, 16):
            transpose(source + d * 4, step, to + (d * TILE + t) * 4, TILE)


@inner()
def _load_values(
    codec: Any, planes: Any, units: Any, unit_size: Any, fixed: Any, h: Any, heads: Any, dim: Any, count: Any, values: Any
) -> None:
    """The first `count` values of head h of a tile -> values [128, D']."""
    for t in range(count):
        slot = _slot(units, unit_size, t)
        to = values.ctypes.data + t * values.shape[1] * 4
        decode_row(codec, fixed, planes, False, slot, h, heads, dim, to)
        values[t, dim:] = F(0)


@inner()
def _some_scores(x: Any, rows: Any, dim: Any, keys: Any, step: Any, scores: Any) -> None:
    """scores [rows, 128] at 16 keys += x [rows, D] times these keys, which lie `step` apart; D is a multiple of 16."""
    for d in range(0, dim, SEGMENT):
        some, r = min(SEGMENT, dim - d), 0
        while r < rows:
            r += _dots(rows - r, x + (r * dim + d) * 4, dim, keys + d * 4, step, some, scores + r * TILE * 4, TILE)


@inner()
def _some_values(weights: Any, rows: Any, dim: Any, values: Any, step: Any, count: Any, chains: Any) -> None:
    """The chains [rows, D] of a segment go on by `count` values, which lie `step` apart; D is a multiple of 64."""
    for column in range(0, dim, 64):
        r = 0
        while r < rows:
            to = chains + (r * dim + column) * 4
            r += _product_on(rows - r, weights + r * TILE * 4, TILE, values + column * 4, step, count, to, dim)


@inner()
def _hide(scores: Any, begin: Any, end: Any) -> None:
    """Keys begin .. end - 1 of a tile, as far as there are such, get the score of what is not seen."""
    for t in range(max(0, begin), min(TILE, end)):
        scores[t] = F(-np.inf)


@inner()
def _weigh(scores: Any, tile: Any, count: Any, position: Any, window: Any, sinks: Any) -> Any:
    """A row of scores [128] of a tile's keys becomes weights in place -> m, l."""
    start = tile[NUMBER] * TILE
    _hide(scores, min(count, position + 1 - start), TILE)
    _hide(scores, 0, tile[LOW] - start)
    _hide(scores, tile[HIGH] - start, TILE)
    if window > 0:
        _hide(scores, sinks - start, position - window + 1 - start)
    at = scores.ctypes.data
    top = splat(LOWEST)
    for t in range(0, TILE, 16):
        x = load(at, t)
        top = where_less(top, x, x, top)
    top = largest(top)
    for t in range(0, TILE, 16):
        store(at, t, exp(sub(load(at, t), top)))
    a, b = add(load(at, 0), load(at, 64)), add(load(at, 16), load(at, 80))
    c, d = add(load(at, 32), load(at, 96)), add(load(at, 48), load(at, 112))
    return first(top), first(combine_lanes(a, b, c, d))


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
    _weigh_rows(scores, group, positions, run, tile, count, m, l)


@inner()
def _weigh_rows(
    scores: Any, group: Any, positions: Any, run: Any, tile: Any, count: Any, m: Any, l: Any,  # noqa: E741
) -> None:  # fmt: skip
    for r in range(len(scores)):
        m[r], l[r] = _weigh(scores[r], tile, count, positions[r // group], run[WINDOW], run[SINKS])


@inner()
def _sum_values(weights: Any, count: Any, values: Any, o: Any) -> None:
    """o [R G, D'] = weights [R G, 128] times values [128, D']."""
    o[:] = F(0)
    wide = values.shape[1]
    _times(weights.ctypes.data, TILE, len(o), values.ctypes.data, wide, count, wide, o.ctypes.data, wide)
    for r in range(len(o)):
        if not _finite(o[r]):
            _silence(weights[r], values, count, o[r])


@inner()
def _finite(o: Any) -> Any:
    """Whether a row of a multiple of 16 numbers is all finite."""
    total, zero = splat(F(0)), splat(F(0))
    for d in range(0, len(o), 16):
        total = fma(load(o.ctypes.data, d), zero, total)
    return first(fold(total)) == F(0)


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
def _rounded(dim: Any, to: Any) -> Any:
    return (dim + to - 1) // to * to


def attention_words(few: int, many: int, heads: int, dim: int) -> int:
    """float32 numbers of scratch that a task needs: for all heads of the rows times heads of a group of a run of few rows, and
    for one of a run of many."""
    wide, width = -(-dim // 64) * 64, -(-dim // 16) * 16
    tile = width * (TILE + 16) + TILE * wide + 16 * 9
    return tile + max(heads * few * (2 * dim + TILE), many * (dim + TILE + 4 + 2 * wide))


@inner()
def _cut(scratch: Any, rows: Any, columns: Any) -> Any:
    """A part of the scratch memory [rows, columns] -> where the rest begins, and the part."""
    return scratch + _rounded(rows * columns, 16) * 4, matrix(scratch, rows, columns)


@inner()
def _parts(tiles: Any, heads: Any, threads: Any) -> Any:
    """Into how many parts a tile's heads are cut: one, so that a tile streams through memory, where there are tiles enough."""
    wanted = 2 * RUNS * threads
    return 1 if tiles >= wanted else min(heads, (wanted + tiles - 1) // max(1, tiles))


@inner()
def tile_tasks(tiles: Any, heads: Any, threads: Any) -> Any:
    """A task is a run of consecutive tiles, or, where there are few tiles, some heads of one."""
    parts = _parts(tiles, heads, threads)
    return min(tiles, RUNS * threads) if parts == 1 else tiles * parts


@inner()
def _memory(op: Any, block: Any) -> Any:
    """Where an operation's keys and values lie: sources [S, 7] (codec and planes) of its layer, which [N] of them a tile lies
    in, units [N, 128 / unit_size], unit_size and fp8's scale."""
    b = integers(block, at.BLOCK)
    sources = table(b[at.SOURCES] + op[6] * b[at.NUM_SOURCES] * 7 * 8, b[at.NUM_SOURCES], 7)
    units = table(b[at.UNITS], b[at.NUM_TILES], TILE // b[at.UNIT_SIZE])
    return sources, integers(b[at.WHICH], b[at.NUM_TILES]), units, b[at.UNIT_SIZE], float_of(block, at.FIXED)


@inner()
def _tiles_and_runs(b: Any) -> Any:
    """tiles, runs (layout.py) and positions [R]"""
    tiles, runs = table(b[at.TILES], b[at.NUM_TILES], at.TILE_COLUMNS), table(b[at.RUNS], b[at.NUM_RUNS], at.RUN_COLUMNS)
    return tiles, runs, integers(b[at.POSITIONS], b[at.NUM_ROWS])


@CFunction
def attend_tiles(line: Any, block: Any, scratch: Any, task: Any) -> Any:
    """Some tiles of runs of at most FEW rows, or some heads of one -> m, l [n, H, lines], o [n, H, lines, D'], n tiles listed.

    An operation's numbers: q and its rows' stride, q_sinks and its rows' stride, layer, set, H, G, D; scale.
    """
    op, b = integers(line, at.COLUMNS), integers(block, at.BLOCK)
    sets, scale = table(b[at.SETS], b[at.NUM_SETS], at.SET_COLUMNS), float_of(line, at.REAL)
    heads, first = op[8], sets[op[7], at.FEW_TILES]
    tiles = sets[op[7], at.TILES_END] - first
    tasks = tile_tasks(tiles, heads, b[at.THREADS])
    if task < 0:
        return tasks
    parts = _parts(tiles, heads, b[at.THREADS])
    begin, end, h, stop = task * tiles // tasks, (task + 1) * tiles // tasks, 0, heads
    if parts > 1:
        begin, part = task // parts, task % parts
        end, h, stop = begin + 1, heads * part // parts, heads * (part + 1) // parts
    for n in range(begin, end):
        _attend_tile(first + n, h, stop, op, scale, block, scratch)
    return tasks


@inner()
def _attend_tile(place: Any, h: Any, stop: Any, op: Any, scale: Any, block: Any, scratch: Any) -> None:
    """Heads h .. stop - 1 of the tile that is listed at a place."""
    b = integers(block, at.BLOCK)
    heads, group, dim = op[8], op[9], op[10]
    tiles, runs, positions = _tiles_and_runs(b)
    sources, which, units, unit_size, fixed = _memory(op, block)
    number_of = integers(b[at.LISTED], b[at.NUM_LISTED])[place]
    run, tile, units = runs[integers(b[at.OWNER], b[at.NUM_LISTED])[place]], tiles[number_of], units[number_of]
    source, wide = sources[which[number_of]], _rounded(dim, 64)
    where = positions[run[BEGIN] : run[END]]
    rows, count = len(where) * group, _seen(tile, where)
    scratch, queries = _cut(scratch, (stop - h) * rows, dim)
    q, stride = (op[2], op[3]) if tile[QUERY] == 0 else (op[4], op[5])
    for i in range(stop - h):
        _queries(q, stride, run[BEGIN], len(where), h + i, group, scale, queries[i * rows : (i + 1) * rows])
    line, lines = place * heads + h, b[at.LINES]
    m, l, o = b[at.PART_M] + line * lines * 4, b[at.PART_L] + line * lines * 4, b[at.PART_O] + line * lines * wide * 4  # noqa: E741
    if source[0] == FLOAT32 and dim == wide and unit_size >= 16:
        _tile_in_place(
            queries, source, units, unit_size, h, stop, heads, group, where, run, tile, count, lines, m, l, o, scratch
        )
        return
    for i in range(stop - h):
        _head(
            queries[i * rows : (i + 1) * rows], source, units, unit_size, fixed, h + i, heads, group, where, run, tile, count,
            vector(m + i * lines * 4, rows), vector(l + i * lines * 4, rows), matrix(o + i * lines * wide * 4, rows, wide),
            scratch,
        )  # fmt: skip


@inner()
def _head(
    query: Any, source: Any, units: Any, unit_size: Any, fixed: Any, h: Any, heads: Any, group: Any, where: Any, run: Any,
    tile: Any, count: Any, m: Any, l: Any, o: Any, scratch: Any,  # noqa: E741
) -> None:  # fmt: skip
    """One tile's m, l [R G], o [R G, D'] for query [R G, D], in any format."""
    dim, wide = query.shape[1], o.shape[1]
    scratch, scores = _cut(scratch, len(query), TILE)
    scratch, keys = _cut(scratch, _rounded(dim, 16), TILE)
    scratch, values = _cut(scratch, TILE, wide)
    scratch, decoded = _cut(scratch, 16, _rounded(dim, 16))
    _load_keys(source[0], source[1:4], units, unit_size, fixed, h, heads, dim, count, decoded, keys)
    _score(query, group, where, run, tile, count, keys, scores, m, l)
    _load_values(source[0], source[4:7], units, unit_size, fixed, h, heads, dim, count, values)
    _sum_values(scores, count, values, o)


@inner()
def _tile_in_place(
    queries: Any, source: Any, units: Any, unit_size: Any, h: Any, stop: Any, heads: Any, group: Any, where: Any, run: Any,
    tile: Any, count: Any, lines: Any, m: Any, l: Any, o: Any, scratch: Any,  # noqa: E741
) -> None:  # fmt: skip
    """Heads h .. stop - 1 of a tile in float32, read where it lies, 16 tokens of all heads after the other: in the order of
    the addresses, so that the processor fetches ahead. D is a multiple of 64."""
    dim, many, rows = queries.shape[1], stop - h, len(where) * group
    scratch, scores = _cut(scratch, many * rows, TILE)
    scratch, chains = _cut(scratch, many * rows, dim)
    step = heads * dim
    scores[:] = F(0)
    for t in range(0, count, 16):
        keys = _place(source[1], units, unit_size, t, heads, dim, h)
        for i in range(many):
            to = scores.ctypes.data + (i * rows * TILE + t) * 4
            _some_scores(queries.ctypes.data + i * rows * dim * 4, rows, dim, keys + i * dim * 4, step, to)
    for i in range(many):
        here_m, here_l = vector(m + i * lines * 4, rows), vector(l + i * lines * 4, rows)
        _weigh_rows(scores[i * rows : (i + 1) * rows], group, where, run, tile, count, here_m, here_l)
        matrix(o + i * lines * dim * 4, rows, dim)[:] = F(0)
    for k in range(0, count, SEGMENT):
        chains[:] = F(0)
        for t in range(k, min(k + SEGMENT, count), 16):
            values = _place(source[4], units, unit_size, t, heads, dim, h)
            for i in range(many):
                weights = scores.ctypes.data + (i * rows * TILE + t) * 4
                to = chains.ctypes.data + i * rows * dim * 4
                _some_values(weights, rows, dim, values + i * dim * 4, step, min(16, count - t), to)
        for i in range(many):
            sums = matrix(o + i * lines * dim * 4, rows, dim)
            for r in range(rows):
                for d in range(dim):
                    sums[r, d] += chains[i * rows + r, d]
    _, decoded = _cut(scratch, TILE, dim)
    for i in range(many):
        sums = matrix(o + i * lines * dim * 4, rows, dim)
        for r in range(rows):
            if not _finite(sums[r]):
                for t in range(count):
                    decoded[t] = vector(_place(source[4], units, unit_size, t, heads, dim, h + i), dim)
                _silence(scores[i * rows + r], decoded, count, sums[r])


@CFunction
def combine_runs(line: Any, block: Any, scratch: Any, task: Any) -> Any:
    """One head of one run whose tiles attend_tiles has done -> out [R, Hq, D]. An operation's numbers: set, H, G, D, out."""
    op, b = integers(line, at.COLUMNS), integers(block, at.BLOCK)
    heads, group, dim, out, lines = op[3], op[4], op[5], op[6], b[at.LINES]
    sets = table(b[at.SETS], b[at.NUM_SETS], at.SET_COLUMNS)
    if task < 0:
        return (sets[op[2], at.MANY_RUNS] - sets[op[2], at.FEW_RUNS]) * heads
    _, runs, _ = _tiles_and_runs(b)
    number_of, h, wide = sets[op[2], at.FEW_RUNS] + task // heads, task % heads, _rounded(dim, 64)
    run, listed = runs[number_of], integers(b[at.PLACES], b[at.NUM_RUNS])[number_of]
    for r in range((run[END] - run[BEGIN]) * group):
        place = (listed * heads + h) * lines + r
        value = vector(b[at.PART_O] + place * wide * 4, wide)
        top, total = number(b[at.PART_M], place), number(b[at.PART_L], place)
        for _ in range(run[FIRST] + 1, run[LAST]):
            place += heads * lines
            more = vector(b[at.PART_O] + place * wide * 4, wide)
            top, total = _combine(top, total, value, number(b[at.PART_M], place), number(b[at.PART_L], place), more)
        row = (run[BEGIN] + r // group) * heads * group + h * group + r % group
        _finish(total, value, vector(out + row * dim * 4, dim))
    return 0


@CFunction
def attend_rows(line: Any, block: Any, scratch: Any, task: Any) -> Any:
    """One head of one run of many rows, tile after tile -> out [R, Hq, D]. Numbers as attend_tiles's, then out."""
    op, b = integers(line, at.COLUMNS), integers(block, at.BLOCK)
    sets, scale = table(b[at.SETS], b[at.NUM_SETS], at.SET_COLUMNS), float_of(line, at.REAL)
    if task < 0:
        return (sets[op[7], at.SET_END] - sets[op[7], at.MANY_RUNS]) * op[8]
    q, q_stride, q_sinks, sinks_stride, heads, group, dim = op[2], op[3], op[4], op[5], op[8], op[9], op[10]
    tiles, runs, positions = _tiles_and_runs(b)
    sources, which, units, unit_size, fixed = _memory(op, block)
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
    scratch, both = _cut(scratch, 2 * rows, wide)
    o, more = both[:rows], both[rows:]
    for n in range(run[FIRST], run[LAST]):
        if n == run[FIRST] or tiles[n, QUERY] != tiles[n - 1, QUERY]:
            if tiles[n, QUERY] == 0:
                _queries(q, q_stride, begin, many, h, group, scale, query)
            else:
                _queries(q_sinks, sinks_stride, begin, many, h, group, scale, query)
        source, count = sources[which[n]], _seen(tiles[n], where)
        _load_keys(source[0], source[1:4], units[n], unit_size, fixed, h, heads, dim, count, decoded, keys)
        _load_values(source[0], source[4:7], units[n], unit_size, fixed, h, heads, dim, count, values)
        new = 0 if n == run[FIRST] else 1
        _score(query, group, where, run, tiles[n], count, keys, scores, m[new], l[new])
        _sum_values(scores, count, values, more if new else o)
        if new:
            for r in range(rows):
                m[0, r], l[0, r] = _combine(m[0, r], l[0, r], o[r], m[1, r], l[1, r], more[r])
    for r in range(rows):
        row = (begin + r // group) * heads * group + h * group + r % group
        _finish(l[0, r], o[r], vector(op[11] + row * dim * 4, dim))
    return 0
