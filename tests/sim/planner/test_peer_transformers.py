"""The strongest check there is: build a tiny model of each family with transformers, run it, and look at its cache."""

import inspect
import json
from typing import Any

import pytest

from nanokv.errors import ConfigError
from sim.planner.families import READERS
from sim.planner.families.defaults import DEFAULTS
from sim.planner.fields import SPELLINGS
from sim.planner.geometry import TEXT_TYPES, geometry_from_config
from sim.planner.layers import Kind, Layer
from sim.planner.parameters import SHAPES, count_parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # transformers warns of its own deprecations
]

TOKENS, BATCH = 11, 2  # more tokens than any window or chunk below

# Whatever of these a configuration class has, it gets: widths that all differ, so that no two can be confused.
COMMON: dict[str, Any] = {
    "vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16,
    "head_dim": 12, "sliding_window": 5, "max_position_embeddings": 64,
    "moe_intermediate_size": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 8,
    "kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10,
    "index_head_dim": 14, "index_n_heads": 2, "index_topk": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_expand": 2,
    "use_mamba_kernels": False,
    "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "d_model": 32, "n_heads": 4, "n_layers": 3, "num_layers": 4,
    "num_heads": 4, "ffn_dim": 16, "word_embed_proj_dim": 32, "rotary_dim": 4,
}  # fmt: skip

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
DROP = object()
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4},
    },
    "helium": {"head_dim": 8},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen2_vl_text": {"rope_parameters": _MROPE, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 4},
    "qwen3_moe": {"use_sliding_window": True},
    "llama4_text": {"attention_chunk_size": 5},
    "mimo_v2_flash": {"num_attention_heads": 8},
    "smollm3": {"use_sliding_window": True},
    "gemma3n_text": {
        "num_hidden_layers": 11, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "num_hidden_layers": 12, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32,
        "global_head_dim": 20, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "minimax": {"sliding_window": None},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "attention"], "num_hidden_layers": DROP, "sliding_window": None,
        "mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2, "conv_kernel": 3, "expand": 1,
    },
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    "bamba": {"attn_layer_indices": [1, 4]},
    "falcon_h1": {"mamba_d_ssm": 48, "mamba_d_head": 6},
    "kimi_linear": {"linear_head_dim": 6, "linear_num_heads": 3},
    "deepseek_v32": {"num_key_value_heads": 4},
    "glm_moe_dsa": {"index_topk_freq": 2, "num_key_value_heads": 4},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 4, "index_block_size": 4},
    "glm4v_text": {"head_dim": DROP, "rope_parameters": _MROPE},
    "glm4v_moe_text": {"head_dim": DROP, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 0]}},
    "lfm2": {"full_attn_idxs": [1, 3], "conv_L_cache": 3},
}  # fmt: skip

# Variants of a family that cache something else.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {"multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    ("gpt_bigcode", {"multi_query": False}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": False}),
    ("gemma4_text", {"attention_k_eq_v": False}),
    ("gemma3_text", {"sliding_window_pattern": 3}),
    ("cohere2", {"sliding_window_pattern": 2}),
    ("llama4_text", {"no_rope_layers": [1, 0, 1, 0, 1, 1]}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"] * 2}),
    ("llama", {"num_key_value_heads": 4, "head_dim": None}),
]

FULL_CACHE = {"gpt_neo"}  # transformers masks the local layers of these but keeps every token; a cache need not
NOT_RUN = {
    "mllama_text_model": "attends to images: no text-only model class",
    "qwen2_5_omni_text": "no model class of its own for text",
    "qwen3_omni_moe_text": "no model class of its own for text",
    "qwen2_vl": "the flat form of qwen2_vl_text, which is run",
    "qwen2_5_vl": "the flat form of qwen2_5_vl_text, which is run",
}


def tiny(model_type: str, **more: Any) -> Any:
    """A small configuration of the family: what the class has of COMMON, then what is special."""
    cls = transformers.CONFIG_MAPPING[model_type]
    names = set(inspect.signature(cls.__init__).parameters)
    values = {**{key: value for key, value in COMMON.items() if key in names}, **SPECIAL.get(model_type, {}), **more}
    return cls(**{key: value for key, value in values.items() if value is not DROP})


def run(config: Any) -> Any:
    """The cache after a forward pass over TOKENS tokens of BATCH sequences, in bfloat16."""
    torch.set_num_threads(1)
    auto = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModel
    model = auto.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        out = model(input_ids=torch.arange(TOKENS).repeat(BATCH, 1) % 29 + 3, use_cache=True)
    return getattr(out, "cache", None) or out.past_key_values


