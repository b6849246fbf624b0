"""Fewer key-value heads for a model that was trained with more, so that GQA and MQA can be tried on it."""

from dataclasses import replace

from nanokv.backend import module_of
from nanokv.errors import UsageError
from nanokv.kernels.matrix import Matrix, pack
from nanokv.models.gpt2 import Block, GPT2Params


def unpacked(params: GPT2Params) -> GPT2Params:
    """Packed matrices of weights as arrays again."""
    blocks = tuple(
        replace(block, **{name: each.to_array() for name, each in vars(block).items() if isinstance(each, Matrix)})
        for block in params.blocks
    )
    return replace(params, blocks=blocks)


def repacked(params: GPT2Params, like: GPT2Params) -> GPT2Params:
    """Arrays packed again, each in the format that it has in `like`."""
    blocks = tuple(
        replace(block, **{name: pack(vars(block)[name], m.form) for name, m in vars(old).items() if isinstance(m, Matrix)})
        for block, old in zip(params.blocks, like.blocks, strict=True)
    )
    return replace(params, blocks=blocks)


def pool_kv_heads(params: GPT2Params, num_kv_heads: int) -> GPT2Params:
    """Groups of key-value heads replaced by their mean, the recipe of the GQA paper (Ainslie et al. 2023, arXiv
    2305.13245), which then trains on; here nothing does, so the model's text gets worse.

    Raises UsageError for a number that does not divide the present one.
    """
    config = params.config
    if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:
        raise UsageError(f"{num_kv_heads} key-value heads cannot be made of {config.num_kv_heads}: the number must divide it")
    split = config.num_heads * config.head_dim
    stacked = (2, num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim)

    def pooled(block: Block) -> Block:
        weight, bias = block.qkv_weight, block.qkv_bias
        kv_weight = weight[split:].reshape(*stacked, -1).mean(axis=2).reshape(-1, weight.shape[1])  # [2 Hkv D, E]
        kv_bias = bias[split:].reshape(*stacked).mean(axis=2).reshape(-1)
        xp = module_of(weight)
        return replace(
            block, qkv_weight=xp.concatenate([weight[:split], kv_weight]), qkv_bias=xp.concatenate([bias[:split], kv_bias])
        )

    blocks = tuple(pooled(block) for block in params.blocks)
    return replace(params, config=replace(config, num_kv_heads=num_kv_heads), blocks=blocks)
