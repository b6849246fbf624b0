"""The same values in the layouts of other projects' kernels (docs/oracle.md lists the arrays), and outputs back in order.

Paged layouts come out of a nanokv pool through nanokv.kv.export, with blocks in random physical order. Entries of vLLM's
table past a sequence's end are stale: they name blocks of the pool that hold unused memory.

Symbols: B sequences, R rows, S tokens, P blocks of N tokens, Hq and Hkv heads, D head width.
"""

from typing import Any, NamedTuple

import numpy as np

from nanokv.kv.codec import FloatCodec
from nanokv.kv.export import flashinfer_page_table, flashinfer_pages, vllm_block_tables
from nanokv.kv.paged import PagedCache, PagedPool
from nanokv.oracle.formats import dtype_of
from nanokv.oracle.spec import Spec
from nanokv.oracle.values import Values, unused

SPARE_BLOCKS = 3  # blocks of the pool that no sequence owns


class Memory(NamedTuple):
    """K and V as they lie in memory: `k`, `v` [P, N, Hkv, D] codes, scales [P, N, Hkv] or None, each sequence's `tables`.

    A layout without blocks is one block a sequence, as long as its capacity.
    """

    k: np.ndarray
    v: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    tables: list[list[int]]
    pool: PagedPool | None = None
    sequences: tuple[PagedCache, ...] = ()


def lay_out(spec: Spec, values: list[Values]) -> Memory:
    """Every sequence's K and V in memory, the rest unused."""
    rng = np.random.default_rng([spec.seed, 0])
    return _paged(spec, values, rng) if spec.paged else _contiguous(spec, values, rng)


def _contiguous(spec: Spec, values: list[Values], rng: np.random.Generator) -> Memory:
    most = max(kv for _, kv in spec.lengths)
    capacity = max(1, most if spec.layout == "hf" else most + 5)
    shape = (len(values), capacity, spec.num_kv_heads)
    k, v = (unused(spec, (*shape, spec.head_dim), rng) for _ in range(2))
    memory = Memory(k, v, *_unused_scales(spec, shape), [[i] for i in range(len(values))])
    for i, each in enumerate(values):
        tokens = len(each.k_codes)
        at = slice(capacity - tokens, capacity) if spec.layout == "hf" else slice(0, tokens)  # transformers pads on the left
        _store(memory, (i, at), each)
    return memory


