"""llama2.c's files (karpathy/llama2.c): a model in the legacy format or version 1, beside it a tokenizer.

Both hold float32 matrices [out, in], one kind of tensor for all layers after the other. Their rotary planes are adjacent
pairs; the base 10000 and the norm's 1e-5 are not in the file but in run.c.
"""

import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nanokv.backend import Backend
from nanokv.errors import CheckpointError, ConfigError, TokenizerError
from nanokv.models.llama_config import LlamaConfig
from nanokv.rope import Rope
from nanokv.tokenizer import Tokenizer
from nanokv.tokenizer_spm import spm_tokenizer
from weights.checkpoint import Checkpoint
from weights.llama import EMBEDDING, HEAD, NORM, read_llama
from weights.tensors import StoredTensor

MAGIC = 0x616B3432  # "ak42"; the legacy format has none
VERSION_1_HEADER = 256
SHAPE = struct.Struct("<7i")  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
UNKNOWN, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
LONGEST_TOKEN = 1 << 16
TOKENIZER = re.compile(r"tokenizer\.bin|tok\d+\.bin")

Order = list[tuple[str, tuple[int, ...]]]  # names without layer for tensors of all layers


def is_llama2c(path: Path) -> bool:
    """Whether a file is one of llama2.c's models: it begins with their mark or, the legacy format having none, lies beside
    one of their tokenizers."""
    if path.suffix != ".bin" or TOKENIZER.fullmatch(path.name) or not path.is_file():
        return False
    with open(path, "rb") as file:
        marked = file.read(4) == struct.pack("<I", MAGIC)
    return marked or any(TOKENIZER.fullmatch(name) for name in os.listdir(path.parent))


def find_tokenizer(path: Path, vocab_size: int) -> Path:
    """The tokenizer beside the model at `path`: tokenizer.bin, or that of its vocabulary's size, such as tok512.bin."""
    names = "tokenizer.bin", f"tok{vocab_size}.bin"
    for name in names:
        if (path.parent / name).is_file():
            return path.parent / name
    raise TokenizerError(f"{path} needs llama2.c's tokenizer beside it: {' or '.join(names)}")


def load_llama2c(path: Path, tokenizer: Path | None, name: str, dtype: str, backend: Backend) -> Checkpoint:
    """The model at `path` with the tokenizer of the second file, or of the one beside it, its weights as `dtype` in the
    backend's memory. Raises CheckpointError, ConfigError or TokenizerError, each naming the file."""
    config, tensors = read_layout(path)
    vocabulary = read_tokenizer(tokenizer or find_tokenizer(path, config.vocab_size), config.vocab_size)
    params = read_llama(tensors, config, dtype, backend, path)
    return Checkpoint(name, params.config, params, vocabulary, frozenset({BOS, EOS}), prefix=(BOS,))


def read_layout(path: Path) -> tuple[LlamaConfig, dict[str, StoredTensor]]:
    """The configuration, and where each tensor is. The file must be exactly as long as its header makes it."""
    try:
        with open(path, "rb") as file:
            head = file.read(VERSION_1_HEADER)
            size = file.seek(0, 2)
    except OSError as reason:
        raise CheckpointError(f"{path} cannot be read: {reason.strerror}") from None
    if len(head) < SHAPE.size:
        raise CheckpointError(f"{path} is too short for llama2.c's header")
    legacy = struct.unpack_from("<I", head)[0] != MAGIC
    if legacy:
        numbers = SHAPE.unpack_from(head)
        start, tied = SHAPE.size, numbers[5] > 0  # a negative vocabulary size says that there is a head of its own
    else:
        start, numbers, tied = VERSION_1_HEADER, *_version_1(path, head)
    config = _config(path, numbers, tied)
    tensors, end = {}, start
    for tensor_name, shape in _expanded(_legacy_order(config) if legacy else _version_1_order(config), config.num_layers):
        if not tensor_name.startswith("freq_cis"):
            tensors[tensor_name] = StoredTensor(path, tensor_name, "F32", shape, end)
        end += 4 * math.prod(shape)
    if end != size:
        raise CheckpointError(
            f"{path} has {size} bytes, but its header makes it {end}: it is cut, damaged, or another kind of file"
        )
    return config, tensors


def _version_1(path: Path, head: bytes) -> tuple[tuple[int, ...], bool]:
    version = struct.unpack_from("<i", head, 4)[0]
    if version != 1:
        raise CheckpointError(f"{path} is llama2.c's version {version}: the legacy format and version 1 are supported")
    if len(head) < VERSION_1_HEADER:
        raise CheckpointError(f"{path} ends inside its header: it is cut")
    return SHAPE.unpack_from(head, 8), head[8 + SHAPE.size] == 1


