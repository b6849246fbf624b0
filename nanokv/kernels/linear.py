"""out = x W^T + bias with W in panels of 64 outputs (matrix.py), by the product rule of docs/numerics.md.

A panel [K, 64] holds the weights of 64 outputs, those of one input side by side: it streams through memory in order, so
one row of x runs at the memory's speed, and many rows at the speed of a good matrix product. Other formats than float32
are decoded a segment at a time into the first-level cache and multiplied from there: so the bits are those of the
float32 product with the decoded weights. Tasks are panels and runs of rows; which thread takes which changes nothing.

Symbols: R rows, K inputs, N outputs, P panels.
"""

from typing import Any

import numpy as np

from nanokv.kernels.compiling import CFunction, inner
from nanokv.kernels.decoding import half
from nanokv.kernels.functions import F
from nanokv.kernels.layout import BLOCK, COLUMNS, ROWS, THREADS
from nanokv.kernels.simd import (
    add,
    bfloat16,
    byte,
    float16,
    float_of_bits,
    fma,
    fma1,
    integers,
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
MOST_ROWS = 96  # rows whose sums are kept at once, a multiple of those of a block
LEAST_TASKS = 64  # enough for threads to share evenly
RUNS = 1  # of panels or tiles for each thread: a stream of memory is broken as seldom as can be
FLOAT32, BF16, FP16, INT8, INT4, INT8_ROW = range(6)

_product = product((6, 2, 1), 4)
_one_bf16, _one_fp16 = product((1,), 4, read=bfloat16), product((1,), 4, read=float16)


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
        r += _product(rows - r, x + r * x_row * 4, x_row, weights, PANEL, count, sums + r * PANEL * 4, PANEL)


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
def _row_int8(x: Any, w: Any, scales: Any, step: Any, segments: Any, sums: Any) -> None:
    """sums [64] = whole segments of one row x times a panel of int8; the scales of its groups lie `step` bytes apart."""
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
    """sums [64] = one row times panel p, decoded in registers as it comes -> the inputs that this did: all of them or those of
    whole segments; none of float32, which needs no decoding."""
    segments, groups = inputs // SEGMENT, (inputs + GROUP - 1) // GROUP
    base = p * inputs * PANEL
    if form in (BF16, FP16):
        for k in range(0, inputs, SEGMENT):
            here, w, count = x + k * 4, codes + (base + k * PANEL) * 2, min(SEGMENT, inputs - k)
            if form == BF16:
                _one_bf16(1, here, inputs, w, PANEL, count, sums, PANEL)
            else:
                _one_fp16(1, here, inputs, w, PANEL, count, sums, PANEL)
        return inputs
    if form == INT8:
        _row_int8(x, codes + base, scales + p * groups * PANEL * 2, PANEL * 2, segments, sums)
    elif form == INT8_ROW:
        _row_int8(x, codes + base, scales + p * PANEL * 2, 0, segments, sums)
    elif form == INT4:
        behind = p * groups * PANEL
        _row_int4(
            x, codes + behind * (GROUP // 8) * 4, scales + behind * 2, lows + behind * 2 if lows else lows, segments, sums
        )
    return 0 if form == FLOAT32 else segments * SEGMENT


@inner()
def linear_tasks(rows: Any, outputs: Any, threads: Any) -> Any:
    """One row takes runs of panels, which stream through memory without a break; many rows a panel, or, where there are few
    panels, some of its blocks of rows."""
    panels = (outputs + PANEL - 1) // PANEL
    return min(panels, RUNS * threads) if rows == 1 else panels * _shares(rows, panels)


@inner()
def _shares(rows: Any, panels: Any) -> Any:
    return min((rows + MOST_ROWS - 1) // MOST_ROWS, (LEAST_TASKS + panels - 1) // panels)


def linear_words() -> int:
    """float32 numbers of scratch that a task needs."""
    return MOST_ROWS * PANEL + SEGMENT * PANEL


@inner()
def linear(
    task: Any, tasks: Any, rows: Any, x: Any, form: Any, codes: Any, scales: Any, lows: Any, bias: Any, adds: Any, out: Any,
    inputs: Any, outputs: Any, scratch: Any,
) -> None:  # fmt: skip
    """x [R, K], a matrix's planes, bias [N] or 0, out [R, N], to which the product is added where `adds`."""
    panels, blocks = (outputs + PANEL - 1) // PANEL, (rows + MOST_ROWS - 1) // MOST_ROWS
    shares = _shares(rows, panels)
    p, end, share = task // shares, task // shares + 1, task % shares
    if rows == 1:
        p, end = task * panels // tasks, (task + 1) * panels // tasks
    while p < end:
        for block in range(share * blocks // shares, (share + 1) * blocks // shares):
            row = block * MOST_ROWS
            some = min(MOST_ROWS, rows - row)
            _block(row, some, p, x, form, codes, scales, lows, bias, adds, out, inputs, outputs, scratch)
        p += 1


@inner()
def _block(
    row: Any, rows: Any, p: Any, x: Any, form: Any, codes: Any, scales: Any, lows: Any, bias: Any, adds: Any, out: Any,
    inputs: Any, outputs: Any, scratch: Any,
) -> None:  # fmt: skip
    """The product of rows row .. row + rows - 1 with panel p."""
    sums, decoded, done = scratch, scratch + MOST_ROWS * PANEL * 4, 0
    vector(sums, rows * PANEL)[:] = F(0)
    if rows == 1:
        done = _one_row(x + row * inputs * 4, form, codes, scales, lows, inputs, p, sums)
    for k in range(done, inputs, SEGMENT):
        count, weights = min(SEGMENT, inputs - k), decoded
        if form == FLOAT32:
            weights = codes + (p * inputs + k) * PANEL * 4
        else:
            _decode(form, codes, scales, lows, inputs, p, k, count, weights)
        _multiply(x + (row * inputs + k) * 4, inputs, rows, weights, count, sums)
    _deliver(sums, rows, bias, adds, out, outputs, row, p * PANEL)


@CFunction
def linear_kernel(line: Any, block: Any, scratch: Any, task: Any) -> Any:
    """linear(); an operation's numbers are its arguments from x on."""
    op, threads = integers(line, COLUMNS), integers(block, BLOCK)[THREADS]
    tasks = linear_tasks(op[ROWS], op[11], threads)
    if task >= 0:
        linear(task, tasks, op[ROWS], op[2], op[3], op[4], op[5], op[6], op[7], op[8], op[9], op[10], op[11], scratch)
    return tasks
