"""Attention as a fold over tiles, and the naive whole-matrix attention that it is tested against.

A tile gives a query a partial result (m, l, o): the largest score, the sum of exp(score - m), and the values weighted by
them. Two partial results combine into one (Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention, arXiv
2205.14135), and a row's output is the fold of its tiles in order. Since every tile has the same shape, a row's bits
depend on its query and the keys before it, not on the cache, the chunk or the batch it came with.

Symbols: R rows, Hq query heads, Hkv key-value heads, G = Hq / Hkv queries a key-value head, D head width,
n tiles of T tokens. A product handles P rows at once: 1 in exact numerics, B = R / P products.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nanokv import compiled_attention
from nanokv.backend import Array, module_of
from nanokv.kv.tile import CAUSAL, TILE, Batch, Cache, Tiles, Visibility, members_of
from nanokv.numerics import COMPILED, EXACT, FAST, Numerics, in_parallel

SCORE_ELEMENTS = 1 << 19  # scores that one piece of the work may hold: 2 MB in float32


class Partial(NamedTuple):
    """What a query knows after some tiles: m, l [..., 1] and o [..., D].

    No key seen yet: m is the lowest finite number (minus infinity would make NaN of m - m), l and o are 0.
    """

    m: Array
    l: Array  # noqa: E741 - the papers' name
    o: Array


def combine(a: Partial, b: Partial) -> Partial:
    """The partial result of a's tiles followed by b's. A side that saw no key leaves the other's bits as they are."""
    xp = module_of(a.m)
    m = xp.maximum(a.m, b.m)
    old, new = xp.exp(a.m - m), xp.exp(b.m - m)
    return Partial(m, a.l * old + b.l * new, a.o * old + b.o * new)


def finish(state: Partial) -> Array:
    """The output of a query after its last tile; 0 for one that saw no key."""
    xp = module_of(state.l)
    return state.o / xp.where(state.l == 0, state.l.dtype.type(1), state.l)


def tile_partials(q: Array, k: Array, v: Array, hidden: Array | None) -> Partial:
    """Every tile's partial result for every query, none combined yet.

    q [B, 1, Hkv, P*G, D] already scaled, k, v [n, T, Hkv, D], hidden [B, n, 1, P*G, T] or None where nothing is
    -> m, l [B, n, Hkv, P*G, 1], o [B, n, Hkv, P*G, D].
    """
    xp = module_of(q)
    scores = xp.matmul(q, k.transpose(0, 2, 3, 1)[None])  # [B, n, Hkv, P*G, T]
    if hidden is not None:
        xp.copyto(scores, -np.inf, where=hidden)
    m = xp.maximum(scores.max(axis=-1, keepdims=True), np.finfo(scores.dtype).min)
    scores -= m
    xp.exp(scores, out=scores)
    total = xp.sum(scores, axis=-1, keepdims=True)
    return Partial(m, total, xp.matmul(scores, v.transpose(0, 2, 1, 3)[None]))


def attend(
    q: Array,
    positions: np.ndarray,
    tiles: Tiles | Callable[[int], Sequence[Tiles]],
    scale: float | None = None,
    visibility: Visibility = CAUSAL,
    numerics: Numerics = EXACT,
) -> Array:
    """q [R, Hq, D] at ascending host `positions` [R] over the tiles of one sequence -> [R, Hq, D].

    `tiles` are all of them, or a function from a tile's index to what its queries fold. `scale` multiplies the scores;
    None is 1/sqrt(D). Query head h reads key-value head h // (Hq / Hkv). A row that may see no key is 0.
    """
    if numerics is COMPILED:
        return compiled_attention.attend(q, positions, tiles, scale, visibility)
    xp = module_of(q)
    heads, dim = q.shape[1:]
    q = q * q.dtype.type(dim**-0.5 if scale is None else scale)
    out = xp.empty(q.shape, dtype=q.dtype)

    def piece(part: slice) -> None:
        last = int(positions[part.start]) // TILE
        folded = [tiles] if isinstance(tiles, Tiles) else tiles(last)
        out[part] = _attend_piece(q[part], positions[part], last, folded, visibility, numerics)

    pieces = list(_pieces(positions, heads))
    if len(pieces) == 1 or xp is not np:
        for part in pieces:
            piece(part)
    else:
        in_parallel(piece, pieces)
    return out