def expected(layer: Layer, model_type: str) -> list[tuple[int, ...]]:
    """The shapes of K and V. transformers drops the token that leaves the window next: W - 1 of W are left."""
    count = layer.tokens(TOKENS)
    if layer.window is not None and count == layer.window:
        count = TOKENS if model_type in FULL_CACHE else count - 1
    if layer.kind is Kind.MLA:  # kept in two parts
        return [(BATCH, 1, count, layer.head_dim_k)]
    return [(BATCH, layer.kv_heads, count, dim) for dim in (layer.head_dim_k, layer.head_dim_v)] if count else []


def found(layer: Layer, cached: Any) -> list[tuple[int, ...]]:
    keys, values = getattr(cached, "keys", None), getattr(cached, "values", None)
    if keys is None or not keys.numel():
        return []
    if layer.kind is Kind.MLA:
        assert keys.shape[:3] == values.shape[:3]
        return [(*keys.shape[:3], keys.shape[3] + values.shape[3])]
    return [tuple(keys.shape), tuple(values.shape)]


def state_bytes(layer: Layer, model_type: str) -> int:
    """The model's own code and SGLang keep MiniMax's matrix in float32; transformers keeps it in the model's dtype."""
    widest = 2 if model_type == "minimax" else 4
    return BATCH * sum(part.heads * part.per_head * min(part.itemsize or 2, widest) for part in layer.state)


def cached_state_bytes(cache: Any, index: int) -> int:
    cached = cache.layers[index] if index < len(cache.layers) else None
    held = [tensor for name in ("conv_states", "recurrent_states") for tensor in _tensors(getattr(cached, name, None))]
    linear = getattr(cache, "linear_cache", [])
    if index < len(linear) and len(linear[index]):
        held.append(linear[index])
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _tensors(states: Any) -> list[Any]:
    values = states.values() if isinstance(states, dict) else states or []
    return [tensor for tensor in values if tensor is not None]


def published(config: Any) -> dict[str, Any]:
    """What would stand in config.json."""
    return json.loads(config.to_json_string(use_diff=False))


FAMILIES = sorted(name for name in READERS if name in transformers.CONFIG_MAPPING and name not in NOT_RUN)


def cases() -> list[Any]:
    plain = [pytest.param(name, {}, id=name) for name in FAMILIES]
    return plain + [pytest.param(name, more, id=f"{name}-{'-'.join(more)}") for name, more in VARIANTS]


@pytest.mark.parametrize(("model_type", "more"), cases())
def test_every_layer_caches_what_transformers_caches(model_type: str, more: dict[str, Any]) -> None:
    config = tiny(model_type, **more)
    geometry = geometry_from_config(published(config))
    cache = run(config)
    assert len(geometry.layers) == config.num_hidden_layers
    for index, layer in enumerate(geometry.layers):
        cached = cache.layers[index] if index < len(cache.layers) else None
        wanted = expected(layer, model_type)
        if model_type == "falcon" and more.get("new_decoder_architecture"):  # transformers repeats K and V for every query head
            wanted = [(BATCH, geometry.num_heads, TOKENS, layer.head_dim_k)] * 2
        assert found(layer, cached) == wanted, f"layer {index}: {layer}"
        assert cached_state_bytes(cache, index) == state_bytes(layer, model_type), f"state of layer {index}: {layer.state}"
        indexer = (
            getattr(cached, "indexer_keys", None) if model_type != "minimax_m3_vl_text" else getattr(cached, "idx_keys", None)
        )
        assert (indexer is not None) == bool(layer.index_bytes)
        if indexer is not None:  # bfloat16 there; DeepSeek's own code keeps fp8 with one float32 scale
            width = indexer.shape[-1]
            assert layer.index_bytes == (2 * width if model_type == "minimax_m3_vl_text" else width + 4)


