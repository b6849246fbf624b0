"""A GGUF file's metadata -> LlamaConfig. Keys are named `<architecture>.block_count` and so on (ggml/docs/gguf.md).

What a file says by which tensors it holds is taken from there: a head of its own, biases, and Llama 3's rotary scaling,
which llama.cpp's converter stores as divisors of the frequencies (rope_freqs.weight).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nanokv.errors import ConfigError
from nanokv.gguf_header import Header
from nanokv.models.fields import number
from nanokv.models.llama_config import LlamaConfig
from nanokv.models.rope_config import MOST
from nanokv.rope import attention_term

# Architectures, and whether llama.cpp's converter brings their rotary planes side by side.
ARCHITECTURES: Mapping[str, bool] = {"llama": True, "qwen2": False, "qwen3": False}

KEYS = {  # config.json's name of each
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
          "attention.layer_norm_rms_epsilon")  # fmt: skip
ROPE_KEYS = {  # config.json's name of each, in rope_scaling
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
OTHER_ROPE_KEYS = ("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.attn_factor",
                   "rope.scaling.finetuned")  # fmt: skip
FREQUENCY_DIVISORS = "rope_freqs.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def architecture(header: Header) -> str:
    """general.architecture. Raises ConfigError for one that is not supported."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(f"general.architecture {name!r} is not supported: {', '.join(ARCHITECTURES)} are")
    return name


def config_of(header: Header, divisors: np.ndarray | None = None) -> LlamaConfig:
    """The configuration, checked; `divisors` are the values of rope_freqs.weight, where the file has it. ConfigError names
    the key, by its name here or the one that config.json has for it."""
    arch = architecture(header)
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    values = {key: _plain(value) for key, value in own.items()}
    for key in NEEDED:
        if key not in values:
            raise ConfigError(f"the file has no {arch}.{key}")
    if values.get("expert_count"):
        raise ConfigError(f"{arch}.expert_count is {values['expert_count']}: mixtures of experts are not supported")
    raw = {ours: values[key] for key, ours in KEYS.items() if key in values}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw.setdefault("head_dim", _head_width(raw))
    raw |= {"vocab_size": _vocabulary(header), "rope_scaling": _rope_scaling(values, arch)}
    raw |= {"model_type": arch, "tie_word_embeddings": HEAD not in header.tensors}
    if values.get("attention.sliding_window"):
        if arch != "llama":
            raise ConfigError(f"{arch}.attention.sliding_window: which layers have the window is not said")
        raw["model_type"] = "mistral"  # llama.cpp has one architecture for both
    else:
        raw["sliding_window"] = None
    config = LlamaConfig.from_dict(raw)
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, config.head_dim) != config.head_dim:
            raise ConfigError(f"{arch}.{key} {values[key]!r} is not the head width {config.head_dim}: not supported")
    factors = tuple(map(float, divisors)) if divisors is not None else ()
    if not all(math.isfinite(each) and each > 0 for each in factors):
        raise ConfigError(f"{FREQUENCY_DIVISORS} holds a value that is no positive number")
    return replace(
        config,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        rope=replace(config.rope, divisors=factors),
    )


def _vocabulary(header: Header) -> int:
    if EMBEDDING not in header.tensors:
        raise ConfigError(f"the file has no tensor {EMBEDDING}: it holds a vocabulary only, or another kind of model")
    return header.tensors[EMBEDDING].shape[0]


def _head_width(raw: Mapping[str, Any]) -> int | None:
    """Where the file does not say: the model's width divided by its heads, whatever a config.json of the family would mean."""
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    known = isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads == 0
    return width // heads if known else None


def _rope_scaling(values: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The rope_scaling that a config.json would have."""
    for key in values:
        if key.startswith("rope.") and key not in ROPE_KEYS and key not in OTHER_ROPE_KEYS:
            raise ConfigError(f"{arch}.{key} changes the rotary positions in a way that is not supported")
    if "rope.scaling.type" not in values:
        factor = values.get("rope.scale_linear", 1.0)  # of files before rope.scaling
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    if values["rope.scaling.type"] == "none":
        return {}
    scaling = {ours: values[key] for key, ours in ROPE_KEYS.items() if key in values}
    if "rope.scaling.attn_factor" in values:  # llama.cpp multiplies it with the paper's
        factor = number(scaling, "factor", 1.0, MOST)
        scaling["attention_factor"] = number(values, "rope.scaling.attn_factor", 0.0, MOST) * attention_term(factor)
    return scaling


def _plain(value: Any) -> Any:
    """A float32 as the decimal that it was made from (1e-5, as config.json has it, not 9.99999974e-6); an array as a list."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(str(np.float32(value))) if isinstance(value, float) and float(np.float32(value)) == value else value
