"""A GGUF file -> Checkpoint: weights, tokenizer, special tokens and chat template, all from the one file."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nanokv.backend import Backend
from nanokv.errors import CheckpointError, ConfigError
from nanokv.gguf_header import Header, read_header
from nanokv.models.llama_config import LlamaConfig
from weights import gguf_tokenizer
from weights.checkpoint import Checkpoint
from weights.gguf_config import ARCHITECTURES, FREQUENCY_DIVISORS, architecture, config_of
from weights.gguf_tensors import GGUFTensor
from weights.llama import EMBEDDING, HEAD, NORM, read_llama

TOP: Mapping[str, str] = {"token_embd.weight": EMBEDDING, "output_norm.weight": NORM, "output.weight": HEAD}
BLOCK: Mapping[str, str] = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
TURNED = ("attn_q", "attn_k")


def load_gguf(path: Path, name: str, dtype: str, backend: Backend) -> Checkpoint:
    """The model in the file, its weights as `dtype` (float32 or float64) in the backend's memory.

    Header, configuration and tokenizer are checked before any weights are read. Raises CheckpointError, ConfigError or
    TokenizerError, each naming the file.
    """
    header = read_header(path)
    config = _config(header, path)
    tokenizer = gguf_tokenizer.read_tokenizer(header.metadata, str(path))
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the embedding has {config.vocab_size} rows"
        )
    params = read_llama(_tensors(header, path, config.head_dim), config, dtype, backend, path)
    template = header.metadata.get("tokenizer.chat_template")
    return Checkpoint(
        name, params.config, params, tokenizer,
        eos_token_ids=gguf_tokenizer.read_ends(header.metadata, str(path)),
        prefix=gguf_tokenizer.read_prefix(header.metadata, str(path)),
        chat_template=template if isinstance(template, str) else None,
    )  # fmt: skip


def read_model_config(path: Path) -> LlamaConfig:
    """The configuration alone. Raises CheckpointError or ConfigError."""
    return _config(read_header(path), path)


def read_licence(path: Path) -> str | None:
    """general.license, where the file has it. Raises CheckpointError."""
    value = read_header(path).metadata.get("general.license")
    return value if isinstance(value, str) else None


def _config(header: Header, path: Path) -> LlamaConfig:
    try:
        return config_of(header, _divisors(header, path))
    except ConfigError as reason:
        raise ConfigError(f"{path}: {reason}") from None


def _divisors(header: Header, path: Path) -> np.ndarray | None:
    entry = header.tensors.get(FREQUENCY_DIVISORS)
    return None if entry is None else GGUFTensor.of(path, entry, entry.name).read("float64")


def _tensors(header: Header, path: Path, head_dim: int) -> dict[str, GGUFTensor]:
    """The tensors by Hugging Face's names; a name that has none there stays as it is."""
    adjacent = head_dim if ARCHITECTURES[architecture(header)] else 0
    found: dict[str, GGUFTensor] = {}
    for name, entry in header.tensors.items():
        if name == FREQUENCY_DIVISORS:
            continue
        match = IN_BLOCK.fullmatch(name)
        if match and match[2] in BLOCK:
            theirs = f"layers.{match[1]}.{BLOCK[match[2]]}.{match[3]}"
            turned = adjacent if match[2] in TURNED else 0
        else:
            theirs, turned = TOP.get(name, name), 0
        found[theirs] = GGUFTensor.of(path, entry, theirs, turned)
    return found
