"""Hybrids: some layers attend, the others keep a state of fixed size (Mamba, gated delta rule, lightning attention).

A state is what the layer needs before the next token, in the shapes of transformers' caches: `conv` columns of a causal
convolution (the kernel's width, the current token included) in the model's dtype, and a recurrent matrix, in float32
unless a family says otherwise.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanokv.errors import ConfigError
from sim.planner.families.base import FULL, Reader, attention, every, layer_numbers, types
from sim.planner.families.latent import latent
from sim.planner.fields import Fields, pattern
from sim.planner.layers import Kind, Layer, State

LINEAR = "linear_attention"
MIXED: Mapping[str, Kind] = {FULL: Kind.FULL, "attention": Kind.FULL, LINEAR: Kind.LINEAR}
WITH_MAMBA: Mapping[str, Kind] = {FULL: Kind.FULL, "attention": Kind.FULL, "mamba": Kind.MAMBA, LINEAR: Kind.MAMBA}
FLOAT32 = 4


def delta_rule(f: Fields, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Layer:
    """Gated delta rule (Qwen3-Next, arXiv 2412.06464): a convolution over q, k and v, and a matrix for each value head."""
    kernel = f.integer("linear_conv_kernel_dim")
    return Layer(
        Kind.LINEAR,
        state=(
            State(key_heads, 2 * key_dim * kernel),
            State(value_heads, value_dim * kernel),
            State(value_heads, key_dim * value_dim, FLOAT32),
        ),
    )


def qwen3_next(f: Fields) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: every full_attention_interval-th layer attends."""
    count, full = f.integer("layers"), attention(f)
    interval = f.integer("full_attention_interval", default=4)
    kinds = types(f.one_per_layer("layer_types", count), count, every(interval, LINEAR), MIXED)
    keys, values = f.integer("linear_num_key_heads"), f.integer("linear_num_value_heads")
    linear = delta_rule(f, keys, values, f.integer("linear_key_head_dim"), f.integer("linear_value_head_dim"))
    return [full if kind is Kind.FULL else linear for kind in kinds]


def olmo_hybrid(f: Fields) -> list[Layer]:
    """Every fourth layer attends; the delta rule's heads default to the model's, and its widths follow from them."""
    count, heads, width = f.integer("layers"), f.integer("heads"), f.integer("width")
    full = attention(f)
    names = f.one_per_layer("layer_types", count) or [FULL if i % 4 == 3 else LINEAR for i in range(count)]
    if FULL not in names and "attention" not in names:
        names = [*names[:-1], FULL]
    keys = f.optional_integer("linear_num_key_heads") or heads
    key_dim = f.optional_integer("linear_key_head_dim") or int(0.75 * width / keys)
    linear = delta_rule(
        f,
        keys,
        f.optional_integer("linear_num_value_heads") or heads,
        key_dim,
        f.optional_integer("linear_value_head_dim") or 2 * key_dim,
    )
    return [full if kind is Kind.FULL else linear for kind in pattern(names, MIXED, "layer_types")]


def kimi_linear(f: Fields) -> list[Layer]:
    """Kimi Linear (arXiv 2510.26692): MLA and Kimi delta attention; linear_attn_config lists both, counting from one."""
    count = f.integer("layers")
    spec = f.child("linear_attn_config") or Fields({}, {}, f.source)
    names = f.one_per_layer("layer_types", count) or _kimi_types(spec, count)
    heads = spec.integer("num_heads", default=f.integer("linear_num_heads"))
    dim = spec.integer("head_dim", default=f.integer("linear_head_dim"))
    kernel = spec.integer("short_conv_kernel_size", default=f.integer("linear_conv_kernel_dim"))
    linear = Layer(Kind.LINEAR, state=(State(heads, 3 * dim * kernel), State(heads, dim * dim, FLOAT32)))
    full = latent(f)
    return [full if kind is Kind.FULL else linear for kind in pattern(names, MIXED, "layer_types")]


def _kimi_types(spec: Fields, count: int) -> list[Any]:
    full, linear = spec.value("full_attn_layers"), spec.value("kda_layers")
    if full is None and linear is None:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    if not isinstance(full, list) or not isinstance(linear, list) or sorted([*full, *linear]) != list(range(1, count + 1)):
        raise ConfigError(f"linear_attn_config: full_attn_layers and kda_layers do not name each of {count} layers once")
    return [FULL if i + 1 in full else LINEAR for i in range(count)]