def _pieces(positions: np.ndarray, heads: int) -> Iterator[slice]:
    """Runs of rows of the same tile, cut so that their scores fit in SCORE_ELEMENTS."""
    last = positions // TILE
    edges = [0, *(np.flatnonzero(last[1:] != last[:-1]) + 1), len(positions)]
    for begin, end in pairwise(edges):
        step = max(1, SCORE_ELEMENTS // ((int(last[begin]) + 1) * heads * TILE))
        for start in range(begin, end, step):
            yield slice(start, min(start + step, end))


def _attend_piece(
    q: Array, positions: np.ndarray, last: int, folded: Sequence[Tiles], visibility: Visibility, numerics: Numerics
) -> Array:
    """attend() for rows of the tile `last`: they touch no tile after their own."""
    xp = module_of(q)
    rows, heads, dim = q.shape
    kv_heads = folded[0].k.shape[2]
    group = heads // kv_heads
    together = rows if numerics is FAST else 1
    # [R, Hq, D] -> [B, P, Hkv, G, D] -> [B, Hkv, P, G, D] -> [B, 1, Hkv, P*G, D]
    q = q.reshape(-1, together, kv_heads, group, dim).transpose(0, 2, 1, 3, 4).reshape(-1, 1, kv_heads, together * group, dim)

    state: Partial | None = None
    for tiles in folded:
        count = min(len(tiles.k), last + 1 - tiles.first)
        for start, stop, hidden in _masks(positions, tiles.first, count, last, visibility):
            if hidden is not None:  # [R, n, T] -> [B, n, P, T] -> [B, n, 1, P*G, T]
                hidden = hidden.reshape(-1, together, stop - start, TILE).transpose(0, 2, 1, 3)
                hidden = xp.asarray(np.repeat(hidden, group, axis=2)[:, :, None])
            partials = tile_partials(q, tiles.k[start:stop], tiles.v[start:stop], hidden)
            for i in range(stop - start):
                each = Partial(*(a[:, i] for a in partials))
                state = each if state is None else combine(state, each)
    assert state is not None  # a row has at least its own tile
    out = finish(state)  # [B, Hkv, P*G, D]
    return out.reshape(-1, kv_heads, together, group, dim).transpose(0, 2, 1, 3, 4).reshape(rows, heads, dim)


def _masks(
    positions: np.ndarray, first: int, count: int, last: int, visibility: Visibility
) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """The tiles first .. first + count - 1 in runs (start, stop, hidden [R, n, T]); hidden is None where all is seen."""
    clear = min(count, last - first)  # tiles before the rows' own: without a window nothing in them is hidden
    if visibility.window is None:
        if clear > 0:
            yield 0, clear, None
        edges = [clear, count] if clear < count else []
    else:
        edges = [0, count]
    for start, stop in pairwise(edges):
        keys = np.arange((first + start) * TILE, (first + stop) * TILE).reshape(-1, TILE)
        hidden = ~visibility.sees(positions[:, None, None], keys)
        some = np.asarray(hidden.any(axis=(0, 2)))
        for begin, end in _runs(some):
            yield start + begin, start + end, hidden[:, begin:end] if some[begin] else None


def _runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs of equal flags: [0 0 0 1] -> (0, 3), (3, 4)."""
    yield from pairwise([0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1), len(flags)])


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    positions: np.ndarray,
    cache: Cache | Batch,
    layer: int,
    scale: float | None = None,
    numerics: Numerics = EXACT,
) -> Array:
    """Writes this step's k, v [R, Hkv, D] into the cache, then lets q [R, Hq, D] attend to what it holds -> [R, Hq, D]."""
    if numerics is COMPILED:
        return compiled_attention.cached_attention(q, k, v, positions, cache, layer, scale)
    out = module_of(q).empty(q.shape, dtype=q.dtype)

    for one, rows in members_of(cache, len(q)):
        one.write(layer, k[rows], v[rows])
        out[rows] = attend(q[rows], positions[rows], partial(one.tiles, layer), scale, one.visibility(layer), numerics)
    return out


def naive_attention(
    q: Array, k: Array, v: Array, positions: np.ndarray, scale: float | None = None, visibility: Visibility = CAUSAL
) -> Array:
    """The textbook: q [R, Hq, D] at `positions` [R] over k, v [S, Hkv, D] at 0 .. S-1 -> [R, Hq, D].

    The whole score matrix, one softmax, no tiles and no cache: what attend() is tested against.
    """
    xp = module_of(q)
    heads, dim = q.shape[1:]
    group = heads // k.shape[1]
    k, v = (xp.repeat(a, group, axis=1).transpose(1, 0, 2) for a in (k, v))  # [Hq, S, D]
    scores = xp.matmul(q.transpose(1, 0, 2), k.transpose(0, 2, 1))  # [Hq, R, S]
    scores = scores * q.dtype.type(dim**-0.5 if scale is None else scale)
    seen = xp.asarray(visibility.sees(positions[:, None], np.arange(k.shape[1])))  # [R, S]
    scores = xp.where(seen, scores, scores.dtype.type(-np.inf))
    weights = xp.exp(scores - xp.maximum(scores.max(axis=-1, keepdims=True), np.finfo(scores.dtype).min))
    total = weights.sum(axis=-1, keepdims=True)
    return xp.matmul(weights / xp.where(total == 0, total.dtype.type(1), total), v).transpose(1, 0, 2)
