"""From a config.json to what each layer of the model caches.

`geometry_from_config` is right or it raises: an unknown family, a missing or absurd value and a contradiction are
ConfigErrors that name the field. Nothing is estimated from a model's name or its size.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanokv.errors import ConfigError
from sim.planner.families import READERS
from sim.planner.families.defaults import DEFAULTS, Defaults
from sim.planner.fields import Fields
from sim.planner.layers import Geometry, Kind, Layer

DTYPES: Mapping[str, str] = {  # the spellings of files -> the plain name
    "float32": "float32", "float": "float32", "fp32": "float32",
    "float16": "float16", "half": "float16", "fp16": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
}  # fmt: skip
DEFAULT_DTYPE = "bfloat16"  # what nearly every published decoder is stored in

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config", "lm_config")

TEXT_TYPES: Mapping[str, str] = {  # the text family of a multimodal file whose nested part does not name its own
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "llama4": "llama4_text",
    "mllama": "mllama_text_model", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text", "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text", "llava": "llama", "llava_next": "llama", "vipllava": "llama",
    "mistral3": "mistral", "glm4v": "glm4v_text", "glm4v_moe": "glm4v_moe_text", "minimax_m3_vl": "minimax_m3_vl_text",
    "internvl": "qwen2", "paligemma": "gemma", "kimi_k25": "deepseek_v3",
    "cohere2_vision": "cohere2", "aya_vision": "cohere2", "idefics3": "llama",
    "smolvlm": "llama",
}  # fmt: skip

ENCODERS = frozenset(
    "albert bert bert-generation big_bird camembert clip clip_text_model clip_vision_model convbert data2vec-text deberta "
    "deberta-v2 distilbert dinov2 electra ernie esm eurobert flaubert fnet funnel gte hubert ibert longformer luke "
    "megatron-bert mobilebert modernbert mpnet mra new nezha nomic_bert nystromformer rembert roberta roberta-prelayernorm "
    "roc_bert roformer siglip siglip2 squeezebert vit wav2vec2 xlm-roberta xlm-roberta-xl yoso".split()
)
ENCODER_DECODERS = frozenset(
    "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart moonshine mt5 mvp "
    "nllb-moe pegasus pegasus_x plbart prophetnet seamless_m4t speech_to_text switch_transformers t5 t5gemma umt5 "
    "vision-encoder-decoder whisper".split()
)


def geometry_from_config(raw: Any, *, expand_latent: bool = False, cross_tokens: int | None = None) -> Geometry:
    """What a model caches, from the content of its config.json.

    `expand_latent` counts MLA as the per-head keys and values that an engine without an MLA kernel stores. `cross_tokens`
    overrides the number of encoder tokens that cross-attention layers keep for each request.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError("not a config.json: the file does not hold an object")
    text, parents = text_part(raw)
    name = model_type(text, parents)
    refuse_encoders(name, (*parents, text))
    read = READERS.get(name)
    if read is None:
        raise ConfigError(f"unknown attention family: model_type {name!r} is not one that the planner knows")
    known = DEFAULTS.get(name, Defaults("its class", {}))
    fields = Fields(text, known.values, known.source, expand_latent)
    if not parents and not any(fields.has(key) for key in ("layers", "heads", "width", "hybrid_override_pattern")):
        raise ConfigError("the file has neither a number of layers nor of heads nor a width: nothing to read a size from")
    layers = tuple(read(fields))
    positions = fields.positions()
    heads = fields.integer("heads")
    fields.refuse_unread(name)
    dtype, note = config_dtype(text, parents)
    notes = [*fields.notes, *([note] if note else [])]
    layers, more = drop_idle_windows(layers, positions)
    geometry = Geometry(name, layers, heads, positions, dtype, None, bool(parents), tuple(dict.fromkeys([*notes, *more])))
    return with_cross_tokens(geometry, parents, cross_tokens)


def text_part(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]]:
    """The object that describes the language model, and the objects around it, outermost first."""
    parents: tuple[Mapping[str, Any], ...] = ()
    while True:
        inner = {key: raw[key] for key in TEXT_KEYS if isinstance(raw.get(key), Mapping) and raw[key]}
        if not inner:
            return raw, parents
        if len(inner) > 1 and len({repr(value) for value in inner.values()}) > 1:
            raise ConfigError(f"{' and '.join(inner)} both describe a language model, and they differ")
        parents, raw = (*parents, raw), next(iter(inner.values()))


