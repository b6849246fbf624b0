"""out = x W^T + bias with W in panels of 64 outputs (matrix.py), by the product rule of docs/numerics.md.

A panel [K, 64] holds the weights of 64 outputs, those of one input side by side: it streams through memory in order, so
one row of x runs at the memory's speed, and many rows at the speed of a good matrix product. Other formats than float32
are decoded a segment at a time into the first-level cache and multiplied from there: so the bits are those of the
float32 product with the decoded weights. Tasks are panels and runs of rows; which thread takes which changes nothing.

Symbols: R rows, K inputs, N outputs, P panels.
"""

from typing import Any

import numpy as np

from nanokv.kernels.compiling import inner
from nanokv.kernels.decoding import half
from nanokv.kernels.functions import F
from nanokv.kernels.simd import (
    add,
    byte,
    float_of_bits,
    fma,
    fma1,
    load,
    load_bfloat16,
    load_float16,
    load_int8,
    load_nibbles,
    mul,
    number,
    product,
    put,
    signed_byte,
    splat,
    store,
    vector,
    word,
)

PANEL = 64  # outputs of a panel
SEGMENT = 64  # inputs of a segment: docs/numerics.md
GROUP = 32  # inputs that share a scale
ROWS = 96  # rows whose sums are kept at once, a multiple of those of a block
LEAST_TASKS = 64  # enough for threads to share evenly
RUNS = 2  # of panels for each thread, one row
FLOAT32, BF16, FP16, INT8, INT4, INT8_ROW = range(6)

_six, _two, _one = product(6, 4), product(2, 4), product(1, 4)


