"""What a config.json says, checked before anything is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanokv.errors import ConfigError
from nanokv.kv.tile import CAUSAL, Visibility
from nanokv.models.fields import flag, integer, number
from nanokv.numerics import ACTIVATIONS

# Beyond these a value is a mistake, not a model.
MOST_TOKENS = 1 << 24
MOST_WIDTH = 1 << 17
MOST_LAYERS = MOST_HEADS = 1 << 12
MOST_INNER = 1 << 19


@dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2 model. Field names are the runtime's; `from_dict` reads Hugging Face's."""

    vocab_size: int
    num_positions: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    inner: int
    activation: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_by_head_dim: bool = True
    scale_by_layer: bool = False
    tied_head: bool = True
    eos_token_ids: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Exact count, a tied head counted once."""
        e, kv = self.width, self.num_kv_heads * self.head_dim
        block = 4 * e + (e + 2 * kv) * (e + 1) + e * (e + 1) + self.inner * (e + 1) + e * (self.inner + 1)
        head = 0 if self.tied_head else self.vocab_size * e
        return self.vocab_size * e + self.num_positions * e + self.num_layers * block + 2 * e + head

    def attention_scale(self, layer: int) -> float:
        """What multiplies the scores of `layer`."""
        scale = self.head_dim**-0.5 if self.scale_by_head_dim else 1.0
        return scale / (layer + 1) if self.scale_by_layer else scale

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token takes over all layers, `itemsize` bytes an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def visibility(self) -> list[Visibility]:
        """Which keys a query may see, for each layer: all."""
        return [CAUSAL] * self.num_layers

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "GPT2Config":
        """From the keys of a Hugging Face config.json; ConfigError names the key that is missing, absurd or unsupported."""
        if not isinstance(raw, Mapping):
            raise ConfigError("config.json does not hold an object")
        kind = raw.get("model_type")
        if kind != "gpt2":
            raise ConfigError(f"model_type {kind!r} is not supported: only 'gpt2' is")
        for key in ("add_cross_attention", "is_encoder_decoder"):
            if raw.get(key):
                raise ConfigError(f"{key} is true: only decoders that attend to themselves are supported")
        width, heads = integer(raw, "n_embd", MOST_WIDTH), integer(raw, "n_head", MOST_HEADS)
        if width % heads:
            raise ConfigError(f"n_embd {width} is not divisible by n_head {heads}")
        kv_heads = integer(raw, "num_key_value_heads", MOST_HEADS, heads)
        if heads % kv_heads:
            raise ConfigError(f"n_head {heads} is not divisible by num_key_value_heads {kv_heads}")
        activation = raw.get("activation_function", "gelu_new")
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation_function {activation!r} is not supported: {', '.join(ACTIVATIONS)} are")
        vocab = integer(raw, "vocab_size", MOST_TOKENS)
        return cls(
            vocab_size=vocab,
            num_positions=integer(raw, "n_positions", MOST_TOKENS),
            width=width,
            num_layers=integer(raw, "n_layer", MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=kv_heads,
            inner=integer(raw, "n_inner", MOST_INNER, 4 * width),
            activation=activation,
            layer_norm_epsilon=number(raw, "layer_norm_epsilon", 1e-20, 1.0, 1e-5),
            scale_by_head_dim=flag(raw, "scale_attn_weights", True),
            scale_by_layer=flag(raw, "scale_attn_by_inverse_layer_idx", False),
            tied_head=flag(raw, "tie_word_embeddings", True),
            eos_token_ids=token_ids(raw.get("eos_token_id"), vocab),
        )


def token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """eos_token_id as files have it, a number, a list or nothing -> ids; one outside the vocabulary is an error."""
    ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ConfigError(f"eos_token_id {token!r} is not an id of the vocabulary (0 .. {vocab_size - 1})")
    return ids


def known_shapes() -> dict[str, GPT2Config]:
    """The published sizes of GPT-2 (Radford et al. 2019, table 2; the parameter counts are those of the files)."""
    sizes = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
    return {
        name: GPT2Config(50257, 1024, width, layers, heads, heads, 4 * width, eos_token_ids=(50256,))
        for name, (layers, width, heads) in sizes.items()
    }
