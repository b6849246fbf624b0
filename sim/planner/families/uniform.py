"""Families whose layers are all alike: multi-head, grouped-query, multi-query, with or without one window for all."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanokv.errors import ConfigError
from sim.planner.families.base import Reader, attention, grouped, head_dim, layer_numbers, multi_head, plain, windowed
from sim.planner.fields import Fields
from sim.planner.layers import Kind, Layer


def gpt_bigcode(f: Fields) -> list[Layer]:
    """StarCoder 1, SantaCoder, Granite code: `multi_query` means one key-value head."""
    heads = f.integer("heads")
    f.ignore("kv_heads")  # files that repeat it derive it from multi_query
    kv_heads = 1 if f.flag("multi_query", True) else heads
    return [grouped(f, heads, kv_heads, head_dim(f, heads))] * f.integer("layers")


def falcon(f: Fields) -> list[Layer]:
    """Both decoder architectures. The new one groups; the old one has one key-value head or, without multi_query, all."""
    heads = f.integer("heads")
    if f.flag("new_decoder_architecture", False):
        f.ignore("multi_query")
        kv_heads = f.optional_integer("kv_heads", default=heads) or heads
    else:
        f.ignore("kv_heads")
        kv_heads = 1 if f.flag("multi_query", True) else heads
    return [grouped(f, heads, kv_heads, head_dim(f, heads))] * f.integer("layers")


def refined_web(f: Fields) -> list[Layer]:
    """Falcon-40B's first file: always the new architecture, `n_head_kv` key-value heads."""
    f.ignore("multi_query", "new_decoder_architecture")
    return plain(f)


def refined_web_model(f: Fields) -> list[Layer]:
    """Falcon-7B's and Falcon-RW's first files: always the old architecture, and `multi_query` must be there."""
    if not f.has("multi_query"):
        raise ConfigError("a RefinedWebModel file without multi_query does not say how many key-value heads there are")
    f.ignore("new_decoder_architecture")
    heads = f.integer("heads")
    f.ignore("kv_heads")
    kv_heads = 1 if f.flag("multi_query", True) else heads
    return [grouped(f, heads, kv_heads, head_dim(f, heads))] * f.integer("layers")


def mpt(f: Fields) -> list[Layer]:
    """The attention is an object of its own: attn_type and, for grouped queries, kv_n_heads (llm-foundry)."""
    heads = f.integer("heads")
    inner = f.child("attn_config", {"attn_type": "multihead_attention"}) or Fields(
        {}, {"attn_type": "multihead_attention"}, f.source
    )
    kind = inner.value("attn_type")
    if kind == "grouped_query_attention":
        kv_heads = inner.integer("kv_n_heads")
    elif kind in ("multihead_attention", "multiquery_attention"):
        kv_heads = heads if kind == "multihead_attention" else 1
    else:
        raise ConfigError(f"attn_config.attn_type {kind!r} is not a kind of attention that MPT has")
    if inner.value("sliding_window_size") not in (None, -1):
        raise ConfigError(f"attn_config.sliding_window_size {inner.value('sliding_window_size')!r} is not supported for MPT")
    return [grouped(f, heads, kv_heads, head_dim(f, heads))] * f.integer("layers")


def dbrx(f: Fields) -> list[Layer]:
    """kv_n_heads sits in attn_config; DbrxAttentionConfig's default is 1. A copy beside it must agree."""
    heads = f.integer("heads")
    inner = f.child("attn_config", {"kv_n_heads": 1}) or Fields({}, {"kv_n_heads": 1}, f.source)
    kv_heads = inner.integer("kv_n_heads")
    if f.integer("kv_heads", default=kv_heads) != kv_heads:
        raise ConfigError(
            f"attn_config.kv_n_heads {kv_heads} and {f.key('kv_heads')} {f.integer('kv_heads')} contradict each other"
        )
    return [grouped(f, heads, kv_heads, head_dim(f, heads))] * f.integer("layers")


def chatglm(f: Fields) -> list[Layer]:
    """ChatGLM 1 to GLM-4: grouped where multi_query_attention is set, else multi-head; kv_channels is the head's width."""
    heads = f.integer("heads")
    kv_heads = f.integer("multi_query_group_num") if f.flag("multi_query_attention", False) else heads
    f.ignore("multi_query_group_num", "kv_heads")
    return [grouped(f, heads, kv_heads, head_dim(f, heads))] * f.integer("layers")


