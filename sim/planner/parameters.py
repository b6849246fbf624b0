"""How many parameters a model has, exactly, from its config.json: for the families whose layers are written down here.

Anything else is refused: a count comes from the header of the weight file then, or from the user.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanokv.errors import ConfigError
from nanokv.models.config import GPT2Config
from sim.planner.families.defaults import DEFAULTS
from sim.planner.fields import Fields
from sim.planner.layers import Geometry


@dataclass(frozen=True)
class Shape:
    """What a decoder of this family has besides its matrices: a pre-norm block with RMS norms and a gated MLP.

    The biases are True, False, or the key that decides. `norms` is the norms of a block; `qk_norm` adds one of a head's
    width for queries and one for keys. `experts` is the class default of a mixture, whose router is [E, experts];
    `expert_width` the key and the default of their inner width.
    """

    inner: int
    tied: bool
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    norms: int = 2
    experts: int | None = None
    expert_width: tuple[str, int] | None = None


SHAPES: Mapping[str, Shape] = {  # inner width and tied head where a file leaves them out: the class defaults
    "llama": Shape(11008, False, "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Shape(14336, False),
    "qwen2": Shape(22016, False, qkv_bias=True),
    "qwen3": Shape(22016, False, "attention_bias", "attention_bias", qk_norm=True),
    "gemma": Shape(24576, True, "attention_bias", "attention_bias"),
    "gemma2": Shape(9216, True, "attention_bias", "attention_bias", norms=4),
    "gemma3_text": Shape(9216, True, "attention_bias", "attention_bias", qk_norm=True, norms=4),
    "phi3": Shape(8192, False),
    "granite": Shape(11008, False, "attention_bias", "attention_bias", "mlp_bias"),
    "smollm3": Shape(11008, True, "attention_bias", "attention_bias", "mlp_bias"),
    "mixtral": Shape(14336, False, experts=8, expert_width=("intermediate_size", 14336)),
    "qwen3_moe": Shape(
        6144, False, "attention_bias", "attention_bias", qk_norm=True, experts=128,
        expert_width=("moe_intermediate_size", 768),
    ),
}  # fmt: skip


def count_parameters(raw: Mapping[str, Any], geometry: Geometry) -> int:
    """The exact number, a tied head counted once. ConfigError says why there is none to be had from the file."""
    if geometry.nested:
        raise ConfigError("a multimodal file: the parameters of its other parts are not counted from it")
    if geometry.model_type == "gpt2":
        return GPT2Config.from_dict(raw).num_parameters
    shape = SHAPES.get(geometry.model_type)
    if shape is None:
        raise ConfigError(f"the parameters of {geometry.model_type!r} are not counted from its config.json")
    known = DEFAULTS[geometry.model_type]
    return _count(Fields(raw, known.values, known.source), geometry, shape)


def _count(f: Fields, geometry: Geometry, shape: Shape) -> int:
    vocab, width = f.integer("vocab_size"), f.integer("width")
    head = 0 if f.flag("tie_word_embeddings", shape.tied) else vocab * width
    blocks = sum(_attention(f, shape, width, geometry.num_heads, layer.kv_heads, layer.head_dim_k) for layer in geometry.layers)
    blocks += sum(_mlp(f, shape, width, index) + shape.norms * width for index in range(len(geometry.layers)))
    return vocab * width + head + blocks + width


def _attention(f: Fields, shape: Shape, width: int, heads: int, kv_heads: int, dim: int) -> int:
    stacked = (heads + 2 * kv_heads) * dim
    biases = stacked * _has(f, shape.qkv_bias) + width * _has(f, shape.out_bias)
    return width * stacked + heads * dim * width + biases + 2 * dim * shape.qk_norm


def _mlp(f: Fields, shape: Shape, width: int, index: int) -> int:
    inner = f.integer("intermediate_size", default=shape.inner)
    if shape.experts is None or not _is_sparse(f, index):
        return 3 * width * inner + (2 * inner + width) * _has(f, shape.mlp_bias)
    experts = f.integer("experts", default=shape.experts)
    assert shape.expert_width is not None
    expert = f.integer(shape.expert_width[0], default=shape.expert_width[1])
    return experts * 3 * width * expert + experts * width


def _is_sparse(f: Fields, index: int) -> bool:
    """Qwen 3 MoE's rule; Mixtral has none of these keys, and every layer is a mixture."""
    dense = f.value("mlp_only_layers") or []
    return index not in dense and (index + 1) % f.integer("decoder_sparse_step", default=1) == 0


def _has(f: Fields, bias: bool | str) -> bool:
    return f.flag(bias, False) if isinstance(bias, str) else bias
