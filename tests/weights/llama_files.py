"""Llamas as files, written without the code that reads them: safetensors, GGUF by hand and by the gguf package, llama2.c."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from nanokv.models.llama import LlamaParams
from tests.weights.files import ALPHABET

HF_BLOCK = {
    "attention_norm": ["input_layernorm.weight"], "mlp_norm": ["post_attention_layernorm.weight"],
    "output_weight": ["self_attn.o_proj.weight"], "output_bias": ["self_attn.o_proj.bias"],
    "down_weight": ["mlp.down_proj.weight"], "down_bias": ["mlp.down_proj.bias"],
    "q_norm": ["self_attn.q_norm.weight"], "k_norm": ["self_attn.k_norm.weight"],
}  # fmt: skip
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def hf_arrays(params: LlamaParams, prefix: str = "model.") -> dict[str, np.ndarray]:
    """Names and layout of Hugging Face's files; a head of its own is there, a tied one not."""
    config = params.config
    q, kv, i = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.inner
    arrays = {prefix + "embed_tokens.weight": params.embedding, prefix + "norm.weight": params.norm}
    for layer, block in enumerate(params.blocks):
        at = f"{prefix}layers.{layer}."
        for kind, stacked, halves in (
            ("weight", block.qkv_weight, block.gate_up_weight), ("bias", block.qkv_bias, block.gate_up_bias),
        ):  # fmt: skip
            if stacked is not None:
                arrays[f"{at}self_attn.q_proj.{kind}"] = stacked[:q]
                arrays[f"{at}self_attn.k_proj.{kind}"] = stacked[q : q + kv]
                arrays[f"{at}self_attn.v_proj.{kind}"] = stacked[q + kv :]
            if halves is not None:
                arrays[f"{at}mlp.gate_proj.{kind}"], arrays[f"{at}mlp.up_proj.{kind}"] = halves[:i], halves[i:]
        for field, (name,) in HF_BLOCK.items():
            if getattr(block, field) is not None:
                arrays[at + name] = getattr(block, field)
    return arrays if params.head is params.embedding else arrays | {"lm_head.weight": params.head}


def config_json(params: LlamaParams, model_type: str) -> dict[str, Any]:
    config = params.config
    return {
        "model_type": model_type, "vocab_size": config.vocab_size, "hidden_size": config.width,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads, "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads, "max_position_embeddings": config.num_positions,
        "rms_norm_eps": config.norm_epsilon, "rope_theta": config.rope.theta, "tie_word_embeddings": config.tied_head,
    }  # fmt: skip


