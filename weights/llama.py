"""The tensors of a Llama or a relative by Hugging Face's names -> LlamaParams. GGUF and llama2.c files come through here,
too, once their tensors have these names.

Every name is accounted for: each tensor of the model is there once, with its shape; beside them only the tables of rotary
frequencies that old files store as buffers. Anything else is an error before a byte of weights is read.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanokv.backend import Array, Backend
from nanokv.models.llama import Block, LlamaParams, block_shapes
from nanokv.models.llama_config import LlamaConfig
from weights.gguf_packed import packed_as_stored
from weights.names import Shapes, check_tensors, read_ends, tie, without_prefix
from weights.tensors import StoredTensor

PREFIX = "model."  # files saved from LlamaForCausalLM have it, files saved from LlamaModel do not
EMBEDDING, NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"

# Block's fields: the tensors that are stacked in each.
BLOCK: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv_weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output_weight": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up_weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down_weight": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}
BUFFER = "self_attn.rotary_emb.inv_freq"


def read_llama(
    tensors: Mapping[str, StoredTensor], config: LlamaConfig, dtype: str, backend: Backend, where: Path
) -> LlamaParams:
    """The parameters as `dtype` in the backend's memory; one tensor at a time, so that nothing but the result and one
    tensor's copy takes memory. `where` is the checkpoint's name in errors.

    A tied model takes its head from the embedding, and its embedding from the head where only that is stored. Raises
    CheckpointError, which names the tensor, for anything missing, unknown, of another shape or not a float.
    """
    found = without_prefix(tensors, PREFIX)
    tie(found, EMBEDDING, HEAD, where, config.tied_head)
    shapes = tensor_shapes(config)
    check_tensors(found, shapes, {f"layers.{layer}.{BUFFER}" for layer in range(config.num_layers)}, where)
    embedding, head = _kept_ends(found[EMBEDDING], found[HEAD], backend, config.tied_head) or read_ends(
        found[EMBEDDING], found[HEAD], dtype, backend, config.tied_head
    )

    def stacked(layer: int, field: str, shape: tuple[int, ...]) -> Array:
        parts = [found[f"layers.{layer}.{name}"] for name in BLOCK[field]]
        if (kept := packed_as_stored(parts, backend)) is not None:
            return kept
        if len(parts) == 1:
            return backend.from_numpy(parts[0].read(dtype))
        whole, at = np.empty(shape, dtype=dtype), 0
        for part in parts:
            whole[at : at + part.shape[0]] = part.read(dtype)
            at += part.shape[0]
        return backend.from_numpy(whole)

    blocks = tuple(
        Block(**{field: stacked(layer, field, shape) for field, shape in block_shapes(config).items()})
        for layer in range(config.num_layers)
    )
    config = replace(config, tied_head=head is embedding)
    return LlamaParams(config, embedding, blocks, backend.from_numpy(found[NORM].read(dtype)), head)


def _kept_ends(embedding: StoredTensor, head: StoredTensor, backend: Backend, tied: bool) -> tuple[Array, Array] | None:
    """Embedding and head in the file's own format where both can be kept in it, and need no comparing."""
    if tied and head is not embedding:
        return None
    first = packed_as_stored([embedding], backend)
    second = first if head is embedding else packed_as_stored([head], backend)
    return None if first is None or second is None else (first, second)


def tensor_shapes(config: LlamaConfig) -> Shapes:
    """Every tensor of the model with its shape in the file, by name without prefix."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"qkv_weight": (q, kv, kv), "qkv_bias": (q, kv, kv), "gate_up_weight": (config.inner,) * 2}
    rows["gate_up_bias"] = rows["gate_up_weight"]
    table = config.vocab_size, config.width
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, NORM: (config.width,), HEAD: table}
    for field, shape in block_shapes(config).items():
        parts = rows.get(field, shape[:1])
        for layer in range(config.num_layers):
            for name, count in zip(BLOCK[field], parts, strict=True):
                shapes[f"layers.{layer}.{name}"] = count, *shape[1:]
    return shapes
