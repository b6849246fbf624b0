"""The runtime's own fold, one tile at a time: what a schedule computes while the machine counts.

A product's bits depend on its shape. To give the runtime's, a tile that works for one query head of a group keeps the
runtime's shape, [G, D] x [D, Bc], with its own query in its head's row and zeros in the others: a row of a product does
not depend on the values of the others.
"""

import numpy as np

from nanokv.attention import Partial, combine, tile_partials


def lane(q: np.ndarray, group: int, member: int) -> np.ndarray:
    """q [R, D] of query head `member` of its group -> [R, G, D], zero in the other heads' rows."""
    if group == 1:
        return q[:, None]
    out = np.zeros((len(q), group, q.shape[1]), dtype=q.dtype)
    out[:, member] = q
    return out


def fold(state: Partial | None, q: np.ndarray, k: np.ndarray, v: np.ndarray, hidden: np.ndarray | None) -> Partial:
    """One more tile, exact: q [R, G, D] already scaled, k, v [T, D], hidden [R, T] -> m, l [R, G, 1], o [R, G, D]."""
    mask = None if hidden is None else hidden[:, None, None, None]  # [R, 1, 1, 1, T]
    partial = tile_partials(q[:, None, None], k[None, :, None], v[None, :, None], mask)  # [R, 1, 1, G, ...]
    each = Partial(*(a[:, 0, 0] for a in partial))
    return each if state is None else combine(state, each)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [R, K] @ b [K, N] -> [R, N], a row at a time: a tile is too small a product to be shared among BLAS's threads, which
    wait for each other longer than it takes."""
    return np.matmul(a[:, None], b)[:, 0]


def padded(tile: np.ndarray, keys: int, at: int = 0) -> np.ndarray:
    """[t, D] -> [keys, D]: zeros around the rows that a tile lacks, as the runtime's last tile has them."""
    if len(tile) == keys:
        return tile
    out = np.zeros((keys, tile.shape[1]), dtype=tile.dtype)
    out[at : at + len(tile)] = tile
    return out
