"""attention.cu's tables from those of nanokv/kernels/layout.py, on the host."""

from dataclasses import fields

import numpy as np

from nanokv.kernels.cuda.launches import TILE, Tables, queries_of
from nanokv.kernels.layout import BEGIN, CODEC, END, FEW, FIRST, HIGH, LAST, LOW, NUMBER, QUERY

ARRAYS = tuple(field.name for field in fields(Tables) if field.name not in ("unit_size", "most"))


def host_tables(
    positions: np.ndarray,
    runs: np.ndarray,
    tiles: np.ndarray,
    units: np.ndarray,
    unit_size: int,
    group: int,
    dim: int,
    few: int = FEW,
) -> Tables:
    """positions [R], runs [n, 6], tiles [N, 11], units [N, T / unit_size] -> the kernels' tables, still in host memory.

    Runs of at most `few` rows are shared out by tiles, the others in pieces of a block's queries.
    """
    assert TILE // unit_size == units.shape[1]
    rows = runs[:, END] - runs[:, BEGIN]
    owner, run_of = np.full(len(tiles), -1, np.int32), np.full(len(positions), -1, np.int32)
    pieces = []
    for n, run in enumerate(runs):
        if rows[n] <= few:
            owner[run[FIRST] : run[LAST]] = n
            run_of[run[BEGIN] : run[END]] = n
        else:
            pieces += [(n, first) for first in range(0, int(rows[n]) * group, queries_of(dim))]
    sources, which = np.unique(tiles[:, CODEC:QUERY], axis=0, return_inverse=True)
    limits = np.minimum(tiles[:, [LOW, HIGH]], np.iinfo(np.int32).max)
    lines = np.column_stack([tiles[:, NUMBER], which.reshape(-1), tiles[:, QUERY], limits])

    def solid(table: np.ndarray, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(table, dtype=dtype)  # a table put together by columns may lie by columns

    return Tables(
        solid(positions, np.int32), solid(runs, np.int64), solid(lines, np.int32), solid(sources, np.int64),
        solid(units, np.int32), owner, run_of, np.array(pieces, np.int32).reshape(-1, 2), unit_size,
        int(rows[rows <= few].max(initial=0)),
    )  # fmt: skip
