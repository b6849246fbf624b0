"""From a GGUF file's metadata to what each layer caches, and from its tensor list to the size of its weights.

Keys are named `<architecture>.attention.head_count_kv` and so on (the GGUF specification, ggml/docs/gguf.md). Which layers
of an architecture are windowed is in llama.cpp's code (src/llama-model.cpp), not in the file: the table below repeats it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nanokv.errors import ConfigError
from nanokv.gguf_header import read_header
from sim.planner.geometry import drop_idle_windows
from sim.planner.layers import Geometry, Kind, Layer

PLAIN = frozenset(
    "llama gpt2 gptj gptneox falcon bloom mpt starcoder starcoder2 phi2 phimoe qwen qwen2 qwen2moe qwen2vl qwen3 "
    "qwen3moe qwen3vl qwen3vlmoe gemma stablelm command-r dbrx olmo olmoe olmo2 granite granitemoe chatglm glm4 "
    "glm4moe baichuan internlm2 nemotron minicpm deepseek orion xverse refact arcee seed_oss ernie4_5 smollm3 exaone "
    "deci minimax-m2 hunyuan-dense".split()
)
PERIOD: Mapping[str, int] = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "llama4": 4}  # last is full
EVERY_LAYER = frozenset({"phi3"})
LATENT = frozenset({"deepseek2"})
DEFAULT_WINDOW: Mapping[str, int] = {"llama4": 8192, "gemma2": 4096}  # where the file says nothing

SPLIT_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")

# Keys that shape caches in ways that only some architectures have; ".ssm." and the like stand for all keys with that part.
SHAPING = ("sliding_window", "kv_lora_rank", ".ssm.", "shared_kv_layers", "indexer", "_swa", "shortconv", "chunk_size", "kda")


def read_gguf(path: Path) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """(metadata without the token lists, (elements, bytes) of each tensor). CheckpointError for a damaged file.

    Of a model in several files (metadata split.count) this is one file; other_parts() are the others.
    """
    header = read_header(path)
    kept = {name: value for name, value in header.metadata.items() if not name.startswith("tokenizer.")}
    metadata = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in kept.items()}
    return metadata, [(tensor.elements, tensor.size) for tensor in header.tensors.values()]


def other_parts(path: Path, count: int) -> list[Path]:
    """The other files of a model that gguf-split has cut in `count`: NAME-00001-of-00003.gguf and so on. ConfigError names
    one that is not there."""
    found = SPLIT_NAME.fullmatch(path.name)
    if found is None or int(found[2]) != count:
        raise ConfigError(f"{path.name} is one of {count} files, whose names do not follow from its own")
    parts = [path.with_name(f"{found[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.exists():
            raise ConfigError(f"{part.name} is not there: the size of the weights is not known")
    return [part for part in parts if part != path]


def geometry_from_gguf(metadata: Mapping[str, Any], *, expand_latent: bool = False) -> Geometry:
    """What each layer caches. ConfigError names the key that is missing, absurd, or not known of the architecture."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ConfigError("the GGUF file has no general.architecture")
    known = arch in PLAIN or arch in PERIOD or arch in EVERY_LAYER or arch in LATENT
    if not known:
        raise ConfigError(f"unknown attention family: GGUF architecture {arch!r} is not one that the planner knows")
    count, heads = _integer(metadata, f"{arch}.block_count"), _largest(metadata, f"{arch}.attention.head_count")
    positions = _integer(metadata, f"{arch}.context_length", 0) or None
    read = {f"{arch}.attention.sliding_window"} if arch in PERIOD or arch in EVERY_LAYER else set()
    if arch in LATENT:
        read |= {f"{arch}.attention.kv_lora_rank"}
        layers = [_latent(metadata, arch, heads, expand_latent)] * count
    else:
        layers = _windows(metadata, arch, _grouped(metadata, arch, count, heads))
    for key in metadata:
        if key not in read and any(part in key for part in SHAPING) and not key.startswith("general.") and metadata[key]:
            raise ConfigError(f"{key} {metadata[key]!r} changes what a layer caches, and {arch!r} is not known to have it")
    kept, notes = drop_idle_windows(tuple(layers), positions)
    note = "a GGUF file names no KV dtype: float16, llama.cpp's default, is assumed"
    return Geometry(arch, kept, heads, positions, "float16", notes=tuple(dict.fromkeys([note, *notes])))


