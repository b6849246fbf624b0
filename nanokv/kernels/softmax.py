"""Softmax of long rows by the long sum rule of docs/numerics.md: the bits of the card's kernel. Importing it takes numba.

One thread: a row of 50,000 numbers stays in the caches.
"""

from typing import Any

import numpy as np

from nanokv.kernels.compiling import inner, jit
from nanokv.kernels.functions import LOWEST, F, combine_lanes, exp
from nanokv.kernels.simd import add, first, load, splat, store, sub

PIECE = 1024  # numbers that the sum rule takes at once in a long sum


def softmax(x: np.ndarray) -> np.ndarray:
    """Float32 [R, V] -> [R, V]; a row without any number above minus infinity gives zeros."""
    out = np.empty(x.shape, F)
    _softmax(np.ascontiguousarray(x, dtype=F), out)
    return out


@jit()
def _softmax(x: Any, out: Any) -> None:
    width = x.shape[1]
    for r in range(len(x)):
        top = LOWEST
        for i in range(width):
            if x[r, i] > top:
                top = x[r, i]
        total, last = F(0), np.empty(64, np.float32)
        for begin in range(0, width, PIECE):
            total += _weigh(x[r], out[r], begin, min(begin + PIECE, width), top, last)
        for i in range(width):
            out[r, i] = F(0) if total == F(0) else out[r, i] / total


@inner()
def _weigh(x: Any, out: Any, begin: Any, end: Any, top: Any, last: Any) -> Any:
    """out = exp(x - top) from `begin` to `end`, and its sum by the sum rule. `last` [64] holds what is no whole 64."""
    shift = splat(top)
    a = b = c = d = splat(F(0))
    for i in range(begin, end, 64):
        source, target = x.ctypes.data + i * 4, out.ctypes.data + i * 4
        if i + 64 > end:
            last[:] = F(-np.inf)
            last[: end - i] = x[i:end]
            source = target = last.ctypes.data
        for j in range(0, 64, 16):
            store(target, j, exp(sub(load(source, j), shift)))
        a, b = add(a, load(target, 0)), add(b, load(target, 16))
        c, d = add(c, load(target, 32)), add(d, load(target, 48))
        if i + 64 > end:
            out[i:end] = last[: end - i]
    return first(combine_lanes(a, b, c, d))
