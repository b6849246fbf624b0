"""Norms, activations, rotary positions and the embedding: what is done to one row at a time, by the sum rule of
docs/numerics.md. Everything but numbers is an address of float32 rows one after the other; a task is a few rows.

Symbols: R rows, K inputs of a norm, I inner width, H heads, D head width, E model width.
"""

import math
from typing import Any

from nanokv.kernels.compiling import inner
from nanokv.kernels.functions import F, combine_lanes, gelu, times_sigmoid
from nanokv.kernels.linear import decode_one
from nanokv.kernels.simd import add, first, fma, fma1, integers, load, mul, splat, store, vector

CHUNK = 1 << 12  # elements of a task


@inner()
def rows_each(width: Any) -> Any:
    """Rows of a task."""
    return max(1, CHUNK // width)


@inner()
def row_tasks(rows: Any, width: Any) -> Any:
    each = rows_each(width)
    return (rows + each - 1) // each


@inner()
def _sum(address: Any, width: Any) -> Any:
    """The sum rule over `width`, a multiple of 64, numbers."""
    a = b = c = d = splat(F(0))
    for i in range(0, width, 64):
        a, b = add(a, load(address, i)), add(b, load(address, i + 16))
        c, d = add(c, load(address, i + 32)), add(d, load(address, i + 48))
    return first(combine_lanes(a, b, c, d))


@inner()
def _squares(address: Any, width: Any) -> Any:
    """The sum rule over their squares."""
    a = b = c = d = splat(F(0))
    for i in range(0, width, 64):
        u, v, w, x = load(address, i), load(address, i + 16), load(address, i + 32), load(address, i + 48)
        a, b, c, d = fma(u, u, a), fma(v, v, b), fma(w, w, c), fma(x, x, d)
    return first(combine_lanes(a, b, c, d))


@inner()
def _padded(width: Any) -> Any:
    return (width + 63) // 64 * 64


def norm_words(width: int) -> int:
    """float32 numbers of scratch that a norm needs."""
    return -(-width // 64) * 64


@inner()
def layer_norm(task: Any, rows: Any, x: Any, weight: Any, bias: Any, eps: Any, out: Any, width: Any, scratch: Any) -> None:
    """x, out [R, K], weight, bias [K]."""
    padded, share = _padded(width), F(1 / width)
    c, w, b = vector(scratch, padded), vector(weight, width), vector(bias, width)
    c[width:] = F(0)
    for r in range(task * rows_each(width), min(rows, (task + 1) * rows_each(width))):
        here, to = vector(x + r * width * 4, width), vector(out + r * width * 4, width)
        for i in range(width):
            c[i] = here[i]
        mean = _sum(scratch, padded) * share
        for i in range(width):
            c[i] -= mean
        scale = F(1) / math.sqrt(_squares(scratch, padded) * share + eps)
        for i in range(width):
            to[i] = fma1(c[i] * scale, w[i], b[i])


@inner()
def rms_norm(
    task: Any, rows: Any, x: Any, stride: Any, heads: Any, weight: Any, eps: Any, out: Any, width: Any, scratch: Any
) -> None:
    """x [R, H, K] with rows `stride` apart, weight [K] -> out [R, H, K]; a line of K at a time."""
    padded, share = _padded(width), F(1 / width)
    c, w = vector(scratch, padded), vector(weight, width)
    c[width:] = F(0)
    for line in range(task * rows_each(width), min(rows * heads, (task + 1) * rows_each(width))):
        here = vector(x + (line // heads * stride + line % heads * width) * 4, width)
        to = vector(out + line * width * 4, width)
        for i in range(width):
            c[i] = here[i]
        scale = F(1) / math.sqrt(_squares(scratch, padded) * share + eps)
        for i in range(width):
            to[i] = c[i] * scale * w[i]


@inner()
def gelu_new(task: Any, rows: Any, x: Any, out: Any, width: Any, scratch: Any) -> None:
    """x, out [R, I]."""
    each = rows_each(width) * width
    begin, end = task * each, min(rows * width, (task + 1) * each)
    last = begin + (end - begin) // 16 * 16
    for i in range(begin, last, 16):
        store(out, i, gelu(load(x, i)))
    if last < end:
        some = end - last
        rest, here, to = vector(scratch, 16), vector(x + last * 4, some), vector(out + last * 4, some)
        rest[:] = F(0)
        rest[:some] = here
        store(scratch, 0, gelu(load(scratch, 0)))
        to[:] = rest[:some]


@inner()
def swiglu(task: Any, rows: Any, gate_up: Any, out: Any, inner: Any, scratch: Any) -> None:
    """gate_up [R, 2 I], the gate's half and the other, out [R, I]."""
    each = rows_each(inner)
    for r in range(task * each, min(rows, (task + 1) * each)):
        gate, to = gate_up + r * 2 * inner * 4, out + r * inner * 4
        up, last = gate + inner * 4, inner // 16 * 16
        for i in range(0, last, 16):
            x = load(gate, i)
            store(to, i, mul(times_sigmoid(x, x), load(up, i)))
        if last < inner:
            some = inner - last
            rest = vector(scratch, 16)
            rest[:] = F(0)
            rest[:some] = vector(gate + last * 4, some)
            x = load(scratch, 0)
            store(scratch, 0, times_sigmoid(x, x))
            other, result = vector(up + last * 4, some), vector(to + last * 4, some)
            for i in range(some):
                result[i] = rest[i] * other[i]


@inner()
def rotate(
    task: Any, rows: Any, x: Any, stride: Any, heads: Any, dim: Any, cos: Any, sin: Any, adjacent: Any, out: Any
) -> None:
    """x [R, H, D] with rows `stride` apart, cos, sin [R, D / 2] -> out [R, H, D]; the layouts of nanokv/rope.py."""
    half, each = dim // 2, rows_each(heads * dim)
    for r in range(task * each, min(rows, (task + 1) * each)):
        c, s = vector(cos + r * half * 4, half), vector(sin + r * half * 4, half)
        for h in range(heads):
            here, there = vector(x + (r * stride + h * dim) * 4, dim), vector(out + (r * heads + h) * dim * 4, dim)
            for i in range(half):
                one, other = (2 * i, 2 * i + 1) if adjacent else (i, half + i)
                a, b = here[one], here[other]
                there[one] = fma1(a, c[i], -(b * s[i]))
                there[other] = fma1(b, c[i], a * s[i])


@inner()
def add_rows(task: Any, rows: Any, x: Any, y: Any, width: Any) -> None:
    """x += y, [R, E]."""
    each = rows_each(width) * width
    begin, count = task * each, min(rows * width, (task + 1) * each) - task * each
    to, more = vector(x + begin * 4, count), vector(y + begin * 4, count)
    for i in range(count):
        to[i] += more[i]


@inner()
def embed(
    task: Any, rows: Any, tokens: Any, form: Any, codes: Any, scales: Any, lows: Any, places: Any, positions: Any, out: Any,
    width: Any,
) -> None:  # fmt: skip
    """tokens [R] int64, a matrix's planes [V, E] -> out [R, E]; plus the rows of `places` [., E] (0: none) at positions [R]."""
    each = rows_each(width)
    ids, where = integers(tokens, rows), integers(positions, rows)
    for r in range(task * each, min(rows, (task + 1) * each)):
        decode_one(form, codes, scales, lows, width, ids[r], out + r * width * 4)
        if places:
            to, more = vector(out + r * width * 4, width), vector(places + where[r] * width * 4, width)
            for i in range(width):
                to[i] += more[i]