def minimax(f: Fields) -> list[Layer]:
    """MiniMax-Text-01 and M1 (arXiv 2501.08313): lightning attention keeps a square matrix for each query head.

    The published file says attn_type_list (1 is full attention); a file that transformers saved says layer_types, or
    relies on that class's rule, every second layer.
    """
    count, full, heads = f.integer("layers"), attention(f), f.integer("heads")
    given = f.one_per_layer("attn_type_list", count)
    names = f.one_per_layer("layer_types", count)
    f.ignore("window")
    if f.raw.get("sliding_window") is not None:
        raise ConfigError(f"sliding_window {f.raw['sliding_window']!r} is not supported for MiniMax's full layers")
    if given is not None and names is None:
        kinds = pattern(given, {0: Kind.LINEAR, 1: Kind.FULL}, "attn_type_list")
    elif names is None and f.source != "MiniMaxConfig":
        raise ConfigError("config.json has no 'attn_type_list': which layers attend?")
    else:
        kinds = types(names, count, lambda i: LINEAR if i % 2 else FULL, MIXED)
    linear = Layer(Kind.LINEAR, state=(State(heads, full.head_dim_k**2, FLOAT32),))
    return [full if kind is Kind.FULL else linear for kind in kinds]


def mamba1(f: Fields, itemsize: int | None) -> Layer:
    """One Mamba 1 layer (arXiv 2312.00752): a convolution and a state for each of its inner channels."""
    inner = f.integer("mamba_expand") * f.integer("width")
    return Layer(
        Kind.MAMBA, state=(State(inner, f.integer("mamba_d_conv")), State(inner, f.integer("mamba_d_state"), itemsize))
    )


def phi4_flash(f: Fields) -> list[Layer]:
    """Phi-4-mini-flash (SambaY, arXiv 2507.06607): Mamba 1 and windowed attention take turns up to the middle; one full layer
    follows, and every layer after it reads that layer's cache or the last Mamba layer's output. The states are kept in the
    model's dtype (SambaYCache of the published code).
    """
    count, full, window = f.integer("layers"), attention(f), f.integer("window")
    if f.integer("mb_per_layer") != 2:
        raise ConfigError(f"mb_per_layer {f.integer('mb_per_layer')} is not 2, the only arrangement that is published")
    mamba, sliding = mamba1(f, None), replace(full, kind=Kind.SLIDING, window=window)
    middle = count // 2
    turns = [mamba if i % 2 == 0 else sliding for i in range(middle + 1)]
    return [*turns, full, *[Layer(Kind.SHARED)] * (count - middle - 2)]


def jamba(f: Fields) -> list[Layer]:
    """Jamba (arXiv 2403.19887): Mamba 1 layers; one layer of each attn_layer_period attends."""
    count, full = f.integer("layers"), attention(f)
    period = f.integer("attn_layer_period")
    offset = f.integer("attn_layer_offset", least=0)
    if offset >= period:
        raise ConfigError(f"attn_layer_offset {offset} is not below attn_layer_period {period}: no layer would attend")
    mamba = mamba1(f, FLOAT32)
    names = f.one_per_layer("layer_types", count) or f.one_per_layer("layers_block_type", count)
    f.ignore("layer_types", "layers_block_type")
    kinds = types(names, count, lambda i: FULL if i % period == offset else "mamba", WITH_MAMBA)
    return [full if kind is Kind.FULL else mamba for kind in kinds]


def mamba2(
    f: Fields, inner: int, heads: int, head_width: int, groups: int, states: int, kernel: int, itemsize: int | None
) -> Layer:
    """One Mamba 2 layer (arXiv 2405.21060): a convolution over x, B and C, and a head_width x states matrix a head."""
    if inner != heads * head_width:
        raise ConfigError(f"Mamba heads {heads} of width {head_width} do not make its inner width {inner}")
    return Layer(
        Kind.MAMBA,
        state=(
            State(heads, head_width * kernel),
            State(groups, 2 * states * kernel),
            State(heads, head_width * states, itemsize),
        ),
    )


