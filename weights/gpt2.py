"""GPT-2's tensors by Hugging Face's names -> GPT2Params.

Every name is accounted for: each tensor of the model is there once, with its shape; beside them only the causal masks
that old files store as buffers. Anything else is an error before a byte of weights is read.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nanokv.backend import Array, Backend
from nanokv.errors import CheckpointError
from nanokv.models.config import GPT2Config
from nanokv.models.gpt2 import Block, GPT2Params
from weights.names import some, without_prefix
from weights.tensors import StoredTensor

PREFIX = "transformer."  # files saved from GPT2LMHeadModel have it, files saved from GPT2Model do not
EMBEDDING = "wte.weight"
HEAD = "lm_head.weight"

# Block's fields: the name of each in the file and its shape there. Matrices are Conv1D's, stored [in, out].
# E width, I inner width, S = (Hq + 2 Hkv) D.
BLOCK = {
    "ln_1_weight": ("ln_1.weight", "E"),
    "ln_1_bias": ("ln_1.bias", "E"),
    "qkv_weight": ("attn.c_attn.weight", "ES"),
    "qkv_bias": ("attn.c_attn.bias", "S"),
    "proj_weight": ("attn.c_proj.weight", "EE"),
    "proj_bias": ("attn.c_proj.bias", "E"),
    "ln_2_weight": ("ln_2.weight", "E"),
    "ln_2_bias": ("ln_2.bias", "E"),
    "fc_weight": ("mlp.c_fc.weight", "EI"),
    "fc_bias": ("mlp.c_fc.bias", "I"),
    "out_weight": ("mlp.c_proj.weight", "IE"),
    "out_bias": ("mlp.c_proj.bias", "E"),
}
MASKS = ("attn.bias", "attn.masked_bias")


def read_gpt2(tensors: Mapping[str, StoredTensor], config: GPT2Config, dtype: str, backend: Backend, where: Path) -> GPT2Params:
    """The parameters as `dtype`, matrices [out, in], in the backend's memory; one tensor at a time. `where` is the
    checkpoint's name in errors.

    A tied model takes its head from the embedding, and its embedding from the head where only that is stored. Where both
    are stored and differ, both are used, with a warning, as transformers 5 does; `params.config` then says untied.
    Raises CheckpointError, which names the tensor, for anything missing, unknown, of another shape or not a float.
    """
    tensors = without_prefix(tensors, PREFIX)
    shapes = tensor_shapes(config)
    _check_names(tensors, shapes, config, where)
    for name, shape in shapes.items():
        tensors[name].check(shape)

    def read(name: str, transpose: bool = False) -> Array:
        return backend.from_numpy(tensors[name].read(dtype, transpose))

    def block(layer: int) -> Block:
        return Block(**{field: read(f"h.{layer}.{name}", len(shape) == 2) for field, (name, shape) in BLOCK.items()})

    embedding = tensors[EMBEDDING].read(dtype)
    wte = head = backend.from_numpy(embedding)
    if tensors[HEAD] is not tensors[EMBEDDING] and not (config.tied_head and tensors[HEAD].equals(embedding)):
        if config.tied_head:
            warnings.warn(
                f"{tensors[HEAD]} differs from the embedding though tie_word_embeddings is true: both are used as stored",
                stacklevel=2,
            )
            config = replace(config, tied_head=False)
        head = read(HEAD)
    del embedding
    blocks = tuple(block(layer) for layer in range(config.num_layers))
    wpe = backend.table(tensors["wpe.weight"].read(dtype))
    return GPT2Params(config, wte, wpe, blocks, read("ln_f.weight"), read("ln_f.bias"), head)


def tensor_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its shape in the file: names without prefix, Conv1D weights [in, out]."""
    stacked = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    size = {"E": config.width, "I": config.inner, "S": stacked, "V": config.vocab_size, "P": config.num_positions}
    letters = {EMBEDDING: "VE", "wpe.weight": "PE", "ln_f.weight": "E", "ln_f.bias": "E", HEAD: "VE"}
    for layer in range(config.num_layers):
        letters |= {f"h.{layer}.{name}": shape for name, shape in BLOCK.values()}
    return {name: tuple(size[letter] for letter in shape) for name, shape in letters.items()}


def _check_names(
    tensors: dict[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], config: GPT2Config, where: Path
) -> None:
    """No unknown name, none missing. A tied model's embedding and head then both have an entry, the same if one is stored."""
    masks = {f"h.{layer}.{name}" for layer in range(config.num_layers) for name in MASKS}
    if unknown := [name for name in tensors if name not in shapes and name not in masks]:
        raise CheckpointError(f"{where} holds tensors that a GPT-2 of its config.json does not have: {some(unknown)}")
    if config.tied_head and (stored := tensors.get(EMBEDDING) or tensors.get(HEAD)):
        tensors.setdefault(EMBEDDING, stored)
        tensors.setdefault(HEAD, stored)
    if HEAD not in tensors and EMBEDDING in tensors:
        raise CheckpointError(f"{where} holds no {HEAD}, and its config.json says that tie_word_embeddings is false")
    if missing := [name for name in shapes if name not in tensors]:
        raise CheckpointError(f"{where} lacks tensors that its config.json asks for: {some(missing)}")