def gpt2(f: Fields) -> list[Layer]:
    """GPT-2 is multi-head; the runtime also runs it with num_key_value_heads, so the planner reads that key."""
    return plain(f)


def nemotron_nas(f: Fields) -> list[Layer]:
    """DeciLM as NVIDIA's search leaves it: each block has its own group size, or no attention at all."""
    heads = f.integer("heads")
    dim = head_dim(f, heads)
    if f.optional_integer("kv_heads") is not None:
        raise ConfigError("num_key_value_heads is set beside block_configs, which give each layer its own")
    blocks = f.one_per_layer("block_configs", f.integer("layers"))
    if blocks is None:
        raise ConfigError("config.json has no 'block_configs', where this family keeps each layer's heads")
    return [_nas_layer(f, i, block, heads, dim) for i, block in enumerate(blocks)]


def _nas_layer(f: Fields, i: int, block: Any, heads: int, dim: int) -> Layer:
    where = f"block_configs[{i}].attention"
    spec = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{where} is missing")
    for key in ("window_length", "num_sink_tokens", "sparsify", "unshifted_sink"):
        if spec.get(key):
            raise ConfigError(f"{where}.{key} {spec[key]!r} is not supported")
    if spec.get("no_op") or spec.get("replace_with_linear"):
        return Layer(Kind.NONE)
    group = f.check_integer(f"{where}.n_heads_in_group", spec.get("n_heads_in_group"), 1, heads)
    if heads % group:
        raise ConfigError(f"num_attention_heads {heads} is not divisible by {where}.n_heads_in_group {group}")
    return grouped(f, heads, heads // group, dim)


def deci(f: Fields) -> list[Layer]:
    """DeciLM 1: num_key_value_heads_per_layer."""
    heads = f.integer("heads")
    dim = head_dim(f, heads)
    counts = f.one_per_layer("num_key_value_heads_per_layer", f.integer("layers"))
    if counts is None:
        raise ConfigError("config.json has no 'num_key_value_heads_per_layer'")
    f.ignore("kv_heads")
    key = "num_key_value_heads_per_layer"
    return [grouped(f, heads, f.check_integer(f"{key}[{i}]", count, 1, heads), dim) for i, count in enumerate(counts)]


def mllama(f: Fields) -> list[Layer]:
    """Llama 3.2 Vision: some layers attend to the image instead of the text (default: MllamaTextConfig's eight)."""
    layer, count = attention(f), f.integer("layers")
    crossing = layer_numbers(f, "cross_attention_layers", count) or set()
    return [replace(layer, kind=Kind.CROSS) if i in crossing else layer for i in range(count)]


READERS: dict[str, Reader] = {
    **dict.fromkeys(
        ("gptj", "codegen", "gpt_neox", "opt", "bloom", "persimmon", "baichuan", "internlm", "qwen", "stablelm_alpha"),
        multi_head,
    ),
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "mpt": mpt,
    "dbrx": dbrx,
    "chatglm": chatglm,
    "falcon": falcon,
    "RefinedWeb": refined_web,
    "RefinedWebModel": refined_web_model,
    "nemotron-nas": nemotron_nas,
    "deci": deci,
    "mllama_text_model": mllama,
    **dict.fromkeys(
        (
            "llama", "Yi", "deepseek", "internlm2", "internlm3", "stablelm", "stablelm_epoch", "phi", "phi-msft",
            "mixformer-sequential", "phi3small", "gemma", "glm", "glm4", "glm4_moe", "cohere", "olmo", "olmo2", "olmoe",
            "flex_olmo", "nemotron", "granite", "granitemoe", "granitemoeshared", "qwen3_vl_text",
            "glm4v_text",
            "glm4v_moe_text", "arcee", "apertus", "helium",
            "seed_oss", "ernie4_5", "hunyuan_v1_dense", "nanochat",
        ),
        plain,
    ),
    **dict.fromkeys(
        ("mistral", "ministral3", "mixtral", "starcoder2", "phi3", "phi3_v", "phimoe", "phi4_multimodal", "phi4mm"), windowed
    ),
}  # fmt: skip