def _config(path: Path, numbers: tuple[int, ...], tied: bool) -> LlamaConfig:
    dim, hidden, layers, heads, kv_heads, vocab, positions = numbers
    raw = {
        "model_type": "llama", "hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": abs(vocab),
        "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
    }  # fmt: skip
    try:
        config = LlamaConfig.from_dict(raw)
        return replace(config, rope=Rope(config.head_dim, adjacent=True), eos_token_ids=(BOS, EOS))
    except ConfigError as reason:
        raise ConfigError(f"{path}: {reason}") from None


def _matrices(config: LlamaConfig) -> Order:
    """wq, wk, wv, wo."""
    e, q, kv = config.width, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        ("self_attn.q_proj.weight", (q, e)), ("self_attn.k_proj.weight", (kv, e)), ("self_attn.v_proj.weight", (kv, e)),
        ("self_attn.o_proj.weight", (e, q)),
    ]  # fmt: skip


def _mlp(config: LlamaConfig) -> Order:
    """w1, w2, w3."""
    e, i = config.width, config.inner
    return [("mlp.gate_proj.weight", (i, e)), ("mlp.down_proj.weight", (e, i)), ("mlp.up_proj.weight", (i, e))]


def _legacy_order(config: LlamaConfig) -> Order:
    """As legacy_export writes it. The two tables of cosines and sines are not read by run.c either."""
    table, norm = (config.vocab_size, config.width), (config.width,)
    rotations = (config.num_positions, config.head_dim // 2)
    return [
        (EMBEDDING, table), ("input_layernorm.weight", norm), *_matrices(config),
        ("post_attention_layernorm.weight", norm), *_mlp(config), (NORM, norm),
        ("freq_cis_real", rotations), ("freq_cis_imag", rotations), *([] if config.tied_head else [(HEAD, table)]),
    ]  # fmt: skip


def _version_1_order(config: LlamaConfig) -> Order:
    """As version1_export writes it: all norms first."""
    table, norm = (config.vocab_size, config.width), (config.width,)
    return [
        ("input_layernorm.weight", norm), ("post_attention_layernorm.weight", norm), (NORM, norm), (EMBEDDING, table),
        *_matrices(config), *_mlp(config), *([] if config.tied_head else [(HEAD, table)]),
    ]  # fmt: skip


def _expanded(order: Order, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A tensor of all layers is one tensor after the other."""
    for name, shape in order:
        if name in (EMBEDDING, NORM, HEAD) or name.startswith("freq_cis"):
            yield name, shape
        else:
            yield from ((f"layers.{layer}.{name}", shape) for layer in range(layers))


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """tokenizer.bin: the longest token's length, then a score, a length and the bytes of each token. Ids 0, 1 and 2 are
    unknown, beginning and end of text, then come the 256 bytes. Spaces are written as such. Raises TokenizerError."""
    try:
        data = path.read_bytes() if path.stat().st_size <= vocab_size * (8 + LONGEST_TOKEN) else b""
    except OSError as reason:
        raise TokenizerError(f"{path} cannot be read: {reason.strerror}") from None
    if vocab_size < FIRST_BYTE + 256:
        raise TokenizerError(
            f"{path}: a vocabulary of {vocab_size} tokens has no room for {FIRST_BYTE} special ones and 256 bytes"
        )
    entries, at = [], 4
    for index in range(vocab_size):
        if at + 8 > len(data):
            raise TokenizerError(f"{path} ends after {index} of {vocab_size} tokens: it belongs to another model, or is cut")
        score, length = struct.unpack_from("<fi", data, at)
        if not 0 <= length <= len(data) - at - 8:
            raise TokenizerError(f"{path}: token {index} has a length of {length} bytes: the file is damaged")
        at += 8 + length
        entries.append((data[at - length : at], score))
    if at != len(data):
        raise TokenizerError(f"{path} has {len(data) - at} bytes more than {vocab_size} tokens: it belongs to another model")
    try:
        texts = [(entry.decode("utf-8"), score) for entry, score in entries]
    except UnicodeDecodeError:
        raise TokenizerError(f"{path} holds a token that is not UTF-8: it is damaged, or another kind of file") from None
    special = {texts[index][0].strip(): index for index in (UNKNOWN, BOS, EOS)}
    first = FIRST_BYTE + 256
    pieces = {text: (first + number, score) for number, (text, score) in reversed(list(enumerate(texts[first:])))}
    byte_tokens = {byte: FIRST_BYTE + byte for byte in range(256)}
    return spm_tokenizer(pieces, byte_tokens, special, {}, UNKNOWN, str(path), space=" ")