def _grouped(metadata: Mapping[str, Any], arch: str, count: int, heads: int) -> list[Layer]:
    """Full-attention layers; head_count_kv may be one number or one a layer, 0 where a layer has no attention."""
    given = metadata.get(f"{arch}.attention.head_count_kv", heads)
    per_layer = list(given) if isinstance(given, list) else [given] * count
    if len(per_layer) != count:
        raise ConfigError(f"{arch}.attention.head_count_kv has {len(per_layer)} entries, but {arch}.block_count is {count}")
    dim_k, dim_v = (_integer(metadata, f"{arch}.attention.{name}_length", 0) for name in ("key", "value"))
    if not (dim_k and dim_v):
        width = _integer(metadata, f"{arch}.embedding_length")
        if width % heads:
            raise ConfigError(f"{arch}.embedding_length {width} is not divisible by {arch}.attention.head_count {heads}")
        dim_k, dim_v = dim_k or width // heads, dim_v or width // heads
    layers = []
    for kv_heads in per_layer:
        if not isinstance(kv_heads, int) or kv_heads < 0 or (kv_heads and heads % kv_heads):
            raise ConfigError(f"{arch}.attention.head_count {heads} is not divisible by head_count_kv {kv_heads!r}")
        layers.append(Layer(Kind.FULL, kv_heads, dim_k, dim_v) if kv_heads else Layer(Kind.NONE))
    return layers


def _windows(metadata: Mapping[str, Any], arch: str, layers: list[Layer]) -> list[Layer]:
    if arch in PLAIN:
        return layers
    window = _integer(metadata, f"{arch}.attention.sliding_window", DEFAULT_WINDOW.get(arch, 0))
    if not window and arch in PERIOD and arch != "exaone4":
        raise ConfigError(f"{arch}: some layers are windowed, but the file has no {arch}.attention.sliding_window")
    if not window:
        return layers
    kind = Kind.CHUNKED if arch == "llama4" else Kind.SLIDING
    period = PERIOD.get(arch, 0)
    return [
        layer if layer.kind is Kind.NONE or (period and (i + 1) % period == 0) else replace(layer, kind=kind, window=window)
        for i, layer in enumerate(layers)
    ]


def _latent(metadata: Mapping[str, Any], arch: str, heads: int, expand: bool) -> Layer:
    """DeepSeek's MLA. Newer files give the expanded widths as key_length_mla, older ones as key_length."""
    rank = _integer(metadata, f"{arch}.attention.kv_lora_rank")
    if not expand:
        return Layer(Kind.MLA, 1, rank + _integer(metadata, f"{arch}.rope.dimension_count"), 0)
    dim_k, dim_v = (_expanded(metadata, f"{arch}.attention.{name}_length") for name in ("key", "value"))
    return Layer(Kind.FULL, heads, dim_k, dim_v)


def _expanded(metadata: Mapping[str, Any], key: str) -> int:
    return _integer(metadata, f"{key}_mla" if f"{key}_mla" in metadata else key)


def _largest(metadata: Mapping[str, Any], key: str) -> int:
    """A head count that may be given for each layer: all that are not 0 must agree."""
    value = metadata.get(key)
    if not isinstance(value, list):
        return _integer(metadata, key)
    counts = sorted({_integer({key: item}, key) for item in value if item})
    if len(counts) != 1:
        raise ConfigError(f"{key} {value!r}: layers with different numbers of query heads are not supported")
    return counts[0]


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if value is None:
        raise ConfigError(f"the GGUF file has no {key}")
    if not isinstance(value, int) or isinstance(value, bool) or not (0 if default is not None else 1) <= value <= 1 << 31:
        raise ConfigError(f"{key} {value!r} is not a whole number between 1 and {1 << 31}")
    return value
