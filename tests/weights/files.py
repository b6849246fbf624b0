"""Model directories made for a test: small random GPT-2s as files, written without the code that reads them."""

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from nanokv.models.config import GPT2Config
from nanokv.models.gpt2 import GPT2Params, random_params

CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
Raw = tuple[str, tuple[int, ...], bytes]  # dtype code, shape, bytes

# GPT-2's tokenizer alphabet: a printable Latin-1 character for itself, the other bytes from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = [chr(byte) for byte in PRINTABLE] + [chr(256 + n) for n in range(256 - len(PRINTABLE))]
VOCAB = 262  # 256 bytes, "he", "<|endoftext|>" at 257, and room that the model has and the tokenizer does not

CONFIG: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 12, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "eos_token_id": 257, "bos_token_id": 257,
}  # fmt: skip


def stored(array: np.ndarray) -> Raw:
    """As the format has it: little-endian, row by row."""
    return CODES[array.dtype.name], array.shape, array.astype(array.dtype.newbyteorder("<")).tobytes()


def bfloat16(array: np.ndarray) -> Raw:
    """The upper halves of float32 values, which must have nothing in the lower ones."""
    bits = array.astype("<f4").view("<u4")
    assert not (bits & 0xFFFF).any()
    return "BF16", array.shape, (bits >> 16).astype("<u2").tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, Raw], metadata: dict[str, str] | None = None) -> None:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (code, shape, raw) in tensors.items():
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def arrays_of(params: GPT2Params, prefix: str = "") -> dict[str, np.ndarray]:
    """Names and layout of Hugging Face's files, Conv1D weights [in, out]. A head of its own is there, a tied one not."""
    names = {
        "ln_1_weight": "ln_1.weight", "ln_1_bias": "ln_1.bias", "qkv_weight": "attn.c_attn.weight",
        "qkv_bias": "attn.c_attn.bias", "proj_weight": "attn.c_proj.weight", "proj_bias": "attn.c_proj.bias",
        "ln_2_weight": "ln_2.weight", "ln_2_bias": "ln_2.bias", "fc_weight": "mlp.c_fc.weight", "fc_bias": "mlp.c_fc.bias",
        "out_weight": "mlp.c_proj.weight", "out_bias": "mlp.c_proj.bias",
    }  # fmt: skip
    arrays = {prefix + "wte.weight": params.wte, prefix + "wpe.weight": params.wpe}
    for layer, block in enumerate(params.blocks):
        for field, name in names.items():
            arrays[f"{prefix}h.{layer}.{name}"] = getattr(block, field).T
    arrays |= {prefix + "ln_f.weight": params.ln_f_weight, prefix + "ln_f.bias": params.ln_f_bias}
    return arrays if params.head is params.wte else arrays | {"lm_head.weight": params.head}


def params_for(config: dict[str, Any], seed: int = 0, dtype: type = np.float32) -> GPT2Params:
    """Random weights for a config.json: biases not zero, norms not one, nothing symmetric."""
    return random_params(GPT2Config.from_dict(config), seed, dtype, scale=0.3)


def write_tokenizer(directory: Path) -> None:
    tokens = [*ALPHABET, "he", "<|endoftext|>"]
    (directory / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\nh e\n", encoding="utf-8")


def write_model(directory: Path, config: dict[str, Any], tensors: Mapping[str, np.ndarray | Raw]) -> Path:
    """A complete directory: config.json, model.safetensors, vocab.json, merges.txt."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    raw = {name: stored(value) if isinstance(value, np.ndarray) else value for name, value in tensors.items()}
    write_safetensors(directory / "model.safetensors", raw, {"format": "pt"})
    write_tokenizer(directory)
    return directory


def shard(directory: Path, count: int) -> Path:
    """Splits model.safetensors of a directory written by write_model into `count` files with an index."""
    single = directory / "model.safetensors"
    content = single.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__")
    names, places = list(header), {}
    for part in range(count):
        file = f"model-{part + 1:05}-of-{count:05}.safetensors"
        tensors: dict[str, Raw] = {}
        for name in names[part::count]:
            begin, end = header[name]["data_offsets"]
            tensors[name] = header[name]["dtype"], tuple(header[name]["shape"]), content[start + begin : start + end]
            places[name] = file
        write_safetensors(directory / file, tensors)
    single.unlink()
    index = {"metadata": {"total_size": len(content) - start}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def every_array(params: GPT2Params) -> dict[str, np.ndarray]:
    """All arrays by field, to compare two models."""
    top = {field.name: getattr(params, field.name) for field in fields(params) if field.name not in ("config", "blocks")}
    for layer, block in enumerate(params.blocks):
        top |= {f"{layer}.{name}": array for name, array in vars(block).items()}
    return top


def assert_same(one: GPT2Params, other: GPT2Params) -> None:
    """The same bits in every array (a NaN equals a NaN), and the same dtypes."""
    ours, theirs = every_array(one), every_array(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        assert np.array_equal(array, theirs[name], equal_nan=True), name