def model_type(text: Mapping[str, Any], parents: tuple[Mapping[str, Any], ...]) -> str:
    """The family of the text part: its own name, else what the multimodal file around it is known to hold."""
    own = text.get("model_type")
    if own is None and parents:
        outer = parents[-1].get("model_type")
        own = TEXT_TYPES.get(outer, outer) if isinstance(outer, str) else None
    if own is None:
        raise ConfigError("not a model's config.json: it has no 'model_type'")
    if not isinstance(own, str):
        raise ConfigError(f"model_type {own!r} is not a name")
    return own


def refuse_encoders(name: str, levels: tuple[Mapping[str, Any], ...]) -> None:
    """ConfigError for models that keep no growing cache, or whose cache is not a decoder's alone."""
    if name in ENCODERS:
        raise ConfigError(f"model_type {name!r} is an encoder: it generates nothing and keeps no KV cache")
    if name in ENCODER_DECODERS or any(level.get("is_encoder_decoder") for level in levels):
        raise ConfigError(f"model_type {name!r} is an encoder-decoder (is_encoder_decoder): only decoders are planned")
    for level in levels:
        if level.get("add_cross_attention"):
            raise ConfigError("add_cross_attention is true: the encoder that it attends to is not described in the file")
        if level.get("use_bidirectional_attention") in (True, "all"):
            raise ConfigError("use_bidirectional_attention is set: the model encodes whole texts and keeps no KV cache")


def config_dtype(text: Mapping[str, Any], parents: tuple[Mapping[str, Any], ...]) -> tuple[str, str | None]:
    """The dtype under either of its names, innermost object first -> (plain name, note where nothing is said)."""
    for level in (text, *reversed(parents)):
        given = {key: level[key] for key in ("dtype", "torch_dtype") if level.get(key) is not None}
        names = {key: _dtype_name(key, value) for key, value in given.items()}
        if len(set(names.values())) > 1:
            raise ConfigError(f"dtype {given['dtype']!r} and torch_dtype {given['torch_dtype']!r} contradict each other")
        if names:
            return next(iter(names.values())), None
    return DEFAULT_DTYPE, f"the file names no dtype: {DEFAULT_DTYPE} is assumed"


def _dtype_name(key: str, value: Any) -> str:
    name = DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if name is None:
        raise ConfigError(f"{key} {value!r} is not one of {', '.join(DTYPES)}, with or without 'torch.'")
    return name


def drop_idle_windows(layers: tuple[Layer, ...], positions: int | None) -> tuple[tuple[Layer, ...], list[str]]:
    """A window that the model's positions cannot fill is no window at all: such a layer is plain full attention."""
    notes, out = [], []
    for layer in layers:
        if layer.window is not None and positions is not None and layer.window >= positions:
            notes.append(f"a window of {layer.window} tokens has no effect: the model has {positions} positions")
            layer = replace(layer, kind=Kind.FULL, window=None)
        out.append(layer)
    return tuple(out), notes


def with_cross_tokens(geometry: Geometry, parents: tuple[Mapping[str, Any], ...], given: int | None) -> Geometry:
    """How many encoder tokens a request's cross-attention layers keep: as given, else one image in all its tiles."""
    if not any(layer.kind is Kind.CROSS for layer in geometry.layers):
        if given is not None:
            raise ConfigError(f"{geometry.model_type!r} has no cross-attention layers to keep {given} encoder tokens")
        return geometry
    if given is not None:
        return replace(geometry, cross_tokens=given)
    vision = parents[-1].get("vision_config") if parents else None
    size, patch, tiles = (_positive((vision or {}).get(key)) for key in ("image_size", "patch_size", "max_num_tiles"))
    if not (size and patch and tiles):
        raise ConfigError("cross_attention_layers keep an encoder's tokens, and no vision_config says how many there are")
    tokens = ((size // patch) ** 2 + 1) * tiles
    note = (
        f"cross-attention keeps {tokens} tokens: one image of {tiles} tiles of {size} pixels, in patches of {patch}, a request"
    )
    return replace(geometry, cross_tokens=tokens, notes=(*geometry.notes, note))


def _positive(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