@pytest.mark.parametrize("model_type", sorted(set(DEFAULTS) & set(transformers.CONFIG_MAPPING)))
def test_class_defaults_are_the_classes_own(model_type: str) -> None:
    """Each value in DEFAULTS is what the configuration class makes of an empty file."""
    row, cls = DEFAULTS[model_type], transformers.CONFIG_MAPPING[model_type]
    config = cls()
    config = getattr(config, "text_config", None) or config
    if hasattr(config, "use_sliding_window"):  # a class forgets the default of a window whose switch is off
        config = type(config)(use_sliding_window=True)
    config.allow_global_per_layer_attribute_access = True
    for name, value in row.values.items():
        if name == "global_head_dim":  # the class takes it as an argument and keeps it in per_layer_config
            assert next(iter(json.loads(config.to_json_string())["per_layer_config"].values()))["head_dim"] == value
            continue
        spelling = next(key for key in SPELLINGS.get(name, (name,)) if getattr(config, key, None) is not None)
        assert plain(getattr(config, spelling)) == plain(value), name


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("outer", "inner"), sorted(TEXT_TYPES.items()))
def test_a_multimodal_class_holds_the_text_family_that_the_table_names(outer: str, inner: str) -> None:
    assert transformers.CONFIG_MAPPING[outer].sub_configs_defaults["text_config"].model_type == inner


REFUSED_WHEN_EMPTY = {
    "nemotron_h": "the pattern of its layers has no default that means a published model",
    "glm4_moe": "the default width is no multiple of the default heads",
    "glm4v_moe_text": "the default width is no multiple of the default heads",
    "qwen3_omni_moe_text": "the default width is no multiple of the default heads",
}


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - set(REFUSED_WHEN_EMPTY)))
def test_an_empty_file_means_the_class_defaults(model_type: str) -> None:
    """The geometry of a nested file that says nothing but its family equals that of the class's own full file."""
    full = geometry_from_config({"text_config": published(transformers.CONFIG_MAPPING[model_type]())})
    bare = geometry_from_config({"text_config": {"model_type": model_type}})
    assert (bare.layers, bare.num_heads) == (full.layers, full.num_heads)


@pytest.mark.parametrize("model_type", sorted(REFUSED_WHEN_EMPTY))
def test_an_empty_file_is_refused_where_the_defaults_make_no_model(model_type: str) -> None:
    with pytest.raises(ConfigError):
        geometry_from_config({"text_config": {"model_type": model_type}})


def test_cross_attention_layers_keep_the_images_tokens() -> None:
    """Llama 3.2 Vision: the text model alone, given an image's states as its vision tower would make them."""
    from transformers.models.mllama.modeling_mllama import MllamaTextModel

    config = tiny("mllama_text_model", cross_attention_layers=[1, 4], head_dim=DROP)
    geometry = geometry_from_config({"text_config": published(config)}, cross_tokens=9)
    model = MllamaTextModel(config).eval()
    mask = torch.zeros(BATCH, 1, TOKENS, 9)
    with torch.no_grad():
        out = model(
            input_ids=torch.arange(TOKENS).repeat(BATCH, 1) + 3,
            cross_attention_states=torch.zeros(BATCH, 9, config.hidden_size),
            cross_attention_mask=mask,
            full_text_row_masked_out_mask=torch.ones(BATCH, 1, TOKENS, 1),
            use_cache=True,
        )
    cache = getattr(out, "cache", None) or out.past_key_values
    for layer, cached in zip(geometry.layers, cache.layers, strict=True):
        count = geometry.cross_tokens if layer.kind is Kind.CROSS else TOKENS
        assert tuple(cached.keys.shape) == tuple(cached.values.shape) == (BATCH, layer.kv_heads, count, layer.head_dim_k)
    assert [layer.kind is Kind.CROSS for layer in geometry.layers] == [False, True, False, False, True, False]


COUNTED = sorted(SHAPES)
FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings")


@pytest.mark.parametrize("model_type", [*COUNTED, "gpt2"])
@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS)], ids=lambda flags: "-".join(flags) or "plain")
def test_parameters_are_counted_as_transformers_counts_them(model_type: str, flags: tuple[str, ...]) -> None:
    """On the meta device, where nothing is allocated; a flag that a class does not have changes neither."""
    names = set(inspect.signature(transformers.CONFIG_MAPPING[model_type].__init__).parameters)
    config = tiny(
        model_type,
        **{flag: not tiny(model_type).tie_word_embeddings if "tie" in flag else True for flag in flags if flag in names},
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    raw = published(config)
    assert count_parameters(raw, geometry_from_config(raw)) == model.num_parameters()


def test_a_sparse_qwen_with_dense_layers_is_counted() -> None:
    config = tiny("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    raw = published(config)
    assert count_parameters(raw, geometry_from_config(raw)) == model.num_parameters()
