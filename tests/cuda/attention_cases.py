"""Attention as the runtime asks for it (its caches, its tables), given to the CUDA kernels and to the compiled CPU kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nanokv import compiled_attention
from nanokv.backend import NUMPY
from nanokv.kernels import compiled
from nanokv.kernels.cuda.launches import attend
from nanokv.kernels.cuda.tables import host_tables
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedPool
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import CAUSAL, Batch
from tests.cuda.machine import CpuDevice


@dataclass
class Case:
    """What compiled.attend was called with."""

    q: np.ndarray
    q_sinks: np.ndarray
    positions: np.ndarray
    runs: np.ndarray
    tiles: np.ndarray
    units: np.ndarray
    unit_size: int
    kv_heads: int
    fixed: float
    scale: float
    expected: np.ndarray


def poison(planes: list[np.ndarray]) -> None:
    """Fills memory with NaN, or the largest code where a format has none."""
    for plane in planes:
        plane[...] = np.iinfo(plane.dtype).max if plane.dtype.kind in "iu" else np.nan


def make_case(
    monkeypatch: Any, spec: CacheSpec, before: list[int], now: list[int], heads: int, kv_heads: int, dim: int, seed: int = 0,
    second_query: bool = False,
) -> tuple[Case, dict[str, np.ndarray]]:  # fmt: skip
    """Sequences with `before` tokens already in their caches take `now` more, in one batch; the case, and the arrays that keys
    and values lie in. Memory that no token was written to is NaN."""
    rng = np.random.default_rng(seed)
    layers, size = 2, spec.block_size
    members: list[Any] = []
    if spec.kind == "paged":
        blocks = sum(-(-(b + n) // size) for b, n in zip(before, now, strict=True)) + 4
        pool = spec.pool([CAUSAL] * layers, kv_heads, dim, blocks, np.float32, NUMPY)
        assert isinstance(pool, PagedPool)
        poison([plane[:, 1:] for plane in pool.storage.planes])
        order = pool.blocks.get_new_blocks(blocks - 1)
        pool.blocks.free_blocks([order[i] for i in rng.permutation(len(order))])  # physical order is any
        members = [pool.new_sequence() for _ in before]
    else:
        members = [
            spec.contiguous([CAUSAL] * layers, kv_heads, dim, max(1, b + n), np.float32, NUMPY)
            for b, n in zip(before, now, strict=True)
        ]
        for cache in members:
            assert isinstance(cache, ContiguousCache)
            poison(cache.planes)
    for cache, count in zip(members, before, strict=True):
        for start in range(0, count, 96):
            some = min(96, count - start)
            cache.extend(some)
            for layer in range(layers):
                cache.write(layer, *(rng.standard_normal((some, kv_heads, dim), dtype=np.float32) for _ in range(2)))
            cache.commit()
    batch = Batch(list(zip(members, now, strict=True)))
    positions = batch.extend(sum(now))
    q, other = (rng.standard_normal((sum(now), heads, dim), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((sum(now), kv_heads, dim), dtype=np.float32) for _ in range(2))
    calls: list[tuple[Any, ...]] = []
    real = compiled.attend

    def recorded(*arguments: Any) -> None:
        calls.append(arguments)
        real(*arguments)

    monkeypatch.setattr(compiled, "attend", recorded)
    sinks = other if second_query else None
    out = compiled_attention.cached_attention(q, k, v, positions, batch, 1, None, sinks)
    monkeypatch.undo()
    (arguments,) = calls
    arrays: dict[str, np.ndarray] = {}
    storages = [pool.storage] if spec.kind == "paged" else [ring.storage for cache in members for ring in cache._rings]
    for i, storage in enumerate(storages):
        suffix = "" if len(storages) == 1 else f" {i}"
        arrays |= {f"{spec_.name}{suffix}": plane for planes, specs in zip((storage.k, storage.v), storage.specs, strict=True)
                   for plane, spec_ in zip(planes, specs, strict=True)}  # fmt: skip
    for i, cache in enumerate(members):
        if cache._own:
            arrays |= {f"own k {i}": cache._own.k, f"own v {i}": cache._own.v}
    return Case(*arguments[:10], out), arrays


def run_case(
    case: Case, arrays: dict[str, np.ndarray], order: str = "forwards", few: int = 8, entries: Any = None
) -> tuple[np.ndarray, CpuDevice]:
    """The CUDA kernels' output; runs of at most `few` rows by tiles, the others by rows. Scratch starts as NaN."""
    heads, dim = case.q.shape[1:]
    tables = host_tables(case.positions, case.runs, case.tiles, case.units, case.unit_size, heads // case.kv_heads, dim, few)
    out = np.full(case.q.shape, np.nan, np.float32)
    shape = len(tables.tiles), max(1, tables.most), heads
    partial = [np.full(size, np.nan, np.float32) for size in (shape, shape, (*shape, dim))]
    named = dict(zip(("m", "l", "partial O"), partial, strict=True))
    q = np.ascontiguousarray(case.q)
    sinks = q if case.q_sinks is case.q else np.ascontiguousarray(case.q_sinks)
    device = CpuDevice(order, entries, Q=q, O=out, table=tables.units, **named, **arrays)
    attend(device, q, sinks, tables, case.kv_heads, case.fixed, case.scale, out, tuple(partial))
    return out, device