def nemotron_h(f: Fields) -> list[Layer]:
    """Nemotron-H (arXiv 2504.03624): a letter a layer, M Mamba 2, * attention, - MLP, E experts."""
    letters = {"M": Kind.MAMBA, "*": Kind.FULL, "-": Kind.NONE, "E": Kind.NONE}
    words = {
        "mamba": Kind.MAMBA,
        LINEAR: Kind.MAMBA,
        "attention": Kind.FULL,
        FULL: Kind.FULL,
        "mlp": Kind.NONE,
        "moe": Kind.NONE,
    }
    text = f.value("hybrid_override_pattern")
    listed = f.value("layers_block_type") or f.value("layer_types")
    f.ignore("layer_types", "layers_block_type")
    if listed is not None:
        kinds = pattern(listed, words, "layers_block_type")
    elif isinstance(text, str) and text:
        kinds = pattern(text, letters, "hybrid_override_pattern")
    else:
        raise ConfigError("config.json has neither 'hybrid_override_pattern' nor 'layers_block_type': which layers attend?")
    count = f.optional_integer("layers")
    if count is not None and count != len(kinds):
        raise ConfigError(f"num_hidden_layers {count} contradicts the layer pattern, which has {len(kinds)}")
    heads, width = f.integer("mamba_num_heads"), f.integer("mamba_head_dim")
    cached = f.value("mamba_ssm_cache_dtype", "float32")
    sizes = {"float32": FLOAT32, "float16": 2, "bfloat16": 2}
    if cached not in sizes:
        raise ConfigError(f"mamba_ssm_cache_dtype {cached!r} is not one of {', '.join(sizes)}")
    mamba = mamba2(
        f,
        heads * width,
        heads,
        width,
        f.integer("n_groups"),
        f.integer("ssm_state_size"),
        f.integer("conv_kernel"),
        sizes[cached],
    )
    f.ignore("window", "mamba_expand")
    if f.raw.get("sliding_window") is not None:
        raise ConfigError(f"sliding_window {f.raw['sliding_window']!r} is not supported for Nemotron-H")
    chosen = {Kind.FULL: attention(f), Kind.MAMBA: mamba, Kind.NONE: Layer(Kind.NONE)}
    return [chosen[kind] for kind in kinds]


def bamba_layer(f: Fields, inner: int) -> Layer:
    """The Mamba 2 layer of Bamba, Granite 4 and Falcon-H1, which share their key names."""
    heads = f.integer("mamba_n_heads")
    declared = f.value("mamba_d_head", "auto")
    width = inner // heads if declared == "auto" else f.check_integer("mamba_d_head", declared)
    groups, states, kernel = f.integer("mamba_n_groups"), f.integer("mamba_d_state"), f.integer("mamba_d_conv")
    return mamba2(f, inner, heads, width, groups, states, kernel, FLOAT32)


def granite_hybrid(f: Fields) -> list[Layer]:
    """Granite 4: layer_types names the layers (absent: all of them Mamba 2)."""
    count = f.integer("layers")
    names = f.one_per_layer("layer_types", count) or f.one_per_layer("layers_block_type", count)
    f.ignore("layer_types", "layers_block_type")
    kinds = types(names, count, lambda i: "mamba", WITH_MAMBA)
    full = attention(f)
    if Kind.MAMBA not in kinds:  # Granite 4 micro: the keys of Mamba are there, and mean nothing
        f.ignore("mamba_expand", "mamba_d_state")
        return [full] * count
    mamba = bamba_layer(f, f.integer("mamba_expand") * f.integer("width"))
    return [full if kind is Kind.FULL else mamba for kind in kinds]


def bamba(f: Fields) -> list[Layer]:
    """Bamba: attn_layer_indices names the layers that attend."""
    count = f.integer("layers")
    chosen = layer_numbers(f, "attn_layer_indices", count) or set()
    f.ignore("layer_types", "layers_block_type")
    full, mamba = attention(f), bamba_layer(f, f.integer("mamba_expand") * f.integer("width"))
    return [full if i in chosen else mamba for i in range(count)]


def falcon_h1(f: Fields) -> list[Layer]:
    """Falcon-H1: every layer attends and runs Mamba 2 side by side."""
    inner = f.optional_integer("mamba_d_ssm") or f.integer("mamba_expand") * f.integer("width")
    f.ignore("mamba_expand", "layer_types", "layers_block_type")
    return [replace(attention(f), state=bamba_layer(f, inner).state)] * f.integer("layers")


def lfm2(f: Fields) -> list[Layer]:
    """LFM2: short convolutions, and attention on the layers that full_attn_idxs or layer_types name."""
    count, full = f.integer("layers"), attention(f)
    names = f.one_per_layer("layer_types", count)
    if names is None:
        chosen = layer_numbers(f, "full_attn_idxs", count)
        names = [FULL if chosen is None or i in chosen else "conv" for i in range(count)]
    f.ignore("full_attn_idxs")
    conv = Layer(Kind.CONV, state=(State(f.integer("width"), f.integer("conv_L_cache")),))
    kinds = pattern(names, {FULL: Kind.FULL, "conv": Kind.CONV}, "layer_types")
    return [full if kind is Kind.FULL else conv for kind in kinds]


_MAMBA = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}


READERS: dict[str, Reader] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), qwen3_next),
    "olmo_hybrid": olmo_hybrid,
    "kimi_linear": kimi_linear,
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), minimax),
    "jamba": jamba,
    "phi4flash": phi4_flash,
    "nemotron_h": nemotron_h,
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "lfm2": lfm2,
}