def gguf_arrays(params: LlamaParams, architecture: str) -> dict[str, np.ndarray]:
    """Names and layout of llama.cpp's converter, which moves the rows of queries and keys of a "llama" only: a head's rows
    a0 a1 .. b0 b1 .. become a0 b0 a1 b1 .. ."""
    dim, arrays = params.config.head_dim, {}
    for name, array in hf_arrays(params).items():
        if name in GGUF_NAMES:
            arrays[GGUF_NAMES[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        inner, kind = rest.rsplit(".", 1)
        if architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            order = [
                head + half * dim // 2 + plane
                for head in range(0, len(array), dim)
                for plane in range(dim // 2)
                for half in (0, 1)
            ]
            array = array[order]
        arrays[f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"] = array
    return arrays


def gguf_metadata(params: LlamaParams, architecture: str) -> dict[str, Any]:
    config = params.config
    named = {
        "context_length": config.num_positions, "embedding_length": config.width, "block_count": config.num_layers,
        "feed_forward_length": config.inner, "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": float(config.norm_epsilon),
        "rope.freq_base": float(config.rope.theta), "rope.dimension_count": config.head_dim,
    }  # fmt: skip
    end = 256
    return {
        "general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in named.items()},
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": [*ALPHABET, "<|end|>", "he"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 1], "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": end, "tokenizer.ggml.bos_token_id": end, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip


# The format by hand (ggml/docs/gguf.md).
U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """Type and payload."""
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", U32, value)
        case float():
            return struct.pack("<If", F32, value)
        case str():
            return struct.pack("<I", STRING) + text(value)
        case list():
            inner = [typed(each) for each in value]
            return (
                struct.pack("<I", ARRAY) + inner[0][:4] + struct.pack("<Q", len(inner)) + b"".join(each[4:] for each in inner)
            )
    raise TypeError(value)


def entry(key: str, value: Any) -> bytes:
    return text(key) + (value if isinstance(value, bytes) else typed(value))


def tensor(name: str, dims: Sequence[int], code: int, offset: int) -> bytes:
    """`dims` as the format has them, the contiguous one first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


def header(
    entries: Sequence[bytes], tensors: Sequence[bytes], version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    listed, named = counts or (len(tensors), len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, listed, named) + b"".join(entries) + b"".join(tensors)


Stored = tuple[str, tuple[int, ...], bytes]  # encoding, shape as NumPy has it, bytes


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Stored], alignment: int = 32
) -> Path:
    """A whole file. Arrays are stored as F32."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    listed, data = [], b""
    for name, value in tensors.items():
        code, shape, raw = ("F32", value.shape, value.astype("<f4").tobytes()) if isinstance(value, np.ndarray) else value
        data += b"\0" * (-len(data) % alignment)
        listed.append(tensor(name, shape[::-1], CODES[code], len(data)))
        data += raw
    head = header([entry(key, value) for key, value in metadata.items()], listed)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def write_llama2c(path: Path, params: LlamaParams, legacy: bool) -> Path:
    """llama2.c's export: a model whose rotary planes are adjacent, float32."""
    config = params.config
    arrays = hf_arrays(params, "")
    per_layer = {name.split(".", 2)[2] for name in arrays if name.startswith("layers.")}

    def every(name: str) -> bytes:
        assert name in per_layer
        return b"".join(arrays[f"layers.{layer}.{name}"].astype("<f4").tobytes() for layer in range(config.num_layers))

    def top(name: str) -> bytes:
        return arrays[name].astype("<f4").tobytes()

    shape = (config.width, config.inner, config.num_layers, config.num_heads, config.num_kv_heads)
    attention = b"".join(every(f"self_attn.{name}_proj.weight") for name in "qkvo")
    mlp = b"".join(every(f"mlp.{name}_proj.weight") for name in ("gate", "down", "up"))
    norms = every("input_layernorm.weight"), every("post_attention_layernorm.weight"), top("norm.weight")
    table = top("embed_tokens.weight")
    head = b"" if config.tied_head else top("lm_head.weight")
    if legacy:
        vocab = config.vocab_size if config.tied_head else -config.vocab_size
        start = struct.pack("<7i", *shape, vocab, config.num_positions)
        unused = b"\x7f" * (8 * config.num_positions * config.head_dim // 2)
        path.write_bytes(start + table + norms[0] + attention + norms[1] + mlp + norms[2] + unused + head)
    else:
        start = struct.pack("<Ii7iB", 0x616B3432, 1, *shape, config.vocab_size, config.num_positions, config.tied_head)
        path.write_bytes(start.ljust(256, b"\0") + b"".join(norms) + table + attention + mlp + head)
    return path


def write_tokenizer_bin(path: Path, pieces: Sequence[tuple[str, float]] = ()) -> Path:
    """Unknown, beginning, end, 256 bytes, then `pieces` with their scores."""
    tokens = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0)]
    tokens += [(f"<0x{byte:02X}>", 0.0) for byte in range(256)] + list(pieces)
    rows = [struct.pack("<fi", score, len(name.encode())) + name.encode() for name, score in tokens]
    path.write_bytes(struct.pack("<i", max(len(name.encode()) for name, _ in tokens)) + b"".join(rows))
    return path


def every_llama_array(params: LlamaParams) -> dict[str, np.ndarray | None]:
    top = {field.name: getattr(params, field.name) for field in fields(params) if field.name not in ("config", "blocks")}
    return top | {f"{layer}.{name}": array for layer, block in enumerate(params.blocks) for name, array in vars(block).items()}


def assert_same_llama(one: LlamaParams, other: LlamaParams) -> None:
    """The same bits in every array, and the same dtypes."""
    ours, theirs = every_llama_array(one), every_llama_array(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        if array is None:
            assert theirs[name] is None, name
        else:
            assert array.dtype == theirs[name].dtype, name
            assert np.array_equal(array, theirs[name], equal_nan=True), name
