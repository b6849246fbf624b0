"""From a config.json to what each layer of the model caches.

`geometry_from_config` is right or it raises: an unknown family, a missing or absurd value and a contradiction are
ConfigErrors that name the field. Nothing is estimated from a model's name or its size.

Units are elements, not bytes: capacity.py turns them into bytes. A window of W means W tokens including the current one;
a chunk of C means that a layer attends inside blocks of C tokens, so that at most C are ever cached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any

from nanokv.errors import ConfigError


class Kind(StrEnum):
    """What a layer keeps. The first four grow with tokens."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    CHUNKED = "chunked_attention"
    MLA = "mla"
    CROSS = "cross_attention"  # K and V of an encoder's tokens: fixed once they are there
    SHARED = "shared"  # reads the cache of an earlier layer
    LINEAR = "linear_attention"  # a fixed state a sequence
    MAMBA = "mamba"
    CONV = "conv"
    NONE = "none"  # no attention at all


GROWING = frozenset({Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.MLA})


@dataclass(frozen=True)
class State:
    """A tensor of fixed size that a layer keeps for each sequence: `heads` rows that tensor parallelism may split.

    `itemsize` None means the model's dtype.
    """

    heads: int
    per_head: int
    itemsize: int | None = None


@dataclass(frozen=True)
class Layer:
    """What one layer caches: for each token `kv_heads` keys of `head_dim_k` and values of `head_dim_v` elements.

    MLA caches one latent vector that serves as key and value: kv_heads 1, head_dim_k its width, head_dim_v 0.
    `index_bytes` is what a sparse-attention indexer keeps for each token beside them, in bytes.
    """

    kind: Kind
    kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    window: int | None = None
    index_bytes: int = 0
    state: tuple[State, ...] = ()

    def tokens(self, context: int) -> int:
        """How many of `context` tokens this layer holds."""
        if self.kind not in GROWING:
            return 0
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Geometry:
    """A model's caches. `dtype` is the file's, by its plain name; `cross_tokens` the encoder tokens of one request."""

    model_type: str
    layers: tuple[Layer, ...]
    num_heads: int
    max_positions: int | None
    dtype: str
    cross_tokens: int | None = None
    nested: bool = False
    notes: tuple[str, ...] = ()

    def groups(self) -> list[tuple[Layer, int]]:
        """Equal layers together, in the order in which each kind first appears, with their count."""
        counts: dict[Layer, int] = {}
        for layer, run in groupby(self.layers):
            counts[layer] = counts.get(layer, 0) + len(list(run))
        return list(counts.items())


DTYPES: Mapping[str, str] = {  # the spellings of files -> the plain name
    "float64": "float64", "double": "float64", "float32": "float32", "float": "float32", "fp32": "float32",
    "float16": "float16", "half": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8_e4m3": "fp8",
}  # fmt: skip
DEFAULT_DTYPE = "bfloat16"  # what nearly every published decoder is stored in

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config", "lm_config")

TEXT_TYPES: Mapping[str, str] = {  # the text family of a multimodal file whose nested part does not name its own
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "llama4": "llama4_text",
    "mllama": "mllama_text_model", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text", "llava": "llama", "llava_next": "llama", "vipllava": "llama", "mistral3": "mistral",
    "internvl": "qwen2", "paligemma": "gemma", "kimi_k25": "deepseek_v3", "kimi_vl": "deepseek_v3",
    "cohere2_vision": "cohere2", "aya_vision": "cohere2", "granite4_vision": "granite", "idefics3": "llama", "smolvlm": "llama",
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
    from sim.planner.families import FAMILIES
    from sim.planner.fields import Fields

    if not isinstance(raw, Mapping):
        raise ConfigError("not a config.json: the file does not hold an object")
    text, parents = text_part(raw)
    name = model_type(text, parents)
    refuse_encoders(name, (*parents, text))
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(f"unknown attention family: model_type {name!r} is not one that the planner knows")
    fields = Fields(text, family.defaults, family.source, expand_latent)
    if not parents and not any(fields.has(key) for key in ("layers", "heads", "width", "hybrid_override_pattern")):
        raise ConfigError("the file has neither a number of layers nor of heads nor a width: nothing to read a size from")
    layers = family.read(fields)
    fields.ignore("positions")
    positions = fields.optional_integer("positions")
    heads = fields.integer("heads")
    fields.refuse_unread(name)
    dtype, note = config_dtype(text, parents)
    notes = [*fields.notes, *([note] if note else [])]
    layers, more = drop_idle_windows(tuple(layers), positions)
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
        raise ConfigError(f"{key} {value!r} is not a known dtype")
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
    size, patch, tiles = ((vision or {}).get(key) for key in ("image_size", "patch_size", "max_num_tiles"))
    if not all(isinstance(value, int) and value > 0 for value in (size, patch, tiles)):
        raise ConfigError("cross_attention_layers keep an encoder's tokens, and no vision_config says how many there are")
    tokens = ((size // patch) ** 2 + 1) * tiles
    note = f"cross-attention keeps {tokens} tokens: one image of {tiles} tiles of {size} pixels, in patches of {patch}, a request"
    return replace(geometry, cross_tokens=tokens, notes=(*geometry.notes, note))