def _paged(spec: Spec, values: list[Values], rng: np.random.Generator) -> Memory:
    size, dtype = spec.block_size, dtype_of(spec.stored)
    needed = sum(-(-kv // size) for _, kv in spec.lengths)
    pool = PagedPool(
        1, spec.num_kv_heads, spec.head_dim, 1 + needed + SPARE_BLOCKS, size, codec=FloatCodec("codes", dtype, dtype)
    )
    blocks = pool.blocks.get_new_blocks(pool.blocks.num_free)
    pool.blocks.free_blocks(list(rng.permutation(blocks).tolist()))  # they are handed out in the order in which they were freed
    sequences = tuple(pool.new_sequence() for _ in values)
    for sequence, (_, tokens) in zip(sequences, spec.lengths, strict=True):
        if tokens:
            sequence.extend(tokens)
            sequence.commit()
    k, v = pool.k_cache[0], pool.v_cache[0]
    k[...], v[...] = unused(spec, k.shape, rng), unused(spec, v.shape, rng)
    memory = Memory(k, v, *_unused_scales(spec, k.shape[:3]), [list(each.block_table) for each in sequences], pool, sequences)
    for sequence, each in zip(sequences, values, strict=True):
        _store(memory, np.divmod(sequence.slot_mapping(0, sequence.length), size), each)
    return memory


def _unused_scales(spec: Spec, shape: tuple[int, ...]) -> tuple[np.ndarray | None, np.ndarray | None]:
    if not spec.scaled:
        return None, None
    value = np.float32(np.nan if spec.unused == "nan" else 1.0)
    return np.full(shape, value), np.full(shape, value)


def _store(memory: Memory, at: Any, each: Values) -> None:
    memory.k[at], memory.v[at] = each.k_codes, each.v_codes
    if memory.k_scale is not None and memory.v_scale is not None:
        memory.k_scale[at], memory.v_scale[at] = each.k_scale, each.v_scale


def arrays(spec: Spec, values: list[Values], memory: Memory) -> dict[str, np.ndarray]:
    """What a kernel of this layout is given, by name."""
    starts = np.cumsum([0, *(q for q, _ in spec.lengths)]).astype(np.int32)
    lengths = np.array([kv for _, kv in spec.lengths], dtype=np.int32)
    q = np.concatenate([each.q for each in values])  # [R, Hq, D]
    given: dict[str, np.ndarray]
    if spec.layout == "contiguous":
        given = {"q": q, "k": memory.k, "v": memory.v, "query_start_loc": starts, "seq_lens": lengths}
    elif spec.layout == "hf":
        capacity = memory.k.shape[1]
        mask = (np.arange(capacity) >= capacity - lengths[:, None]).astype(np.int64)
        k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (memory.k, memory.v))
        given = {"q": pack(spec, q, 0), "k": k, "v": v, "attention_mask": mask}
    elif spec.layout == "vllm":
        given = {"q": q, "k_cache": memory.k, "v_cache": memory.v, "block_tables": _stale_tables(memory), "seq_lens": lengths,
                 "query_start_loc": starts}  # fmt: skip
    else:
        assert memory.pool is not None
        layout = spec.layout[-3:].upper()
        pages = np.ascontiguousarray(flashinfer_pages(memory.pool, 0, layout))
        given = {"q": q, "paged_kv_cache": pages, **flashinfer_page_table(memory.sequences)._asdict(), "qo_indptr": starts}
    if spec.alibi:
        given["alibi_slopes"] = slopes(spec)
    if spec.scaled:
        given |= {name: _scale(spec, values, name, getattr(memory, name)) for name in ("k_scale", "v_scale")}
    return given


def slopes(spec: Spec) -> np.ndarray:
    """ALiBi's [Hq] float32 (Press, Smith and Lewis 2022, arXiv 2108.12409): 2^(-8 (h + 1) / Hq)."""
    return (2.0 ** (-8 * np.arange(1, spec.num_heads + 1) / spec.num_heads)).astype(np.float32)


def _stale_tables(memory: Memory) -> np.ndarray:
    """vLLM's block_tables with one column more than the longest sequence needs, and stale blocks behind every end."""
    tables, _ = vllm_block_tables(memory.sequences)
    owned = {block for table in memory.tables for block in table}
    spare = [block for block in range(1, len(memory.k)) if block not in owned]
    tables = np.concatenate([tables, np.zeros((len(tables), 1), dtype=np.int32)], axis=1)
    for i, (row, table) in enumerate(zip(tables, memory.tables, strict=True)):
        row[len(table) :] = spare[i % len(spare)]
    return tables


def _scale(spec: Spec, values: list[Values], name: str, memory: np.ndarray | None) -> np.ndarray:
    """[1], [Hkv], or that of every token where its code lies."""
    assert memory is not None
    if spec.scales == "token":
        return np.ascontiguousarray(memory.transpose(0, 2, 1)) if spec.layout in ("hf", "flashinfer-hnd") else memory
    rows = np.concatenate([np.asarray(getattr(each, name)) for each in values] + [np.ones((1, spec.num_kv_heads), np.float32)])
    return rows[0] if spec.scales == "head" else rows[0, :1]  # the same for every token


def pack(spec: Spec, rows: np.ndarray, fill: float) -> np.ndarray:
    """[R, Hq, ...] in the layout of the output: as it is, or for hf [B, Hq, most rows, ...] padded on the left with `fill`."""
    if spec.layout != "hf":
        return rows
    most = max(q for q, _ in spec.lengths)
    out = np.full((len(spec.lengths), rows.shape[1], most, *rows.shape[2:]), fill, dtype=rows.dtype)
    start = 0
    for i, (count, _) in enumerate(spec.lengths):
        out[i, :, most - count :] = np.moveaxis(rows[start : start + count], 0, 1)
        start += count
    return out


def unpack(spec: Spec, out: np.ndarray) -> np.ndarray:
    """The inverse of pack(): [R, Hq, ...]."""
    if spec.layout != "hf":
        return out
    most = out.shape[2]
    return np.concatenate([np.moveaxis(out[i, :, most - count :], 0, 1) for i, (count, _) in enumerate(spec.lengths)])


def output_shape(spec: Spec) -> tuple[int, ...]:
    """Of `out`; of lse without the last."""
    if spec.layout != "hf":
        return spec.rows, spec.num_heads, spec.head_dim
    return len(spec.lengths), spec.num_heads, max(q for q, _ in spec.lengths), spec.head_dim
