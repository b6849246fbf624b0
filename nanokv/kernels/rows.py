"""Norms, activations and rotary positions: what is done to one row at a time, by the sum rule of docs/numerics.md.

Symbols: R rows, K inputs of a norm, I inner width, H heads, D head width.
"""

import math
from typing import Any

import numpy as np
from numba import prange

from nanokv.kernels.compiling import jit
from nanokv.kernels.functions import F, combine_lanes, gelu, gelu_by_erf, times_sigmoid
from nanokv.kernels.simd import add, first, fma, fma1, load, mul, splat, store

CHUNK = 1 << 14  # elements of a task


@jit()
def _sum(address: Any, width: Any) -> Any:
    """The sum rule over `width`, a multiple of 64, numbers."""
    a = b = c = d = splat(F(0))
    for i in range(0, width, 64):
        a, b = add(a, load(address, i)), add(b, load(address, i + 16))
        c, d = add(c, load(address, i + 32)), add(d, load(address, i + 48))
    return first(combine_lanes(a, b, c, d))


@jit()
def _squares(address: Any, width: Any) -> Any:
    """The sum rule over their squares."""
    a = b = c = d = splat(F(0))
    for i in range(0, width, 64):
        u, v, w, x = load(address, i), load(address, i + 16), load(address, i + 32), load(address, i + 48)
        a, b, c, d = fma(u, u, a), fma(v, v, b), fma(w, w, c), fma(x, x, d)
    return first(combine_lanes(a, b, c, d))


@jit(parallel=True)
def layer_norm(x: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    """x, out [R, K], weight, bias [K]."""
    width = x.shape[1]
    padded, share = (width + 63) // 64 * 64, F(1 / width)
    many = max(1, CHUNK // width)
    for task in prange((len(x) + many - 1) // many):
        c = np.zeros(padded, np.float32)
        for r in range(task * many, min(len(x), (task + 1) * many)):
            for i in range(width):
                c[i] = x[r, i]
            mean = _sum(c.ctypes.data, padded) * share
            for i in range(width):
                c[i] -= mean
            scale = F(1) / math.sqrt(_squares(c.ctypes.data, padded) * share + eps)
            for i in range(width):
                out[r, i] = fma1(c[i] * scale, weight[i], bias[i])


@jit(parallel=True)
def rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """x, out [R, K], weight [K]."""
    width = x.shape[1]
    padded, share = (width + 63) // 64 * 64, F(1 / width)
    many = max(1, CHUNK // width)
    for task in prange((len(x) + many - 1) // many):
        c = np.zeros(padded, np.float32)
        for r in range(task * many, min(len(x), (task + 1) * many)):
            for i in range(width):
                c[i] = x[r, i]
            scale = F(1) / math.sqrt(_squares(c.ctypes.data, padded) * share + eps)
            for i in range(width):
                out[r, i] = c[i] * scale * weight[i]


@jit()
def _gelu(by_erf: Any, x: Any) -> Any:
    return gelu_by_erf(x) if by_erf else gelu(x)


@jit()
def _gelus(by_erf: Any, x: Any, out: Any, begin: Any, end: Any) -> None:
    """x, out [n], of them those from `begin` to `end`."""
    last = begin + (end - begin) // 16 * 16
    for i in range(begin, last, 16):
        store(out.ctypes.data, i, _gelu(by_erf, load(x.ctypes.data, i)))
    if last < end:
        rest = np.zeros(16, np.float32)
        rest[: end - last] = x[last:end]
        store(rest.ctypes.data, 0, _gelu(by_erf, load(rest.ctypes.data, 0)))
        out[last:end] = rest[: end - last]


@jit(parallel=True)
def gelu_new(x: Any, out: Any) -> None:
    """x, out [n]: GELU by tanh."""
    for task in prange((len(x) + CHUNK - 1) // CHUNK):
        _gelus(False, x, out, task * CHUNK, min(len(x), (task + 1) * CHUNK))


@jit(parallel=True)
def gelu_erf(x: Any, out: Any) -> None:
    """x, out [n]: GELU by the error function."""
    for task in prange((len(x) + CHUNK - 1) // CHUNK):
        _gelus(True, x, out, task * CHUNK, min(len(x), (task + 1) * CHUNK))


@jit(parallel=True)
def swiglu(gate_up: Any, out: Any) -> None:
    """gate_up [R, 2 I], the gate's half and the other, out [R, I]."""
    inner = out.shape[1]
    many = max(1, CHUNK // inner)
    for task in prange((len(out) + many - 1) // many):
        for r in range(task * many, min(len(out), (task + 1) * many)):
            gate, up, to = gate_up[r].ctypes.data, gate_up[r].ctypes.data + inner * 4, out[r].ctypes.data
            last = inner // 16 * 16
            for i in range(0, last, 16):
                x = load(gate, i)
                store(to, i, mul(times_sigmoid(x, x), load(up, i)))
            if last < inner:
                rest = np.zeros(16, np.float32)
                rest[: inner - last] = gate_up[r, last:inner]
                x = load(rest.ctypes.data, 0)
                store(rest.ctypes.data, 0, times_sigmoid(x, x))
                for i in range(last, inner):
                    out[r, i] = rest[i - last] * gate_up[r, inner + i]


@jit(parallel=True)
def rotate(x: Any, cos: Any, sin: Any, adjacent: Any, out: Any) -> None:
    """x, out [R, H, D], cos, sin [R, D / 2]; the layouts of nanokv/rope.py."""
    heads, half = x.shape[1], x.shape[2] // 2
    many = max(1, CHUNK // (heads * half))
    for task in prange((len(x) + many - 1) // many):
        for r in range(task * many, min(len(x), (task + 1) * many)):
            for h in range(heads):
                for i in range(half):
                    one, other = (2 * i, 2 * i + 1) if adjacent else (i, half + i)
                    a, b = x[r, h, one], x[r, h, other]
                    out[r, h, one] = fma1(a, cos[r, i], -(b * sin[r, i]))
                    out[r, h, other] = fma1(b, cos[r, i], a * sin[r, i])
