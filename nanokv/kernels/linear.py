"""out = x W^T + bias with W in panels of 64 outputs (matrix.py), by the product rule of docs/numerics.md.

A panel [K, 64] holds the weights of 64 outputs, those of one input side by side: it streams through memory in order, so
one row of x runs at the memory's speed, and many rows at the speed of a good matrix product. Other formats than float32
are decoded a segment at a time into the first-level cache and multiplied from there: so the bits are those of the
float32 product with the decoded weights. Tasks are panels and runs of rows; which thread takes which changes nothing.

Symbols: R rows, K inputs, N outputs, P panels.
"""

from typing import Any

import numpy as np
from numba import prange

from nanokv.kernels.compiling import jit
from nanokv.kernels.functions import F
from nanokv.kernels.simd import fma, load_bfloat16, load_float16, load_int8, load_nibbles, mul, product, splat, store

PANEL = 64  # outputs of a panel
SEGMENT = 64  # inputs of a segment: docs/numerics.md
GROUP = 32  # inputs that share a scale
ROWS = 96  # rows of a task, a multiple of those of a block
FLOAT32, BF16, FP16, INT8, INT4 = range(5)

_six, _two, _one = product(6, 4), product(2, 4), product(1, 4)


@jit()
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
                scale = load_float16(scales, group)
                if form == INT8:
                    base = (p * inputs + k + begin) * PANEL + column
                    for i in range(some):
                        store(out, (begin + i) * PANEL + column, mul(scale, load_int8(codes, base + i * PANEL)))
                else:
                    low = load_float16(lows, group) if lows else mul(scale, splat(F(-8)))
                    base = (p * groups * (GROUP // 8) + (k + begin) // 8) * PANEL + column
                    for i in range(some):
                        q = load_nibbles(codes, base + i // 8 * PANEL, i % 8 * 4)
                        store(out, (begin + i) * PANEL + column, fma(q, scale, low))


@jit()
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


@jit()
def _deliver(sums: Any, bias: Any, out: Any, row: Any, column: Any) -> None:
    """A task's sums [rows, 64], with the bias added, to their place in out."""
    count = min(PANEL, out.shape[1] - column)
    for r in range(len(sums)):
        if len(bias):
            for j in range(count):
                out[row + r, column + j] = sums[r, j] + bias[column + j]
        else:
            for j in range(count):
                out[row + r, column + j] = sums[r, j]


@jit(parallel=True)
def linear(x: Any, form: Any, codes: Any, scales: Any, lows: Any, bias: Any, out: Any) -> None:
    """x [R, K], the addresses of a matrix's planes, bias [N] or [0], out [R, N]."""
    rows, inputs = x.shape
    blocks = (rows + ROWS - 1) // ROWS
    for task in prange((out.shape[1] + PANEL - 1) // PANEL * blocks):
        p, row = task // blocks, task % blocks * ROWS
        sums = np.zeros((min(ROWS, rows - row), PANEL), np.float32)
        decoded = np.empty((SEGMENT, PANEL), np.float32)
        for k in range(0, inputs, SEGMENT):
            count, weights = min(SEGMENT, inputs - k), decoded.ctypes.data
            if form == FLOAT32:
                weights = codes + (p * inputs + k) * PANEL * 4
            else:
                _decode(form, codes, scales, lows, inputs, p, k, count, weights)
            _multiply(x.ctypes.data + (row * inputs + k) * 4, inputs, len(sums), weights, count, sums.ctypes.data)
        _deliver(sums, bias, out, row, p * PANEL)