@inner()
def _decode(form: Any, codes: Any, scales: Any, lows: Any, inputs: Any, p: Any, k: Any, count: Any, out: Any) -> None:
    """The weights of inputs k .. k + count - 1 of panel p -> out [count, 64] float32; all but numbers are addresses."""
    if form == BF16:
        base = (p * inputs + k) * PANEL
        for i in range(0, count * PANEL, 16):
            store(out, i, load_bfloat16(codes, base + i))
    elif form == FP16:
        base = (p * inputs + k) * PANEL
        for i in range(0, count * PANEL, 16):
            store(out, i, load_float16(codes, base + i))
    else:
        groups = (inputs + GROUP - 1) // GROUP
        for begin in range(0, count, GROUP):
            some = min(GROUP, count - begin)
            for column in range(0, PANEL, 16):
                group = (p * groups + (k + begin) // GROUP) * PANEL + column
                scale = load_float16(scales, p * PANEL + column if form == INT8_ROW else group)
                if form != INT4:
                    base = (p * inputs + k + begin) * PANEL + column
                    for i in range(some):
                        store(out, (begin + i) * PANEL + column, mul(scale, load_int8(codes, base + i * PANEL)))
                else:
                    low = load_float16(lows, group) if lows else mul(scale, splat(F(-8)))
                    base = (p * groups * (GROUP // 8) + (k + begin) // 8) * PANEL + column
                    for i in range(some):
                        q = load_nibbles(codes, base + i // 8 * PANEL, i % 8 * 4)
                        store(out, (begin + i) * PANEL + column, fma(q, scale, low))


@inner()
def decode_one(form: Any, codes: Any, scales: Any, lows: Any, inputs: Any, row: Any, out: Any) -> None:
    """The weights of output `row` -> out [K] float32."""
    p, lane, groups = row // PANEL, row % PANEL, (inputs + GROUP - 1) // GROUP
    for k in range(inputs):
        at = (p * inputs + k) * PANEL + lane
        if form == FLOAT32:
            put(out, k, number(codes, at))
        elif form == BF16:
            put(out, k, float_of_bits(word(codes, at) << np.int32(16)))
        elif form == FP16:
            put(out, k, half(word(codes, at)))
        else:
            group = (p * groups + k // GROUP) * PANEL + lane
            scale = half(word(scales, p * PANEL + lane if form == INT8_ROW else group))
            if form == INT4:
                low = half(word(lows, group)) if lows else scale * F(-8)
                q = byte(codes, ((p * groups * (GROUP // 8) + k // 8) * PANEL + lane) * 4 + k % 8 // 2)
                put(out, k, fma1(F(q >> np.int32(k % 2 * 4) & np.int32(15)), scale, low))
            else:
                put(out, k, F(signed_byte(codes, at)) * scale)


@inner()
def _multiply(x: Any, x_row: Any, rows: Any, weights: Any, count: Any, sums: Any) -> None:
    """sums [rows, 64] += one segment: x [rows, count] times weights [count, 64]; addresses."""
    r = 0
    while r < rows:
        here, to = x + r * x_row * 4, sums + r * PANEL * 4
        if r + 6 <= rows:
            _six(here, x_row, weights, PANEL, count, to, PANEL)
            r += 6
        elif r + 2 <= rows:
            _two(here, x_row, weights, PANEL, count, to, PANEL)
            r += 2
        else:
            _one(here, x_row, weights, PANEL, count, to, PANEL)
            r += 1


@inner()
def _deliver(sums: Any, rows: Any, bias: Any, adds: Any, out: Any, outputs: Any, row: Any, column: Any) -> None:
    """A task's sums [rows, 64], with the bias added, to their place in out [R, N], or added to what is there."""
    count = min(PANEL, outputs - column)
    for r in range(rows):
        to, here = vector(out + ((row + r) * outputs + column) * 4, count), vector(sums + r * PANEL * 4, count)
        if bias:
            more = vector(bias + column * 4, count)
            for j in range(count):
                here[j] += more[j]
        if adds:
            for j in range(count):
                to[j] += here[j]
        else:
            for j in range(count):
                to[j] = here[j]


@inner()
def _row_float32(x: Any, w: Any, segments: Any, sums: Any) -> None:
    """sums [64] = whole segments of one row x times a panel of float32, straight from memory."""
    s0 = s1 = s2 = s3 = splat(F(0))
    for _ in range(segments):
        a = b = c = d = splat(F(0))
        for k in range(SEGMENT):
            v = splat(number(x, k))
            at = k * PANEL
            a, b = fma(v, load(w, at), a), fma(v, load(w, at + 16), b)
            c, d = fma(v, load(w, at + 32), c), fma(v, load(w, at + 48), d)
        s0, s1, s2, s3 = add(s0, a), add(s1, b), add(s2, c), add(s3, d)
        x, w = x + SEGMENT * 4, w + SEGMENT * PANEL * 4
    _put_row(sums, s0, s1, s2, s3)


@inner()
def _row_bf16(x: Any, w: Any, segments: Any, sums: Any) -> None:
    """The same of bfloat16."""
    s0 = s1 = s2 = s3 = splat(F(0))
    for _ in range(segments):
        a = b = c = d = splat(F(0))
        for k in range(SEGMENT):
            v = splat(number(x, k))
            at = k * PANEL
            a, b = fma(v, load_bfloat16(w, at), a), fma(v, load_bfloat16(w, at + 16), b)
            c, d = fma(v, load_bfloat16(w, at + 32), c), fma(v, load_bfloat16(w, at + 48), d)
        s0, s1, s2, s3 = add(s0, a), add(s1, b), add(s2, c), add(s3, d)
        x, w = x + SEGMENT * 4, w + SEGMENT * PANEL * 2
    _put_row(sums, s0, s1, s2, s3)


@inner()
def _row_fp16(x: Any, w: Any, segments: Any, sums: Any) -> None:
    """The same of float16."""
    s0 = s1 = s2 = s3 = splat(F(0))
    for _ in range(segments):
        a = b = c = d = splat(F(0))
        for k in range(SEGMENT):
            v = splat(number(x, k))
            at = k * PANEL
            a, b = fma(v, load_float16(w, at), a), fma(v, load_float16(w, at + 16), b)
            c, d = fma(v, load_float16(w, at + 32), c), fma(v, load_float16(w, at + 48), d)
        s0, s1, s2, s3 = add(s0, a), add(s1, b), add(s2, c), add(s3, d)
        x, w = x + SEGMENT * 4, w + SEGMENT * PANEL * 2
    _put_row(sums, s0, s1, s2, s3)


@inner()
def _row_int8(x: Any, w: Any, scales: Any, step: Any, segments: Any, sums: Any) -> None:
    """The same of int8, decoded in registers: two groups a segment, whose scales lie `step` bytes apart."""
    s0 = s1 = s2 = s3 = splat(F(0))
    for _ in range(segments):
        a = b = c = d = splat(F(0))
        for _ in range(SEGMENT // GROUP):
            e, f = load_float16(scales, 0), load_float16(scales, 16)
            g, h = load_float16(scales, 32), load_float16(scales, 48)
            for k in range(GROUP):
                v = splat(number(x, k))
                at = k * PANEL
                a, b = fma(v, mul(e, load_int8(w, at)), a), fma(v, mul(f, load_int8(w, at + 16)), b)
                c, d = fma(v, mul(g, load_int8(w, at + 32)), c), fma(v, mul(h, load_int8(w, at + 48)), d)
            x, w, scales = x + GROUP * 4, w + GROUP * PANEL, scales + step
        s0, s1, s2, s3 = add(s0, a), add(s1, b), add(s2, c), add(s3, d)
    _put_row(sums, s0, s1, s2, s3)


@inner()
def _row_int4(x: Any, w: Any, scales: Any, lows: Any, segments: Any, sums: Any) -> None:
    """The same of int4: a word holds eight inputs of an output."""
    s0 = s1 = s2 = s3 = splat(F(0))
    eight = splat(F(-8))
    for _ in range(segments):
        a = b = c = d = splat(F(0))
        for _ in range(SEGMENT // GROUP):
            e, f = load_float16(scales, 0), load_float16(scales, 16)
            g, h = load_float16(scales, 32), load_float16(scales, 48)
            if lows:
                m, n = load_float16(lows, 0), load_float16(lows, 16)
                o, p = load_float16(lows, 32), load_float16(lows, 48)
                lows += PANEL * 2
            else:
                m, n, o, p = mul(e, eight), mul(f, eight), mul(g, eight), mul(h, eight)
            for _ in range(GROUP // 8):
                for j in range(8):
                    v = splat(number(x, j))
                    a = fma(v, fma(load_nibbles(w, 0, 4 * j), e, m), a)
                    b = fma(v, fma(load_nibbles(w, 16, 4 * j), f, n), b)
                    c = fma(v, fma(load_nibbles(w, 32, 4 * j), g, o), c)
                    d = fma(v, fma(load_nibbles(w, 48, 4 * j), h, p), d)
                x, w = x + 8 * 4, w + PANEL * 4
            scales += PANEL * 2
        s0, s1, s2, s3 = add(s0, a), add(s1, b), add(s2, c), add(s3, d)
    _put_row(sums, s0, s1, s2, s3)


@inner()
def _put_row(sums: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    store(sums, 0, a)
    store(sums, 16, b)
    store(sums, 32, c)
    store(sums, 48, d)


@inner()
def _one_row(x: Any, form: Any, codes: Any, scales: Any, lows: Any, inputs: Any, p: Any, sums: Any) -> Any:
    """sums [64] = the whole segments of one row times panel p -> how many inputs that were."""
    segments, groups = inputs // SEGMENT, (inputs + GROUP - 1) // GROUP
    base = p * inputs * PANEL
    if form == FLOAT32:
        _row_float32(x, codes + base * 4, segments, sums)
    elif form == BF16:
        _row_bf16(x, codes + base * 2, segments, sums)
    elif form == FP16:
        _row_fp16(x, codes + base * 2, segments, sums)
    elif form == INT8:
        _row_int8(x, codes + base, scales + p * groups * PANEL * 2, PANEL * 2, segments, sums)
    elif form == INT8_ROW:
        _row_int8(x, codes + base, scales + p * PANEL * 2, 0, segments, sums)
    else:
        behind = p * groups * PANEL
        _row_int4(
            x, codes + behind * (GROUP // 8) * 4, scales + behind * 2, lows + behind * 2 if lows else lows, segments, sums
        )
    return segments * SEGMENT


@inner()
def linear_tasks(rows: Any, outputs: Any, threads: Any) -> Any:
    """One row takes runs of panels, which stream through memory without a break; many rows a panel, or, where there are few
    panels, some of its blocks of rows."""
    panels = (outputs + PANEL - 1) // PANEL
    return min(panels, RUNS * threads) if rows == 1 else panels * _shares(rows, panels)


@inner()
def _shares(rows: Any, panels: Any) -> Any:
    return min((rows + ROWS - 1) // ROWS, (LEAST_TASKS + panels - 1) // panels)


def linear_words() -> int:
    """float32 numbers of scratch that a task needs."""
    return ROWS * PANEL + SEGMENT * PANEL


@inner()
def linear(
    task: Any, tasks: Any, rows: Any, x: Any, form: Any, codes: Any, scales: Any, lows: Any, bias: Any, adds: Any, out: Any,
    inputs: Any, outputs: Any, scratch: Any,
) -> None:  # fmt: skip
    """x [R, K], a matrix's planes, bias [N] or 0, out [R, N], to which the product is added where `adds`."""
    panels = (outputs + PANEL - 1) // PANEL
    if rows == 1:
        for p in range(task * panels // tasks, (task + 1) * panels // tasks):
            _block(0, 1, p, x, form, codes, scales, lows, bias, adds, out, inputs, outputs, scratch)
        return
    shares = _shares(rows, panels)
    p, blocks = task // shares, (rows + ROWS - 1) // ROWS
    for block in range(task % shares * blocks // shares, (task % shares + 1) * blocks // shares):
        some = min(ROWS, rows - block * ROWS)
        _block(block * ROWS, some, p, x, form, codes, scales, lows, bias, adds, out, inputs, outputs, scratch)


@inner()
def _block(
    row: Any, rows: Any, p: Any, x: Any, form: Any, codes: Any, scales: Any, lows: Any, bias: Any, adds: Any, out: Any,
    inputs: Any, outputs: Any, scratch: Any,
) -> None:  # fmt: skip
    """The product of rows row .. row + rows - 1 with panel p."""
    sums, decoded, done = scratch, scratch + ROWS * PANEL * 4, 0
    if rows == 1:
        done = _one_row(x + row * inputs * 4, form, codes, scales, lows, inputs, p, sums)
    else:
        vector(sums, rows * PANEL)[:] = F(0)
    for k in range(done, inputs, SEGMENT):
        count, weights = min(SEGMENT, inputs - k), decoded
        if form == FLOAT32:
            weights = codes + (p * inputs + k) * PANEL * 4
        else:
            _decode(form, codes, scales, lows, inputs, p, k, count, weights)
        _multiply(x + (row * inputs + k) * 4, inputs, rows, weights, count, sums)
    _deliver(sums, rows, bias, adds, out, outputs, row, p * PANEL)
