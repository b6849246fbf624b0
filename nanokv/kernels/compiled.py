"""The compiled kernels as functions of arrays: what nanokv.numerics and nanokv.attention call. Importing it takes numba.

Every function takes float32 and gives new float32 arrays. Symbols as in nanokv/numerics.py and nanokv/attention.py.
"""

from typing import Any

import numpy as np

from nanokv.kernels import attention, rows
from nanokv.kernels import linear as products
from nanokv.kernels.layout import BEGIN, END, FEW
from nanokv.kernels.matrix import FORMATS, Matrix, pack

F = np.float32
NO_BIAS = np.zeros(0, F)


def _solid(array: np.ndarray) -> np.ndarray:
    """Rows one after the other in memory, as the kernels take them."""
    return np.ascontiguousarray(array, dtype=F)


def linear(x: np.ndarray, weight: Matrix | np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """x [R, K], weight [N, K], bias [N] -> [R, N]. An array is packed first, at each call: give a Matrix."""
    matrix = weight if isinstance(weight, Matrix) else pack(weight)
    out = np.empty((len(x), len(matrix)), F)
    form = FORMATS.index(matrix.form)
    products.linear(_solid(x), form, *matrix.addresses, NO_BIAS if bias is None else bias, out)
    return out


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """[R, K] -> [R, K]"""
    out = np.empty(x.shape, F)
    rows.layer_norm(_solid(x), weight, bias, F(eps), out)
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """[..., K] -> [..., K]"""
    flat = _solid(x).reshape(-1, x.shape[-1])
    out = np.empty(flat.shape, F)
    rows.rms_norm(flat, weight, F(eps), out)
    return out.reshape(x.shape)


def gelu_new(x: np.ndarray) -> np.ndarray:
    """[R, K] -> [R, K]"""
    flat = _solid(x).reshape(-1)
    out = np.empty(flat.shape, F)
    rows.gelu_new(flat, out)
    return out.reshape(x.shape)


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """[R, 2 I] -> [R, I]"""
    out = np.empty((len(gate_up), gate_up.shape[1] // 2), F)
    rows.swiglu(_solid(gate_up), out)
    return out


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, adjacent: bool) -> np.ndarray:
    """x [R, H, D], cos, sin [R, 1, D / 2] -> [R, H, D]"""
    out = np.empty(x.shape, F)
    rows.rotate(_solid(x), cos[:, 0], sin[:, 0], adjacent, out)
    return out


def attend(
    q: np.ndarray,
    q_sinks: np.ndarray,
    positions: np.ndarray,
    runs: np.ndarray,
    tiles: np.ndarray,
    units: np.ndarray,
    unit_size: int,
    kv_heads: int,
    fixed: float,
    scale: float,
    out: np.ndarray,
) -> None:
    """Runs of rows over the tiles that layout.py's tables list: q, q_sinks, out [R, Hq, D], positions [R], runs, tiles [N, …],
    units [N, T / unit_size]. `fixed` is fp8's scale. Rows that no run names are left as they are."""
    many = runs[:, END] - runs[:, BEGIN] > FEW
    one = _solid(q)
    rest = positions, tiles, units, unit_size, kv_heads, F(fixed), F(scale), out
    for chosen, kernel in ((runs[~many], attention.attend_few), (runs[many], attention.attend_many)):
        if len(chosen):
            kernel(one, one if q_sinks is q else _solid(q_sinks), chosen, *rest)


def settings() -> dict[str, Any]:
    """What runs: the compiler's version, the threading layer (once a kernel has run) and the threads."""
    import numba

    try:
        layer = numba.threading_layer()
    except ValueError:
        layer = None
    return {"numba": numba.__version__, "layer": layer, "threads": numba.get_num_threads()}
