"""One forward step of a whole decoder, operation by operation: bytes, operations and the roofline's bound of each.

Every operation reads its inputs and weights from HBM once and writes its output there once: what no cache can better, so
the sum of the bounds is a lower bound for a step that does not fuse them. Attention is one fused operation, or the naive
one's three with S and P in between. Elementwise operations count a few
operations an element by convention (OPS); they never set a bound. The logits of the last position of each sequence alone
are computed, as serving engines do.

Symbols: R rows = batch x new tokens, E width, F inner width, V vocabulary, L context (keys a query sees at most).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanokv.errors import ConfigError
from sim.formats import Format
from sim.gpus import GPU
from sim.roofline import Bound, lower_bound, minimum_bytes, minimum_flops
from sim.shape import Shape

OPS = {"rms_norm": 4, "layer_norm": 7, "softmax": 5, "add": 1, "rope": 3, "silu x": 5, "gelu": 8}  # an element


@dataclass(frozen=True)
class Op:
    """One operation, `count` of them in a step; bytes and operations of one. `kv_bytes` is the cache read or written."""

    name: str
    flops: int
    input_bytes: int
    output_bytes: int
    weight_bytes: int = 0
    kv_bytes: int = 0
    count: int = 1

    @property
    def nbytes(self) -> int:
        return self.input_bytes + self.output_bytes + self.weight_bytes + self.kv_bytes


def linear(name: str, rows: int, inputs: int, outputs: int, form: Format, weights: Format, *, bias: bool = False,
           count: int = 1) -> Op:  # fmt: skip
    """[R, K] x [N, K] -> [R, N]: 2 R K N operations; the weights once with their scales, input and output once."""
    nbytes = outputs * (weights.row_bytes(inputs) + weights.scale_bytes(inputs)) + bias * form.row_bytes(outputs)
    return Op(
        name, 2 * rows * inputs * outputs, rows * form.row_bytes(inputs), rows * form.row_bytes(outputs), nbytes, 0, count
    )


def elementwise(name: str, kind: str, rows: int, columns: int, form: Format, *, inputs: int = 1, weights: int = 0,
                count: int = 1) -> Op:  # fmt: skip
    """`inputs` operands and one result of [R, columns]; `weights` vectors of that width."""
    line = rows * form.row_bytes(columns)
    return Op(name, OPS[kind] * rows * columns, inputs * line, line, weights * form.row_bytes(columns), 0, count)


def scores(name: str, shape: Shape, *, count: int = 1) -> Op:
    """S = Q K^T with S written: K once a key-value head (LLM-Viewer: once a query head, which is wrong for groups)."""
    kv = shape.all_kv_heads * shape.seq * (shape.kv.row_bytes(shape.head_dim) + shape.kv.scale_bytes(shape.head_dim))
    lines = shape.all_heads * shape.rows
    flops = 2 * lines * shape.seq * shape.head_dim
    return Op(
        name, flops, lines * shape.dtype.row_bytes(shape.head_dim), lines * shape.dtype.row_bytes(shape.seq), 0, kv, count
    )


def weighted(name: str, shape: Shape, *, count: int = 1) -> Op:
    """O = P V with P read: the mirror of scores()."""
    mirror = scores(name, shape, count=count)
    return replace(mirror, input_bytes=mirror.output_bytes, output_bytes=mirror.input_bytes)


@dataclass(frozen=True)
class Decoder:
    """What a config.json says about a decoder's work. `gated`: the MLP has a gate (three matrices instead of two); the biases
    are those of the MLP's products, of Q, K and V, and of attention's output."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    norm: str
    gated: bool
    bias: bool
    qkv_bias: bool
    o_bias: bool
    rope: bool
    qk_norm: bool = False
    window: int | None = None


LLAMA_LIKE: Mapping[str, Mapping[str, int]] = {  # what transformers' classes take where a file leaves it out
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}


def read_decoder(path: Path) -> Decoder:
    """From a config.json, or the directory that holds one; ConfigError names the file and the field."""
    name = path.name if path.is_dir() else path.parent.name if path.name == "config.json" else path.stem
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} does not hold an object")
    return decoder_from_dict(raw, name or "model")


