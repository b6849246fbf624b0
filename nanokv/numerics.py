"""Products, norms and activations, exact and fast.

The contract of EXACT: a row of the result depends on that row of the input alone, bit for bit, whatever other rows are
computed with it. So a matrix product is one matrix-vector product a row (BLAS promises nothing of the kind for a
matrix-matrix product: it tiles rows and sums in another order at the edges), and every reduction runs along the last,
contiguous axis. FAST hands whole matrices to BLAS and differs by rounding. docs/numerics.md has the details.

Symbols: R rows, K inputs and N outputs of a layer.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TypeVar

import numpy as np

from nanokv.backend import Array, module_of

Item = TypeVar("Item")

# A matrix-vector product goes over the weights once a row, so for many rows it pays to stay inside a slice of them that
# the caches hold. Large enough, too, that BLAS gives a slice to all its threads: OpenBLAS 0.3.31 does from 1.8 MB.
SLICE_BYTES = 4 << 20
CHUNK_ELEMENTS = 1 << 16  # elementwise work is done in pieces whose temporaries stay in the second-level cache


class Numerics(StrEnum):
    """EXACT: rows never depend on each other, bit for bit, on NumPy. COMPILED: exact by the kernels of nanokv/kernels, the
    same bits on every machine and card; float32 only. FAST: whole-matrix products, equal within rounding."""

    EXACT = "exact"
    COMPILED = "compiled"
    FAST = "fast"

    @property
    def contract(self) -> str:
        """What it promises about rows: "exact" or "fast"."""
        return str(Numerics.FAST if self is Numerics.FAST else Numerics.EXACT)


EXACT, COMPILED, FAST = Numerics.EXACT, Numerics.COMPILED, Numerics.FAST


def compiled_kernels(array: Array) -> ModuleType:
    """The compiled kernels for arrays like this one: the processor's or the card's. Imported at the first call, since they
    take numba or CuPy."""
    return _imported("nanokv.kernels.compiled" if module_of(array) is np else "nanokv.kernels.cuda.arrays")


@cache
def _imported(name: str) -> ModuleType:
    return import_module(name)


def linear(x: Array, weight: Array, bias: Array | None = None, numerics: Numerics = EXACT) -> Array:
    """x [R, K], weight [N, K] (the layout in which one output is one contiguous row), bias [N] -> [R, N].

    Nothing outside this function knows how a weight matrix is stored or sliced. A packed one
    (nanokv/kernels/matrix.py) goes to the compiled kernels whatever the numerics: nothing else can read it.
    """
    if numerics is COMPILED or not hasattr(weight, "itemsize"):
        return compiled_kernels(x).linear(x, weight, bias)
    if numerics is FAST:
        out = x @ weight.T  # [R, K] @ [K, N] -> [R, N]
    else:
        out = _rows_times_slices(x, weight)
    if bias is not None:
        out += bias
    return out


def _rows_times_slices(x: Array, weight: Array) -> Array:
    """[R, K] x [N, K] -> [R, N]: one matrix-vector product for each row and slice of the weights.

    One row must take the very same slices as many: BLAS computes the last few rows of a slice in another order than the
    rest, so an output has the same bits only at the same place of a slice of the same shape.
    """
    xp = module_of(x)
    count = len(weight)
    out = xp.empty((len(x), count), dtype=x.dtype)
    for start, stop in weight_slices(count, weight.shape[1] * weight.itemsize):
        xp.matmul(weight[start:stop], x[:, :, None], out=out[:, start:stop, None])  # [n, K] @ [R, K, 1] -> [R, n, 1]
    return out


@cache  # some thirty layers ask for the same few shapes at every token
def weight_slices(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """How the rows of a weight matrix are cut: nearly equal slices of about SLICE_BYTES. A function of the shape alone."""
    parts = max(1, rows * row_bytes // SLICE_BYTES)
    step = -(-rows // parts)
    step += -step % 8
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def layer_norm(x: Array, weight: Array, bias: Array, eps: float, numerics: Numerics = EXACT) -> Array:
    """x [R, K] -> [R, K]: zero mean and unit variance over K (the population variance), then weight and bias [K]."""
    if numerics is COMPILED:
        return compiled_kernels(x).layer_norm(x, weight, bias, eps)
    xp, real = module_of(x), x.dtype.type
    share = real(1 / x.shape[-1])
    rows = max(1, CHUNK_ELEMENTS // x.shape[-1])
    if len(x) > rows and xp is np:  # fresh memory costs more than the arithmetic: a piece's temporaries are used again
        out = np.empty_like(x)
        for start in range(0, len(x), rows):
            out[start : start + rows] = layer_norm(x[start : start + rows], weight, bias, eps)
        return out
    centred = x - xp.sum(x, axis=-1, keepdims=True) * share
    variance = xp.sum(centred * centred, axis=-1, keepdims=True) * share
    centred /= xp.sqrt(variance + real(eps))
    centred *= weight
    centred += bias
    return centred


def rms_norm(x: Array, weight: Array, eps: float, numerics: Numerics = EXACT) -> Array:
    """x [..., K] -> [..., K]: divided by the root of the mean square over K, then times weight [K] (Zhang and Sennrich
    2019, arXiv 1910.07467). Half-precision input is squared and summed in float32, where the sum cannot overflow."""
    if numerics is COMPILED:
        return compiled_kernels(x).rms_norm(x, weight, eps)
    xp, rows = module_of(x), max(1, CHUNK_ELEMENTS * len(x) // max(1, x.size))
    if len(x) > rows and xp is np:
        out = np.empty_like(x)
        for start in range(0, len(x), rows):
            out[start : start + rows] = rms_norm(x[start : start + rows], weight, eps)
        return out
    wide = x.astype(np.result_type(x.dtype, np.float32), copy=False)
    real = wide.dtype.type
    size = xp.sum(wide * wide, axis=-1, keepdims=True) * real(1 / x.shape[-1])
    normed = wide / xp.sqrt(size + real(eps))
    normed *= weight
    return normed.astype(x.dtype, copy=False)


def silu(x: Array) -> Array:
    """x times its sigmoid, the "swish" of SwiGLU. Where exp(-x) would overflow, its largest power stands in: the result is
    within the smallest normal number of 0, which is the limit."""
    xp, limit = module_of(x), np.floor(np.log(np.finfo(x.dtype).max))
    out = xp.minimum(-x, x.dtype.type(limit))
    xp.exp(out, out=out)
    out += x.dtype.type(1)
    return xp.divide(x, out, out=out)


def swiglu(gate_up: Array, numerics: Numerics = EXACT) -> Array:
    """[R, 2 I], the gate's half and the other -> silu(gate) * other [R, I] (Shazeer 2020, arXiv 2002.05202)."""
    if numerics is COMPILED:
        return compiled_kernels(gate_up).swiglu(gate_up)
    xp, inner = module_of(gate_up), gate_up.shape[1] // 2
    rows = max(1, CHUNK_ELEMENTS // inner)
    if len(gate_up) <= rows or xp is not np:
        out = silu(gate_up[:, :inner])
        out *= gate_up[:, inner:]
        return out
    out = np.empty((len(gate_up), inner), dtype=gate_up.dtype)
    for start in range(0, len(gate_up), rows):
        out[start : start + rows] = swiglu(gate_up[start : start + rows])
    return out


def gelu_new(x: Array) -> Array:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415), what GPT-2 calls gelu_new."""
    xp, real = module_of(x), x.dtype.type
    inner = x * x
    inner *= real(0.044715)
    inner += real(1)
    inner *= x  # x + 0.044715 x^3; never x**3, which NumPy computes by the slow power function
    inner *= real(np.sqrt(2 / np.pi))
    xp.tanh(inner, out=inner)
    inner += real(1)
    inner *= x
    inner *= real(0.5)
    return inner


def gelu(x: Array) -> Array:
    """GELU by the error function: x * (1 + erf(x / sqrt 2)) / 2."""
    real = x.dtype.type
    return real(0.5) * x * (real(1) + erf(x * real(np.sqrt(0.5))))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"gelu_new": gelu_new, "gelu": gelu}


def activate(x: Array, name: str, numerics: Numerics = EXACT) -> Array:
    """x [R, K] -> [R, K] through the activation called `name`, in place and piece by piece when there are many rows."""
    if numerics is COMPILED:
        return compiled_kernels(x).gelu_new(x) if name == "gelu_new" else compiled_kernels(x).gelu_erf(x)
    function = ACTIVATIONS[name]
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    if len(x) <= rows or module_of(x) is not np:
        return function(x)
    for start in range(0, len(x), rows):
        x[start : start + rows] = function(x[start : start + rows])
    return x


# W. J. Cody, Rational Chebyshev approximations for the error function, Math. Comp. 23 (1969): the coefficients that
# netlib's CALERF uses, highest power last. Relative error below 6e-19 before rounding.
_ERF_P = (
    3.20937758913846947e03,
    3.77485237685302021e02,
    1.13864154151050156e02,
    3.16112374387056560e00,
    1.85777706184603153e-1,
)
_ERF_Q = (2.84423683343917062e03, 1.28261652607737228e03, 2.44024637934444173e02, 2.36012909523441209e01, 1.0)
_ERFC_P = (
    1.23033935479799725e03, 2.05107837782607147e03, 1.71204761263407058e03, 8.81952221241769090e02, 2.98635138197400131e02,
    6.61191906371416295e01, 8.88314979438837594e00, 5.64188496988670089e-1, 2.15311535474403846e-8,
)  # fmt: skip
_ERFC_Q = (
    1.23033935480374942e03, 3.43936767414372164e03, 4.36261909014324716e03, 3.29079923573345963e03, 1.62138957456669019e03,
    5.37181101862009858e02, 1.17693950891312499e02, 1.57449261107098347e01, 1.0,
)  # fmt: skip


def erf(x: Array) -> Array:
    """The error function of each element, in x's own precision; beyond 6 it is 1 in float64 too."""
    xp = module_of(x)
    z = xp.clip(x.astype(np.float64), -6.0, 6.0)
    size = xp.abs(z)
    square = z * z
    small = z * _polynomial(square, _ERF_P) / _polynomial(square, _ERF_Q)
    tail = xp.exp(-square) * _polynomial(size, _ERFC_P) / _polynomial(size, _ERFC_Q)
    return xp.where(size <= 0.46875, small, xp.sign(z) * (1.0 - tail)).astype(x.dtype)


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    result = coefficients[-1] * x + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        result = result * x + coefficient
    return result


def threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), thread_name_prefix="nanokv")


def in_parallel(function: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Calls `function` on every item, on all cores: for host arrays only, where NumPy lets go of the interpreter.

    Which core computes what never matters to the result: the items are independent of each other. It pays for pieces of a
    millisecond and more: below that the threads wait for the interpreter. Calls must not be nested.
    """
    for _ in _pool().map(function, items):
        pass
