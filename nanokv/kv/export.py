"""A pool's contents in the layouts that other projects use, to compare dumps with.

Symbols: B sequences, S tokens of one, P pages (blocks) of page_size tokens, H key-value heads, D head width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanokv.backend import Array, module_of
from nanokv.errors import UsageError
from nanokv.kv.block_pool import NULL_BLOCK
from nanokv.kv.paged import PagedCache, PagedPool


class PageTable(NamedTuple):
    """FlashInfer's CSR arrays, all int32: sequence b has pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]], of which the
    last holds kv_last_page_len[b] tokens, 1 .. page_size (0 for an empty sequence)."""

    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_last_page_len: np.ndarray


def flashinfer_page_table(sequences: Sequence[PagedCache]) -> PageTable:
    """The tables of several sequences of one pool. Raises UsageError where a window has dropped pages."""
    tables = [_whole_table(sequence) for sequence in sequences]
    lengths = [sequence.length for sequence in sequences]
    size = sequences[0].pool.block_size if sequences else 1
    return PageTable(
        np.cumsum([0, *map(len, tables)]).astype(np.int32),
        np.array([block for table in tables for block in table], dtype=np.int32),
        np.array([(length - 1) % size + 1 if length else 0 for length in lengths], dtype=np.int32),
    )


def flashinfer_pages(pool: PagedPool, layer: int, layout: str = "NHD") -> Array:
    """One layer's pages: NHD [P, 2, page_size, H, D] or HND [P, 2, H, page_size, D], keys first. For lossless codecs."""
    if layout not in ("NHD", "HND"):
        raise UsageError(f"unknown layout {layout!r}: choose NHD or HND")
    if not pool.codec.lossless:
        raise UsageError(f"pages in KV format {pool.codec.name} have no such view: it is for K and V as they are computed")
    pages = module_of(pool.k_cache).stack([pool.k_cache[layer], pool.v_cache[layer]], axis=1)
    return pages if layout == "NHD" else pages.transpose(0, 1, 3, 2, 4)


def vllm_block_tables(sequences: Sequence[PagedCache]) -> tuple[np.ndarray, np.ndarray]:
    """block_tables [B, most blocks] int32, padded with the null block, and seq_lens [B] int32."""
    most = max((len(sequence.block_table) for sequence in sequences), default=0)
    tables = np.full((len(sequences), most), NULL_BLOCK, dtype=np.int32)
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.block_table)] = sequence.block_table
    return tables, np.array([sequence.length for sequence in sequences], dtype=np.int32)


def hf_cache(sequence: PagedCache, layer: int) -> tuple[Array, Array]:
    """k, v [1, H, S, D] of one sequence, as transformers' DynamicCache holds them. For lossless codecs."""
    pool = sequence.pool
    if not pool.codec.lossless:
        raise UsageError(f"KV format {pool.codec.name} has no such view: it is for K and V as they are computed")
    _whole_table(sequence)
    slots = module_of(pool.k_cache).asarray(sequence.slot_mapping(0, sequence.length))

    def rows(plane: Array) -> Array:
        return plane[layer].reshape(-1, *plane.shape[3:])[slots].transpose(1, 0, 2)[None]

    return rows(pool.k_cache), rows(pool.v_cache)


def _whole_table(sequence: PagedCache) -> list[int]:
    if NULL_BLOCK in sequence.block_table:
        raise UsageError("the window has dropped blocks of this sequence: it has no complete table")
    return sequence.block_table[: -(-sequence.length // sequence.pool.block_size)]