def decoder_from_dict(raw: Mapping[str, Any], name: str) -> Decoder:
    """GPT-2's keys, or those that Llama, Mistral, Qwen 2 and Qwen 3 share."""
    kind = raw.get("model_type")
    if kind == "gpt2":
        width, heads = _size(raw, "n_embd"), _size(raw, "n_head")
        inner = _size(raw, "n_inner", 4 * width)
        shared = Decoder(name, _size(raw, "n_layer"), width, heads, heads, width // heads, inner, _size(raw, "vocab_size"),
                         norm="layer_norm", gated=False, bias=True, qkv_bias=True, o_bias=True, rope=False)  # fmt: skip
        if width % heads:
            raise ConfigError(f"n_embd {width} is not divisible by n_head {heads}")
        return shared
    if not isinstance(kind, str) or kind not in LLAMA_LIKE:
        raise ConfigError(f"model_type {kind!r} is not simulated: gpt2, {', '.join(LLAMA_LIKE)} are")
    raw = {**LLAMA_LIKE[kind], **raw}
    width, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}")
    if raw.get("head_dim") is None and width % heads:
        raise ConfigError(f"hidden_size {width} is not divisible by num_attention_heads {heads}, and there is no head_dim")
    slides = raw.get("use_sliding_window", kind == "mistral")
    window = raw.get("sliding_window") if slides else None
    if window is not None and kind != "mistral":
        raise ConfigError(f"use_sliding_window with model_type {kind!r} mixes layers with and without a window: not simulated")
    biased = kind in ("llama", "qwen3") and bool(raw.get("attention_bias", False))  # the others do not read the field
    mlp_bias = kind == "llama" and bool(raw.get("mlp_bias", False))
    return Decoder(
        name, _size(raw, "num_hidden_layers"), width, heads, kv_heads, _size(raw, "head_dim", width // heads),
        _size(raw, "intermediate_size"), _size(raw, "vocab_size"), norm="rms_norm", gated=True, bias=mlp_bias,
        qkv_bias=biased or kind == "qwen2", o_bias=biased, rope=True, qk_norm=kind == "qwen3",
        window=window and _size(raw, "sliding_window"),
    )  # fmt: skip


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"config.json has no {key!r}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 24:
        raise ConfigError(f"{key} {value!r} is not a whole number between 1 and {1 << 24}")
    return value


def step(model: Decoder, shape: Shape, weights: Format, *, naive: bool = False) -> list[Op]:
    """Every operation of one forward step in order; `shape` is the attention's, whose N is the new tokens a sequence."""
    rows, width, layers, form = shape.batch * shape.rows, model.width, model.layers, shape.dtype
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norm_weights = 2 if model.norm == "layer_norm" else 1

    def norm(name: str, times: int) -> Op:
        return elementwise(name, model.norm, rows, width, form, weights=norm_weights, count=times)

    def product(name: str, inputs: int, outputs: int, bias: bool) -> Op:
        return linear(name, rows, inputs, outputs, form, weights, bias=bias, count=layers)

    ops = [_embedding(model, rows, form, weights), norm("attention norm", layers)]
    if model.rope:
        ops += [product(f"{name} proj", width, q_width if name == "q" else kv_width, model.qkv_bias) for name in "qkv"]
    else:
        ops.append(product("qkv proj", width, q_width + 2 * kv_width, model.qkv_bias))
    if model.qk_norm:
        lines = rows * (model.heads + model.kv_heads)
        ops.append(replace(elementwise("q, k norm", "rms_norm", lines, model.head_dim, form, count=layers),
                           weight_bytes=2 * form.row_bytes(model.head_dim)))  # fmt: skip
    ops.append(_cache_write(model, shape, rows, layers))
    ops += _attention(shape, layers, naive)
    ops += [
        product("o proj", q_width, width, model.o_bias),
        elementwise("add", "add", rows, width, form, inputs=2, count=layers),
    ]
    ops.append(norm("mlp norm", layers))
    if model.gated:
        ops += [product(name, width, model.inner, model.bias) for name in ("gate proj", "up proj")]
        ops.append(elementwise("silu x", "silu x", rows, model.inner, form, inputs=2, count=layers))
    else:
        ops.append(product("up proj", width, model.inner, model.bias))
        ops.append(elementwise("gelu", "gelu", rows, model.inner, form, count=layers))
    ops += [
        product("down proj", model.inner, width, model.bias),
        elementwise("add", "add", rows, width, form, inputs=2, count=layers),
    ]
    ops.append(norm("final norm", 1))
    ops.append(linear("head", shape.batch, width, model.vocab, form, weights))
    return ops


def _embedding(model: Decoder, rows: int, form: Format, weights: Format) -> Op:
    """A row of the table for each token, and of the position table where there is one."""
    tables = 1 if model.rope else 2
    read = tables * rows * (weights.row_bytes(model.width) + weights.scale_bytes(model.width))
    return Op("embedding", (tables - 1) * rows * model.width, 0, rows * form.row_bytes(model.width), read)


def _cache_write(model: Decoder, shape: Shape, rows: int, layers: int) -> Op:
    """K and V of the new tokens into the cache, in its dtype; with RoPE, q and k are turned on the way."""
    q_row, kv_row = (shape.dtype.row_bytes(heads * model.head_dim) for heads in (model.heads, model.kv_heads))
    cached = 2 * rows * model.kv_heads * (shape.kv.row_bytes(model.head_dim) + shape.kv.scale_bytes(model.head_dim))
    if not model.rope:
        return Op("cache write", 0, 2 * rows * kv_row, 0, 0, cached, layers)
    flops = OPS["rope"] * rows * (model.heads + model.kv_heads) * model.head_dim
    return Op("rope, cache write", flops, rows * (q_row + 2 * kv_row), rows * q_row, 0, cached, layers)


def _attention(shape: Shape, layers: int, naive: bool) -> list[Op]:
    """One fused operation that touches Q, the visible keys and values and O once; or three with S and P in between."""
    if not naive:
        line = shape.all_heads * shape.rows * shape.dtype.row_bytes(shape.head_dim)
        kv = minimum_bytes(shape) - 2 * line
        return [Op("attention", minimum_flops(shape), line, line, 0, kv, layers)]
    lines = shape.all_heads * shape.rows
    softmax = elementwise("softmax", "softmax", lines, shape.seq, shape.dtype, count=layers)
    return [scores("Q K^T", shape, count=layers), softmax, weighted("P V", shape, count=layers)]


@dataclass(frozen=True)
class Step:
    """A forward step's operations with their bounds, and the whole: operations run one after another."""

    ops: list[Op]
    bounds: list[Bound]

    @property
    def nbytes(self) -> int:
        return sum(op.nbytes * op.count for op in self.ops)

    @property
    def flops(self) -> int:
        return sum(op.flops * op.count for op in self.ops)

    @property
    def seconds(self) -> float:
        return sum(bound.seconds * op.count for op, bound in zip(self.ops, self.bounds, strict=True))


def simulate_model(model: Decoder, gpu: GPU, shape: Shape, weights: Format, *, naive: bool = False) -> dict[str, Step]:
    """{"prefill": the whole context at once, "decode": one token more}, each with its bounds.

    `shape` gives context (seq), batch and dtypes; its heads are replaced by the model's.
    """
    steps = {}
    for phase, rows in (("prefill", shape.seq), ("decode", 1)):
        attention = replace(shape, q_len=rows, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
                            causal=True, window=model.window)  # fmt: skip
        ops = step(model, attention, weights, naive=naive)
        bounds = [lower_bound(op.nbytes, op.flops, gpu, shape.dtype.name) for op in ops]
        steps[phase] = Step(ops, bounds)
    return steps


def steps_as_dict(model: Decoder, gpu: GPU, shape: Shape, steps: Mapping[str, Step]) -> dict[str, Any]:
    """The object that --json prints for a model; bytes, operations and seconds of one operation, and how many there are."""
    return {
        "gpu": gpu.name,
        "model": model.name,
        "context": shape.seq,
        "batch": shape.batch,
        "phases": {
            phase: {
                "hbm_bytes": whole.nbytes,
                "flops": whole.flops,
                "time_s": whole.seconds,
                "ops": [
                    {
                        "name": op.name, "count": op.count, "flops": op.flops, "hbm_bytes": op.nbytes,
                        "weight_bytes": op.weight_bytes, "kv_bytes": op.kv_bytes, "intensity": bound.intensity,
                        "bound": bound.kind, "time_s": bound.seconds,
                    }
                    for op, bound in zip(whole.ops, whole.bounds, strict=True)
                ],
            }
            for phase, whole in steps.items()
        },
    }  # fmt: skip
