"""GELU by the error function as a function of arrays, compiled: beside nanokv/kernels/compiled.py. Importing it takes numba."""

import numpy as np

from nanokv.kernels import rows


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """[R, K] -> [R, K], float32"""
    flat = np.ascontiguousarray(x, dtype=np.float32).reshape(-1)
    out = np.empty(flat.shape, np.float32)
    rows.gelu_erf(flat, out)
    return out.reshape(x.shape)
