"""Fewer key-value heads for a model that was trained with more, so that GQA and MQA can be tried on it."""

from dataclasses import replace
from typing import Any

from nanokv.backend import Array, module_of
from nanokv.errors import UsageError
from nanokv.kernels.matrix import Matrix, pack
from nanokv.models import gpt2, llama
from nanokv.models.families import Params

Block = gpt2.Block | llama.Block


def pool_kv_heads(params: Params, num_kv_heads: int) -> Params:
    """Groups of key-value heads replaced by their mean, the recipe of the GQA paper (Ainslie et al. 2023, arXiv
    2305.13245), which then trains on; here nothing does, so the model's text gets worse.

    A packed matrix of queries, keys and values becomes one of float32, since a mean has no place among the quantised weights;
    all others stay as they are. Raises UsageError for a number that does not divide the present one.
    """
    config = params.config
    if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:
        raise UsageError(f"{num_kv_heads} key-value heads cannot be made of {config.num_kv_heads}: the number must divide it")
    if num_kv_heads == config.num_kv_heads:
        return params
    split = config.num_heads * config.head_dim
    stacked = (2, num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim)

    def pooled(rows: Array) -> Array:
        """Queries, keys and values stacked: [(Hq + 2 Hkv) D, ...]"""
        kv = rows[split:].reshape(*stacked, *rows.shape[1:]).mean(axis=2).reshape(-1, *rows.shape[1:])
        return module_of(rows).concatenate([rows[:split], kv])

    def fewer(block: Block) -> Block:
        weight, bias = block.qkv_weight, None if block.qkv_bias is None else pooled(block.qkv_bias)
        fewer_rows = pack(pooled(weight.to_array())) if isinstance(weight, Matrix) else pooled(weight)
        return replace(block, qkv_weight=fewer_rows, qkv_bias=bias)

    changes: dict[str, Any] = {"config": replace(config, num_kv_heads=num_kv_heads), "blocks": tuple(map(fewer, params.blocks))}
    return replace(params, **changes)
