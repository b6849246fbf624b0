"""What the config.json of a Llama, Mistral, Qwen2, Qwen3 or SmolLM says, checked before anything is allocated.

The families differ in few places, and `model_type` alone decides most of them: Qwen2 (and 2.5) has biases on queries, keys
and values, Qwen3 normalises each query and key head, Mistral may have a window. SmolLM and SmolLM2 are "llama".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanokv.errors import ConfigError
from nanokv.kv.tile import Visibility
from nanokv.models.config import token_ids
from nanokv.models.fields import flag, integer, number
from nanokv.models.rope_config import read_rope
from nanokv.rope import Rope

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """What a file of this `model_type` means where it leaves a key out: the class defaults of transformers 5.24."""

    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: the model's width divided by its heads
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(kv_heads=8, window=4096),
    "qwen2": Family(kv_heads=32, window=4096, qkv_bias=True),
    "qwen3": Family(kv_heads=32, head_dim=128, window=4096, qk_norm=True),
}
BIASED = ("llama", "qwen3")  # families whose attention_bias puts a bias on all four projections

# Beyond these a value is a mistake, not a model.
MOST_TOKENS = 1 << 24
MOST_WIDTH = 1 << 19
MOST_LAYERS = MOST_HEADS = 1 << 12
MOST_INNER = 1 << 20


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model. `windows` has one entry a layer: the keys that a query sees, its own included; None is all.
    An empty one means None everywhere."""

    vocab_size: int
    num_positions: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    rope: Rope
    norm_epsilon: float = 1e-6
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    tied_head: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Exact count, a tied head counted once."""
        e, i, q, kv = self.width, self.inner, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        block = 2 * e + e * (2 * q + 2 * kv) + 3 * e * i
        block += self.qkv_bias * (q + 2 * kv) + self.output_bias * e + self.mlp_bias * (2 * i + e)
        block += self.qk_norm * 2 * self.head_dim
        return self.vocab_size * e * (1 if self.tied_head else 2) + self.num_layers * block + e

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token takes over all layers, `itemsize` bytes an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def visibility(self) -> list[Visibility]:
        """Which keys a query may see, for each layer: what the model's cache must be made with."""
        return [Visibility(window) for window in self.windows or (None,) * self.num_layers]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        """From the keys of a Hugging Face config.json; ConfigError names the key that is missing, absurd or unsupported."""
        if not isinstance(raw, Mapping):
            raise ConfigError("it does not hold an object")
        kind = raw.get("model_type")
        family = FAMILIES.get(kind) if isinstance(kind, str) else None
        if family is None:
            raise ConfigError(f"model_type {kind!r} is not supported: {', '.join(FAMILIES)} are")
        _refuse(raw)
        width = integer(raw, "hidden_size", MOST_WIDTH)
        layers = integer(raw, "num_hidden_layers", MOST_LAYERS)
        heads, kv_heads, dim = _heads(raw, family, width)
        vocab = integer(raw, "vocab_size", MOST_TOKENS)
        positions = integer(raw, "max_position_embeddings", MOST_TOKENS)
        every_bias = kind in BIASED and flag(raw, "attention_bias", False)
        return cls(
            vocab_size=vocab,
            num_positions=positions,
            width=width,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            inner=integer(raw, "intermediate_size", MOST_INNER),
            rope=read_rope(raw, dim, positions),
            norm_epsilon=number(raw, "rms_norm_eps", 1e-20, 1.0, 1e-6),
            qkv_bias=family.qkv_bias or every_bias,
            output_bias=every_bias,
            mlp_bias=kind == "llama" and flag(raw, "mlp_bias", False),
            qk_norm=family.qk_norm,
            windows=_windows(raw, str(kind), family, layers, positions),
            tied_head=flag(raw, "tie_word_embeddings", False),
            eos_token_ids=token_ids(raw.get("eos_token_id"), vocab),
        )


def _refuse(raw: Mapping[str, Any]) -> None:
    """Settings that would change the arithmetic and are not implemented."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported: only 'silu' is")
    if raw.get("quantization_config") is not None:
        raise ConfigError("quantization_config: packed weights in safetensors files are not supported; use a GGUF file")
    if raw.get("is_encoder_decoder") or raw.get("add_cross_attention"):
        raise ConfigError("only decoders that attend to themselves are supported")


def _heads(raw: Mapping[str, Any], family: Family, width: int) -> tuple[int, int, int]:
    """Query heads, key-value heads, head width."""
    heads = integer(raw, "num_attention_heads", MOST_HEADS)
    kv_heads = integer(raw, "num_key_value_heads", MOST_HEADS, heads if family.kv_heads is None else family.kv_heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}")
    if raw.get("head_dim") is None and family.head_dim is None and width % heads:
        raise ConfigError(f"hidden_size {width} is not divisible by num_attention_heads {heads}, and there is no head_dim")
    return heads, kv_heads, integer(raw, "head_dim", MOST_WIDTH, family.head_dim or width // heads)


def _windows(raw: Mapping[str, Any], kind: str, family: Family, layers: int, positions: int) -> tuple[int | None, ...]:
    """The window of each layer.

    Mistral: `sliding_window` on every layer. Qwen: none unless `use_sliding_window`; then on the layers that `layer_types`
    says, or else on those from number `max_window_layers` on (so with `max_window_layers` equal to the number of layers, on
    none), as transformers' code has it: the key's published description says the opposite. A window that is not shorter
    than the model's positions hides nothing and is left out. A Llama has none; a file that gives one is refused, for its
    readers disagree.
    """
    if kind == "llama":
        if raw.get("sliding_window") is not None:
            raise ConfigError(f"sliding_window {raw['sliding_window']!r}: model_type 'llama' has no windows")
        return (None,) * layers
    window = _window(raw, family, positions)
    if kind == "mistral":
        if raw.get("layer_types") is not None:
            raise ConfigError("layer_types: model_type 'mistral' has the same window on every layer")
        return (window,) * layers
    slides = _sliding_layers(raw, layers) if flag(raw, "use_sliding_window", False) else [False] * layers
    return tuple(window if slide else None for slide in slides)


def _window(raw: Mapping[str, Any], family: Family, positions: int) -> int | None:
    """The width that the file gives: null is none, and no key the family's default."""
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return None
    window = integer(raw, "sliding_window", MOST_TOKENS, family.window)
    return window if window < positions else None


def _sliding_layers(raw: Mapping[str, Any], layers: int) -> list[bool]:
    types = raw.get("layer_types")
    if types is None:
        first = integer(raw, "max_window_layers", MOST_LAYERS, 28, least=0)
        return [layer >= first for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"layer_types {types!r:.80} is not a list of {layers} entries, one a layer")
    if unknown := [each for each in types if each not in (FULL, SLIDING)]:
        raise ConfigError(f"layer_types: {unknown[0]!r} is not supported: {FULL} and {SLIDING} are")
    return [each == SLIDING for each in types]
