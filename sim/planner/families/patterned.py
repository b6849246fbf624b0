"""Families that mix full layers with windowed or chunked ones, by a list in the file or by a rule of their own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanokv.errors import ConfigError
from sim.planner.families.base import (
    CHUNKED,
    FULL,
    KINDS,
    SLIDING,
    Reader,
    attention,
    by_pattern,
    every,
    grouped,
    rotary_layers,
    types,
)
from sim.planner.fields import Fields, pattern
from sim.planner.layers import Kind, Layer


def gpt_neo(f: Fields) -> list[Layer]:
    """attention_types [[["global", "local"], 12]] spells out the layers; local ones see `window_size` tokens (default 256)."""
    layer, count = attention(f), f.integer("layers")
    pairs = _repetitions(f.value("attention_types"))
    total = sum(len(names) * times for names, times in pairs)
    if total != count:
        raise ConfigError(f"attention_types spells out {total} layers, but {f.key('layers')} is {count}")
    names = [name for kinds, times in pairs for _ in range(times) for name in kinds]
    window = f.integer("window_size")
    kinds = pattern(names, {"global": Kind.FULL, "local": Kind.SLIDING}, "attention_types")
    return [layer if kind is Kind.FULL else replace(layer, kind=kind, window=window) for kind in kinds]


def _repetitions(spec: Any) -> list[tuple[list[Any], int]]:
    """[[["global", "local"], 12]] -> [(["global", "local"], 12)]"""
    pairs = []
    for item in spec if isinstance(spec, list | tuple) else [spec]:
        names, times = item if isinstance(item, list | tuple) and len(item) == 2 else (None, None)
        if not isinstance(names, list | tuple) or not isinstance(times, int):
            raise ConfigError(f"attention_types {spec!r} is not a list of [kinds, repetitions]")
        pairs.append((list(names), times))
    return pairs


def qwen_windows(f: Fields) -> list[Layer]:
    """Qwen 2, 2.5, 3: a window only where use_sliding_window is true, and only from layer max_window_layers on."""
    used = f.flag("use_sliding_window", False)
    start = f.optional_integer("max_window_layers", least=0)
    if used and not f.has("window"):
        used = f.value("window") is not None  # the class default
    if not used:
        return without_window(f)
    return by_pattern(f, lambda i: SLIDING if start is not None and i >= start else FULL)


def qwen2_moe(f: Fields) -> list[Layer]:
    """Qwen 2 MoE: with use_sliding_window, every second layer below max_window_layers."""
    start = f.optional_integer("max_window_layers", least=0)
    if not f.flag("use_sliding_window", False):
        return without_window(f)
    return by_pattern(f, lambda i: SLIDING if (i + 1) % 2 and start is not None and i < start else FULL)


def qwen3_moe(f: Fields) -> list[Layer]:
    """Qwen 3 MoE: with use_sliding_window, every layer."""
    f.ignore("max_window_layers")
    if not f.flag("use_sliding_window", False):
        return without_window(f)
    return by_pattern(f, lambda i: SLIDING)


def without_window(f: Fields) -> list[Layer]:
    """All layers full, whatever the window says: its switch is off. A layer_types list that disagrees is an error."""
    f.ignore("window")
    layer, count = attention(f), f.integer("layers")
    kinds = types(f.one_per_layer("layer_types", count), count, every(1), KINDS)
    if any(kind is not Kind.FULL for kind in kinds):
        raise ConfigError("layer_types has windowed layers, but use_sliding_window is false")
    return [layer] * count


def rule(default: Callable[[int], str]) -> Callable[[Fields], list[Layer]]:
    """A reader for layer_types with a fixed rule where the list is absent."""
    return lambda f: by_pattern(f, default)


def periodic(period: int) -> Callable[[Fields], list[Layer]]:
    """A reader for layer_types where every `period`-th layer is full; sliding_window_pattern overrides the period."""

    def read(f: Fields) -> list[Layer]:
        given = f.value("sliding_window_pattern") or period
        if isinstance(given, str):  # EXAONE writes "LLLG"
            return by_pattern(f, lambda i: FULL if given[i % len(given)] == "G" else SLIDING)
        return by_pattern(f, every(f.check_integer("sliding_window_pattern", given)))

    return read


def ministral(f: Fields) -> list[Layer]:
    """Every layer windowed where layer_types is absent and there is a window."""
    windowed = f.value("window") is not None
    return by_pattern(f, lambda i: SLIDING if windowed else FULL)


def llama4(f: Fields) -> list[Layer]:
    """Layers with rotary positions attend in chunks; every no_rope_layer_interval-th one has none and sees everything."""
    rotary = rotary_layers(f, f.integer("layers"))
    chunked = f.value("attention_chunk_size") is not None
    return by_pattern(f, lambda i: CHUNKED if rotary[i] and chunked else FULL, window_key="attention_chunk_size")


def smollm3(f: Fields) -> list[Layer]:
    """Windows, where switched on, on the layers without rotary positions."""
    f.ignore("max_window_layers")
    if not f.flag("use_sliding_window", False) or f.value("window") is None:
        return without_window(f)
    rotary = rotary_layers(f, f.integer("layers"))
    return by_pattern(f, lambda i: FULL if rotary[i] else SLIDING)


def gemma3n(f: Fields) -> list[Layer]:
    """The last num_kv_shared_layers layers read the cache of an earlier layer of their kind."""
    return shared_tail(f, by_pattern(f, every(5)))


def gemma4(f: Fields) -> list[Layer]:
    """Full layers have heads of their own width and, with attention_k_eq_v, of their own number. Both K and V are kept:
    they come from one projection, but only K is rotated. The last layer is always full.

    The published file says global_head_dim and num_global_key_value_heads; one that transformers saved says
    per_layer_config instead.
    """
    count, heads = f.integer("layers"), f.integer("heads")
    kinds = types(f.one_per_layer("layer_types", count), count, every(6), KINDS)
    kinds[-1] = Kind.FULL
    sliding, window = attention(f), f.integer("window")
    overrides = f.child("per_layer_config")
    if overrides is None:
        global_kv_heads = f.optional_integer("num_global_key_value_heads")
        own = f.flag("attention_k_eq_v", False) and global_kv_heads is not None
        full = grouped(f, heads, global_kv_heads if own and global_kv_heads else sliding.kv_heads, f.integer("global_head_dim"))
        full_layers = [full] * count
    else:
        full_layers = [_overridden(f, overrides, i, heads, sliding) for i in range(count)]
    layers = [
        full_layers[i] if kind is Kind.FULL else replace(sliding, kind=kind, window=window) for i, kind in enumerate(kinds)
    ]
    return shared_tail(f, layers)


def _overridden(f: Fields, overrides: Fields, i: int, heads: int, layer: Layer) -> Layer:
    """The full layer `i` with what per_layer_config says of it, under "5" or "05"."""
    for key, spec in overrides.raw.items():
        if not key.isdigit() or not isinstance(spec, Mapping) or set(spec) - {"head_dim", "num_key_value_heads"}:
            raise ConfigError(f"per_layer_config {key!r}: {spec!r} is more than a head_dim and num_key_value_heads")
        if int(key) == i:
            kv_heads = f.check_integer(f"per_layer_config.{key}", spec.get("num_key_value_heads", layer.kv_heads))
            dim = f.check_integer(f"per_layer_config.{key}", spec.get("head_dim", layer.head_dim_k))
            return grouped(f, heads, kv_heads, dim)
    return layer


def shared_tail(f: Fields, layers: list[Layer]) -> list[Layer]:
    """The last num_kv_shared_layers layers keep nothing of their own; each needs an earlier one of its kind."""
    count = f.optional_integer("num_kv_shared_layers", least=0) or 0
    if count >= len(layers) and count:
        raise ConfigError(f"num_kv_shared_layers {count} leaves no layer of {len(layers)} to share the cache of")
    own, tail = layers[: len(layers) - count], layers[len(layers) - count :]
    for layer in tail:
        if layer not in own:
            raise ConfigError(f"num_kv_shared_layers {count}: no earlier layer has a {layer.kind} cache to share")
    return own + [Layer(Kind.SHARED)] * count


def mimo_v2(f: Fields) -> list[Layer]:
    """MiMo-V2-Flash: K wider than V, and the windowed layers have key-value heads of their own.

    The published file says hybrid_layer_pattern (1 is windowed) and swa_num_key_value_heads; a file that transformers
    saved says layer_types, and its class gives windowed layers twice the key-value heads. sliding_window_size counts the
    tokens before the current one (transformers' MiMoV2FlashConfig, after the SGLang reference).
    """
    count, heads = f.integer("layers"), f.integer("heads")
    full = grouped(f, heads, f.integer("kv_heads"), f.integer("head_dim"), f.integer("v_head_dim"))
    given = f.one_per_layer("hybrid_layer_pattern", count)
    names = f.one_per_layer("layer_types", count)
    if given is not None and names is None:
        kinds = pattern(given, {0: Kind.FULL, 1: Kind.SLIDING}, "hybrid_layer_pattern")
    else:
        kinds = types(names, count, lambda i: FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING, KINDS)
    before = f.raw.get("sliding_window_size")
    f.ignore("window", "attention_chunk_size")  # the chunk size repeats the window in the published file
    if before is not None:
        window = f.check_integer("sliding_window_size", before) + 1
    else:
        window = f.check_integer("sliding_window", f.raw.get("sliding_window", 129))
    sliding = grouped(
        f,
        f.integer("swa_num_attention_heads", default=heads),
        f.integer("swa_num_key_value_heads", default=2 * full.kv_heads),
        f.integer("swa_head_dim", default=full.head_dim_k),
        f.integer("swa_v_head_dim", default=full.head_dim_v),
    )
    sliding = replace(sliding, kind=Kind.SLIDING, window=window)
    return [full if kind is Kind.FULL else sliding for kind in kinds]


def minimax_m2(f: Fields) -> list[Layer]:
    """Every layer full; the published file still carries attn_type_list, all ones."""
    layer, count = attention(f), f.integer("layers")
    given = f.one_per_layer("attn_type_list", count)
    if given is not None and any(kind != 1 for kind in given):
        raise ConfigError("attn_type_list has layers that are not full attention, which MiniMax-M2 does not have")
    f.ignore("layer_types", "window")
    return [layer] * count


def minimax_m3(f: Fields) -> list[Layer]:
    """MiniMax-M3: sparse layers keep every K and V, and a key for their indexer beside them, in bfloat16.

    The published file says sparse_attention_config; a file that transformers saved says layer_types and index_head_dim.
    """
    layer, count = attention(f), f.integer("layers")
    spec = f.child("sparse_attention_config") or Fields({}, {}, f.source)
    names = f.one_per_layer("layer_types", count)
    flags = spec.one_per_layer("sparse_attention_freq", count)
    dim = spec.integer("sparse_index_dim", default=f.integer("index_head_dim"))
    f.ignore("index_n_heads")
    if names is not None:
        sparse = pattern(names, {FULL: False, "minimax_m3_sparse": True}, "layer_types")
    else:
        sparse = pattern(flags or [0] * count, {0: False, 1: True}, "sparse_attention_freq")
    return [replace(layer, index_bytes=2 * dim) if each else layer for each in sparse]


def cohere2(f: Fields) -> list[Layer]:
    """Cohere 2: the head's width is always the model's width over its heads."""
    heads = f.integer("heads")
    declared = f.optional_integer("head_dim")
    width = f.integer("width")
    if declared is not None and declared * heads != width:
        raise ConfigError(f"head_dim {declared} is not {f.key('width')} {width} over {f.key('heads')} {heads}")
    return periodic(4)(f)


_QWEN2_VL = {
    "layers": 80,
    "heads": 64,
    "kv_heads": 8,
    "width": 8192,
    "window": 4096,
    "max_window_layers": 80,
    "positions": 32768,
}


READERS: dict[str, Reader] = {
    "gpt_neo": gpt_neo,
    **dict.fromkeys(
        (
            "qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3", "mimo",
        ),
        qwen_windows,
    ),
    "qwen2_moe": qwen2_moe,
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), qwen3_moe),
    **dict.fromkeys(("gemma2", "gpt_oss"), rule(every(2))),
    "gemma3_text": periodic(6),
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "cohere2": cohere2,
    "olmo3": rule(every(4)),
    "exaone4": periodic(4),
    "ministral": ministral,
    "llama4_text": llama4,
    "smollm3": smollm3,
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), rule(lambda i: FULL if i % 4 == 0 else SLIDING)),
    "mimo_v2_flash": mimo_v2,
    "minimax_m2": minimax_m2,
    "minimax_m3_vl_text": minimax_m3,
}  # fmt: skip
