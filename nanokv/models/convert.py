"""Fewer key-value heads for a model that was trained with more, so that GQA and MQA can be tried on it."""

from dataclasses import replace
from typing import Any

import numpy as np

from nanokv.backend import Array, module_of, to_numpy
from nanokv.errors import UsageError
from nanokv.kernels.matrix import Matrix, pack
from nanokv.models import gpt2, llama
from nanokv.models.families import Params

Block = gpt2.Block | llama.Block


def pool_kv_heads(params: Params, num_kv_heads: int) -> Params:
    """Groups of key-value heads replaced by their mean, the recipe of the GQA paper (Ainslie et al. 2023, arXiv
    2305.13245), which then trains on; here nothing does, so the model's text gets worse.

    A packed matrix of queries, keys and values becomes one of float32, since a mean has no place among the quantised weights;
    all others stay as they are. The means are made on the host, so that they are the same everywhere. Raises UsageError for a
    number that does not divide the present one.
    """
    config = params.config
    if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:
        raise UsageError(f"{num_kv_heads} key-value heads cannot be made of {config.num_kv_heads}: the number must divide it")
    if num_kv_heads == config.num_kv_heads:
        return params
    split = config.num_heads * config.head_dim
    stacked = (2, num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim)

    def pooled(rows: np.ndarray) -> np.ndarray:
        """Queries, keys and values stacked: [(Hq + 2 Hkv) D, ...]"""
        kv = rows[split:].reshape(*stacked, *rows.shape[1:]).mean(axis=2).reshape(-1, *rows.shape[1:])
        return np.concatenate([rows[:split], kv])

    def in_place_of(array: Array) -> Array:
        """The pooled rows, where the array lies and as it does."""
        if isinstance(array, Matrix):
            return pack(pooled(array.to_array()))
        if hasattr(array, "to_host"):  # packed on a card
            return array.beside(pack(pooled(array.to_host().to_array())))
        return module_of(array).asarray(pooled(to_numpy(array)))

    def fewer(block: Block) -> Block:
        bias = None if block.qkv_bias is None else in_place_of(block.qkv_bias)
        return replace(block, qkv_weight=in_place_of(block.qkv_weight), qkv_bias=bias)

    changes: dict[str, Any] = {"config": replace(config, num_kv_heads=num_kv_heads), "blocks": tuple(map(fewer, params.blocks))}
    return replace(params, **changes)
