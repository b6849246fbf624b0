"""What every family's reader is made of: heads, widths, and layers that repeat by a pattern."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanokv.errors import ConfigError
from sim.planner.fields import Fields, pattern
from sim.planner.layers import Kind, Layer

Reader = Callable[[Fields], list[Layer]]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS: Mapping[str, Kind] = {FULL: Kind.FULL, "attention": Kind.FULL, SLIDING: Kind.SLIDING, CHUNKED: Kind.CHUNKED}


def attention(f: Fields) -> Layer:
    """One layer of multi-head, grouped-query or multi-query attention without a window."""
    heads = f.integer("heads")
    kv_heads = f.optional_integer("kv_heads", default=heads) or heads
    return grouped(f, heads, kv_heads, head_dim(f, heads))


def grouped(f: Fields, heads: int, kv_heads: int, dim: int, dim_v: int | None = None) -> Layer:
    """A full-attention layer of these counts; query heads that the key-value heads do not divide are a ConfigError."""
    if kv_heads > heads or heads % kv_heads:
        raise ConfigError(f"{f.key('heads')} {heads} is not divisible by {f.key('kv_heads')} {kv_heads}")
    return Layer(Kind.FULL, kv_heads, dim, dim if dim_v is None else dim_v)


def head_dim(f: Fields, heads: int) -> int:
    """The declared width of a head; only where none is declared, the model's width divided by its heads."""
    explicit = f.optional_integer("head_dim")
    if explicit is not None:
        f.ignore("width")
        return explicit
    width = f.integer("width")
    if width % heads:
        raise ConfigError(f"{f.key('width')} {width} is not divisible by {f.key('heads')} {heads}, and no head_dim is given")
    return width // heads


def plain(f: Fields) -> list[Layer]:
    """Every layer alike, no window."""
    return [attention(f)] * f.integer("layers")


def multi_head(f: Fields) -> list[Layer]:
    """Every layer alike, as many key-value heads as query heads: the family has no grouped form."""
    layer = attention(f)
    heads = f.integer("heads")
    if layer.kv_heads != heads:
        raise ConfigError(
            f"{f.key('kv_heads')} {layer.kv_heads} differs from {f.key('heads')} {heads}, but the family is multi-head"
        )
    return [layer] * f.integer("layers")


def windowed(f: Fields) -> list[Layer]:
    """Every layer has the window, if the file sets one."""
    layer, window = attention(f), f.optional_integer("window")
    return [layer if window is None else replace(layer, kind=Kind.SLIDING, window=window)] * f.integer("layers")


def by_pattern(
    f: Fields, default: Callable[[int], str], *, window_key: str = "window", kinds: Mapping[str, Kind] = KINDS
) -> list[Layer]:
    """Layers by `layer_types`, or by the family's own rule layer index -> type; windows from `window_key`."""
    layer, count = attention(f), f.integer("layers")
    names = f.one_per_layer("layer_types", count)
    return with_windows(f, layer, types(names, count, default, kinds), window_key)


def types(names: Sequence[Any] | None, count: int, default: Callable[[int], str], kinds: Mapping[str, Kind]) -> list[Kind]:
    """The kind of each layer, from the file's list or else from the family's rule."""
    return pattern(names if names is not None else [default(i) for i in range(count)], kinds, "layer_types")


def with_windows(f: Fields, layer: Layer, kinds: Sequence[Kind], window_key: str) -> list[Layer]:
    """`layer` once for each kind; sliding and chunked layers need the window that `window_key` names."""
    window = f.optional_integer(window_key)
    if window is None and any(kind in (Kind.SLIDING, Kind.CHUNKED) for kind in kinds):
        raise ConfigError(f"some layers are windowed, but the file gives no {f.key(window_key)}")
    return [layer if kind is Kind.FULL else replace(layer, kind=kind, window=window) for kind in kinds]


def every(period: int, otherwise: str = SLIDING) -> Callable[[int], str]:
    """The rule "each `period`-th layer is full": 0 means that none is full."""
    return lambda i: FULL if period and (i + 1) % period == 0 else otherwise


def layer_numbers(f: Fields, key: str, count: int) -> set[int] | None:
    """A list of layer numbers, counted from 0, as a set; None where the file has none."""
    given = f.value(key)
    if given is None:
        return None
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{key} {given!r} is not a list of layer numbers")
    return {f.check_integer(key, number, 0, count - 1) for number in given}


def rotary_layers(f: Fields, count: int) -> list[bool]:
    """Which layers have rotary positions: no_rope_layers (1 where they do), or all but every no_rope_layer_interval-th."""
    interval = f.integer("no_rope_layer_interval", default=4)
    given = f.one_per_layer("no_rope_layers", count) if f.value("no_rope_layers") else None
    return [bool(each) for each in given] if given else [(i + 1) % interval != 0 for i in range(count)]
