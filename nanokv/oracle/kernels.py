"""Right kernels in the oracle's clothes: nanokv's own fold, torch's scaled_dot_product_attention. They are what the bounds
are measured on, and examples of how a call of any layout is read.

Symbols: R rows, S tokens, Hq query heads, Hkv key-value heads, D head width.
"""

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from nanokv.attention import attend
from nanokv.kv.tile import CAUSAL, TILE, Tiles, Visibility
from nanokv.numerics import EXACT, Numerics
from nanokv.oracle.case import Call
from nanokv.oracle.formats import dtype_of
from nanokv.oracle.interchange import to_numpy, to_torch
from nanokv.oracle.layouts import pack


class Sequence(NamedTuple):
    """q [R, Hq, D], k, v [S, Hkv, D] as stored, and the scales of their codes [S, Hkv], or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None


def sequences_of(call: Call) -> list[Sequence]:
    """The sequences of a call on NumPy arrays, whatever its layout, read through its own tables and lengths."""
    match call.layout:
        case "hf":
            return _hf(call)
        case "contiguous":
            places = [(np.full(n, i), np.arange(n)) for i, n in enumerate(call.seq_lens.tolist())]
            planes, starts = (call.k, call.v), call.query_start_loc
        case "vllm":
            places = [_slots(row, n, call.block_size) for row, n in zip(call.block_tables, call.seq_lens.tolist(), strict=True)]
            planes, starts = (call.k_cache, call.v_cache), call.query_start_loc
        case _:
            pages = call.paged_kv_cache if call.layout == "flashinfer-nhd" else call.paged_kv_cache.transpose(0, 1, 3, 2, 4)
            planes, starts = (pages[:, 0], pages[:, 1]), call.qo_indptr
            places = []
            for first, stop, last in zip(call.kv_indptr[:-1], call.kv_indptr[1:], call.kv_last_page_len, strict=True):
                count = (int(stop) - int(first) - 1) * call.block_size + int(last) if stop > first else 0
                places.append(_slots(call.kv_indices[first:stop], count, call.block_size))
    scales = [_scales_at(call, name, places) for name in ("k_scale", "v_scale")]
    return [
        Sequence(call.q[starts[i] : starts[i + 1]], planes[0][at], planes[1][at], scales[0][i], scales[1][i])
        for i, at in enumerate(places)
    ]


def _slots(table: np.ndarray, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    positions = np.arange(count)
    return table[positions // size], positions % size


def _scales_at(call: Call, name: str, places: list[tuple[np.ndarray, np.ndarray]]) -> list[Any]:
    scale = call.arrays.get(name)
    if scale is None:
        return [None] * len(places)
    if scale.ndim == 1:
        return [np.broadcast_to(scale, (len(at[0]), call.num_kv_heads)) for at in places]
    tokens_first = scale.transpose(0, 2, 1) if call.layout in ("hf", "flashinfer-hnd") else scale
    return [tokens_first[at] for at in places]


def _hf(call: Call) -> list[Sequence]:
    mask = call.attention_mask.astype(bool)
    places = [(np.full(int(row.sum()), i), np.flatnonzero(row)) for i, row in enumerate(mask)]
    scales = [_scales_at(call, name, places) for name in ("k_scale", "v_scale")]
    found = []
    for i, (count, _) in enumerate(call.spec.lengths):
        q = call.q[i].transpose(1, 0, 2)[call.q.shape[2] - count :]
        k, v = (x[i].transpose(1, 0, 2)[mask[i]] for x in (call.k, call.v))
        found.append(Sequence(q, k, v, scales[0][i], scales[1][i]))
    return found


def restored(codes: np.ndarray, scale: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Codes times scale, in `dtype`."""
    wide = codes.astype(dtype)
    return wide if scale is None else wide * scale.astype(dtype)[..., None]


def put_together(call: Call, outputs: list[np.ndarray]) -> np.ndarray:
    """Each sequence's [R, Hq, D] -> the output of the call, in its layout and dtype."""
    return pack(call.spec, np.concatenate(outputs).astype(dtype_of(call.dtype)), 0)


def nanokv_attend(call: Call, numerics: Numerics = EXACT) -> np.ndarray:
    """nanokv's fold over tiles, in float32 (float64 for float64): no ALiBi, soft cap or rope, always causal."""
    real = np.float64 if call.dtype == "float64" else np.float32
    visibility = Visibility(call.window, call.sinks) if call.window else CAUSAL
    outputs = []
    for each in sequences_of(call):
        tokens, rows = len(each.k), len(each.q)
        out = np.zeros(each.q.shape, dtype=real)
        first = max(0, rows - tokens)  # rows before the first key see nothing
        if tokens and rows:
            k, v = (_tiles(restored(codes, scale, real)) for codes, scale in ((each.k, each.k_scale), (each.v, each.v_scale)))
            positions = np.arange(tokens - (rows - first), tokens)
            out[first:] = attend(each.q[first:].astype(real), positions, Tiles(k, v), call.scale, visibility, numerics)
        outputs.append(out)
    return put_together(call, outputs)


def _tiles(x: np.ndarray) -> np.ndarray:
    """[S, Hkv, D] -> [n, T, Hkv, D], the last tile padded with zeros."""
    padded = np.zeros((-len(x) % TILE + len(x), *x.shape[1:]), dtype=x.dtype)
    padded[: len(x)] = x
    return padded.reshape(-1, TILE, *x.shape[1:])


def torch_sdpa(call: Call) -> np.ndarray:
    """torch's scaled_dot_product_attention, a sequence at a time, K and V restored to the call's dtype. A row that sees nothing
    is left out of the call: torch gives NaN for it on some paths."""
    torch = import_module("torch")
    outputs = []
    for each in sequences_of(call):
        rows, tokens = len(each.q), len(each.k)
        out = np.zeros(each.q.shape, dtype=dtype_of(call.dtype))
        first = max(0, rows - tokens) if call.causal else 0
        if tokens and rows > first:
            real = np.float64 if call.dtype == "float64" else np.float32
            k, v = (
                to_torch((codes if scale is None else restored(codes, scale, real)).astype(dtype_of(call.dtype)))
                for codes, scale in ((each.k, each.k_scale), (each.v, each.v_scale))
            )
            q = to_torch(each.q[first:])
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, tokens, D]
            mask = torch.from_numpy(_seen(call, np.arange(tokens - (rows - first), tokens), tokens))
            sdpa = torch.nn.functional.scaled_dot_product_attention
            result = sdpa(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=True)
            out[first:] = to_numpy(result[0].transpose(0, 1))
        outputs.append(out)
    return put_together(call, outputs)


def _seen(call: Call, positions: np.ndarray, tokens: int) -> np.ndarray:
    """[R, S] which key a query may see."""
    keys = np.arange(tokens)
    if not call.causal:
        return np.ones((len(positions), tokens), dtype=bool)
    visibility = Visibility(call.window, call.sinks) if call.window else CAUSAL
    return visibility.sees(positions[:, None], keys)
