"""The compiled kernels as functions of arrays: what nanokv.numerics and nanokv.attention call. Importing it takes numba.

Every function takes float32 and gives new float32 arrays: a program of one operation, written and run. Symbols as in
nanokv/numerics.py and nanokv/attention.py.
"""

from typing import Any

import numpy as np
from numba import get_num_threads

from nanokv.kernels import layout
from nanokv.kernels.matrix import Matrix, pack
from nanokv.kernels.recording import Program, Tables, arranged, solid

F = np.float32


def _run(program: Program, rows: int, tables: Tables | None = None) -> None:
    program.ready().run(rows, get_num_threads(), tables)


def linear(x: np.ndarray, weight: Matrix | np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """x [R, K], weight [N, K], bias [N] -> [R, N]. An array is packed first, at each call: give a Matrix."""
    matrix = weight if isinstance(weight, Matrix) else pack(weight)
    out, program = np.empty((len(x), len(matrix)), F), Program()
    program.linear(solid(x), matrix, None if bias is None else solid(bias), out)
    _run(program, len(x))
    return out


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """[R, K] -> [R, K]"""
    out, program = np.empty(x.shape, F), Program()
    program.layer_norm(solid(x), solid(weight), solid(bias), eps, out)
    _run(program, len(x))
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """[..., K] -> [..., K]"""
    out, program = np.empty(x.shape, F), Program()
    program.rms_norm(solid(x), solid(weight), eps, out)
    _run(program, x.size // x.shape[-1])
    return out


def gelu_new(x: np.ndarray) -> np.ndarray:
    """[R, K] -> [R, K], by tanh."""
    return _gelu(x, by_erf=False)


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """[R, K] -> [R, K], by the error function."""
    return _gelu(x, by_erf=True)


def _gelu(x: np.ndarray, by_erf: bool) -> np.ndarray:
    out, program = np.empty(x.shape, F), Program()
    program.gelu(solid(x), out, x.shape[1], by_erf)
    _run(program, len(x))
    return out


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """[R, 2 I] -> [R, I]"""
    out, program = np.empty((len(gate_up), gate_up.shape[1] // 2), F), Program()
    program.swiglu(solid(gate_up), out, out.shape[1])
    _run(program, len(gate_up))
    return out


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, adjacent: bool) -> np.ndarray:
    """x [R, H, D], cos, sin [R, 1, D / 2] -> [R, H, D]"""
    out, program = np.empty(x.shape, F), Program()
    program.rotate(solid(x), x.shape[1], x.shape[2], solid(cos[:, 0]), solid(sin[:, 0]), adjacent, out)
    _run(program, len(x))
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
    heads, dim = q.shape[1:]
    one, program = solid(q), Program()
    program.attend(one, one if q_sinks is q else solid(q_sinks), (kv_heads, heads // kv_heads, dim), 0, 0, scale, out)
    sources = np.ascontiguousarray(tiles[None, :, layout.CODEC : layout.QUERY])
    tables = arranged(
        [runs],
        [0],
        positions=positions,
        tiles=tiles,
        sources=sources,
        which=np.arange(len(tiles)),
        units=units,
        unit_size=unit_size,
        fixed=fixed,
    )
    _run(program, len(q), tables)


def settings() -> dict[str, Any]:
    """What runs: the compiler's version, the threading layer (once a kernel has run) and the threads."""
    import numba

    try:
        layer = numba.threading_layer()
    except ValueError:
        layer = None
    return {"numba": numba.__version__, "layer": layer, "threads": numba.get_num_threads()}
