"""Llama (Touvron et al. 2023, arXiv 2302.13971) and its relatives, Mistral, Qwen2, Qwen3 and SmolLM: RMSNorm before each
sublayer, rotary positions, grouped-query attention, SwiGLU.

Keys go into the cache rotated, at their absolute positions, and stay so. In a cache that counts positions inside itself (a
window W with S sinks in streaming) a query at p is at P = min(p, S + W - 1), a key j of its window at P - (p - j), and a
sink j at j. A rotary score depends on the distance alone: to keys of the window it is p - j, that of absolute positions; only
the distance to sinks changes, from p - j to P - j. So the query is rotated twice: at p for its window, at P for the sinks.

Symbols: R rows (tokens being computed), E width, Hq query heads, Hkv key-value heads, D head width, I inner width,
V vocabulary. Every matrix is stored [out, in].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nanokv.attention import cached_attention
from nanokv.backend import Array, Backend, module_of
from nanokv.errors import UsageError
from nanokv.kv.tile import Batch, Cache, members_of
from nanokv.models.llama_config import LlamaConfig
from nanokv.models.recorded import Recordable, Recorded, RecordedHead, Room, Sizes, can_record
from nanokv.models.tokens import check_positions, check_tokens
from nanokv.numerics import COMPILED, EXACT, Numerics, linear, rms_norm, swiglu
from nanokv.rope import rotate

if TYPE_CHECKING:
    from nanokv.kernels.recording import Program

Matrix = Array
Vector = Array


@dataclass(frozen=True)
class Block:
    """One layer. qkv is queries, keys and values stacked, gate_up the two halves of SwiGLU; None is a part that the model
    does not have."""

    attention_norm: Vector
    qkv_weight: Matrix  # [(Hq + 2 Hkv) D, E]
    output_weight: Matrix  # [E, Hq D]
    mlp_norm: Vector
    gate_up_weight: Matrix  # [2 I, E]
    down_weight: Matrix  # [E, I]
    qkv_bias: Vector | None = None
    output_bias: Vector | None = None
    gate_up_bias: Vector | None = None
    down_bias: Vector | None = None
    q_norm: Vector | None = None  # [D]
    k_norm: Vector | None = None  # [D]

    def arrays(self) -> list[Array]:
        """Those that are there."""
        return [array for array in vars(self).values() if array is not None]


@dataclass(frozen=True)
class LlamaParams(Recordable):
    """Config and weights; `head` is the very same array as `embedding` in a tied model."""

    config: LlamaConfig
    embedding: Matrix  # [V, E]
    blocks: tuple[Block, ...]
    norm: Vector
    head: Matrix  # [V, E]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.embedding.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes that every decoded token reads: all matrices and vectors, the head, not the embedding table."""
        blocks = sum(array.nbytes for block in self.blocks for array in block.arrays())
        return blocks + self.norm.nbytes + self.head.nbytes

    def to(self, backend: Backend) -> "LlamaParams":
        """The same weights in the memory of `backend`."""
        move = backend.from_numpy

        def moved(block: Block) -> Block:
            return Block(**{name: None if array is None else move(array) for name, array in vars(block).items()})

        embedding = move(self.embedding)
        head = embedding if self.head is self.embedding else move(self.head)
        return LlamaParams(self.config, embedding, tuple(map(moved, self.blocks)), move(self.norm), head)


def forward(
    params: LlamaParams,
    tokens: np.ndarray,
    cache: Cache | Batch,
    *,
    rows: slice | Sequence[int] = slice(None),
    numerics: Numerics = EXACT,
) -> Array:
    """Logits of the next token after each of `tokens`: host ids [R] -> [len(rows), V].

    The tokens continue the sequence (or sequences) in `cache`, which then holds them too; nothing else is changed. The
    cache must have been made with the visibility of `params.config`. `rows` says of which rows to compute logits: a prefill
    needs the last only. Raises TokenizerError for an unknown id, UsageError for a cache that this model cannot work with,
    and CapacityError past the model's positions or the cache's capacity, all before anything is written.
    """
    hidden = _layers(params, tokens, cache, numerics)
    if not isinstance(rows, slice):
        rows = module_of(hidden).asarray(np.asarray(rows, dtype=np.int64))
    logits = unembed(params, hidden[rows], numerics=numerics)
    cache.commit()
    return logits


def hidden_states(params: LlamaParams, tokens: np.ndarray, cache: Cache | Batch, *, numerics: Numerics = EXACT) -> Array:
    """The last layer's output before the final norm: ids [R] -> [R, E]. Otherwise as forward()."""
    x = _layers(params, tokens, cache, numerics)
    cache.commit()
    return x


def _layers(params: LlamaParams, tokens: np.ndarray, cache: Cache | Batch, numerics: Numerics) -> Array:
    """hidden_states() up to the commit, before which everything that can fail has to come."""
    config = params.config
    xp = module_of(params.embedding)
    tokens = check_tokens(tokens, config.vocab_size)
    check_visibility(config, cache, len(tokens))
    positions = cache.extend(len(tokens))
    inside = cache.position_ids(positions)
    check_positions(inside, config.num_positions)
    turn = config.rope.tables(positions, like=params.norm)
    turn_sinks = config.rope.tables(inside, like=params.norm) if _has_sinks(cache, len(tokens)) else None
    if numerics is COMPILED and can_record(params.embedding):
        x = params.recorded(len(tokens), _record).run(tokens, inside, positions, cache, (*turn, *(turn_sinks or ())))
        if x is not None:
            return x
    x = params.embedding[xp.asarray(tokens)]  # [R, E]
    for layer, block in enumerate(params.blocks):
        x += _attention(x, block, layer, config, turn, turn_sinks, positions, cache, numerics)
        x += _mlp(x, block, config, numerics)
    return x


def unembed(params: LlamaParams, x: Array, *, numerics: Numerics = EXACT) -> Array:
    """Hidden states [R, E] -> logits [R, V]."""
    if numerics is COMPILED and can_record(params.head):
        return params.recorded(len(x), _record_head).run(x)
    return linear(rms_norm(x, params.norm, params.config.norm_epsilon, numerics), params.head, numerics=numerics)


def fast_bound(params: LlamaParams, x: Array) -> Array:
    """How far the logits of two runs from the hidden states x [R, E] may lie apart when one is fast -> [R, 1].

    The argument is that of nanokv.models.gpt2.fast_bound. A SwiGLU is a product of two sums, so it counts twice: 3 L + 1
    roundings in place of 2 L + 1.
    """
    config = params.config
    widest = max(config.width, config.num_heads * config.head_dim, config.inner, len(x))
    unit = np.finfo(x.dtype).eps / 2
    gamma = widest * unit / (1 - widest * unit)
    normed = rms_norm(x, params.norm, config.norm_epsilon)
    size = np.linalg.norm(params.head, axis=-1).max() * np.linalg.norm(normed, axis=-1, keepdims=True)
    return 2 * (3 * config.num_layers + 1) * gamma * size


def check_visibility(config: LlamaConfig, cache: Cache | Batch, rows: int) -> None:
    """Raises UsageError for a cache in which a layer sees more than the model's window."""
    for member, _ in members_of(cache, rows):
        for layer, window in enumerate(config.windows):
            if window is not None:
                seen = member.visibility(layer)
                if seen.window is None or seen.window > window or seen.sinks:
                    raise UsageError(
                        f"layer {layer} of the model sees the last {window} keys, but the cache lets it see "
                        f"{seen.window or 'all'} and {seen.sinks} sinks: make it with the config's visibility()"
                    )


def _has_sinks(cache: Cache | Batch, rows: int) -> bool:
    """Whether some sequence counts positions inside its cache and has sinks, which are then at other distances."""
    seen = [member.visibility(0) for member, _ in members_of(cache, rows)]  # streaming is the same on every layer
    return any(each.streaming and each.sinks for each in seen)


def sizes(config: LlamaConfig) -> Sizes:
    """What a room for this model is made for."""
    shape = config.num_heads, config.num_kv_heads, config.head_dim
    return Sizes(config.num_layers, config.width, *shape, 2 * config.inner, config.inner, turned=True)


def write_layers(params: LlamaParams, program: "Program", room: Room) -> list[int]:
    """All layers, from ids to hidden states, in operations of a program; the places of those that turn queries for sinks apart,
    which only a streaming cache needs."""
    config, told = params.config, room.told
    eps, heads, kv_heads, dim = config.norm_epsilon, config.num_heads, config.num_kv_heads, config.head_dim
    shape, stride, scale = (kv_heads, heads // kv_heads, dim), (heads + 2 * kv_heads) * dim, config.head_dim**-0.5
    adjacent, twice = config.rope.adjacent, []
    program.embed(told.tokens, params.embedding, None, told.positions, room.x)
    for layer, block in enumerate(params.blocks):
        program.rms_norm(room.x, block.attention_norm, eps, room.h)
        program.linear(room.h, block.qkv_weight, block.qkv_bias, room.qkv)
        q, k, v = room.parts
        gap: int | None = stride
        if block.q_norm is not None and block.k_norm is not None:
            program.rms_norm(q, block.q_norm, eps, room.mixed, heads, stride)
            program.rms_norm(k, block.k_norm, eps, room.normed_k, kv_heads, stride)
            q, k, gap = room.mixed, room.normed_k, None
        twice.append(program.rotate(q, heads, dim, told.sinks_cos, told.sinks_sin, adjacent, room.q_sinks, gap))
        program.rotate(q, heads, dim, told.cos, told.sin, adjacent, room.q, gap)
        program.rotate(k, kv_heads, dim, told.cos, told.sin, adjacent, room.k, gap)
        program.append(room.k, kv_heads, dim, told.slots[layer], layer, values=False)
        program.append(v, kv_heads, dim, told.slots[layer], layer, values=True, stride=stride)
        program.attend(room.q, room.q_sinks, shape, layer, layer, scale, room.mixed)
        program.linear(room.mixed, block.output_weight, block.output_bias, room.x, adds=True)
        program.rms_norm(room.x, block.mlp_norm, eps, room.h)
        program.linear(room.h, block.gate_up_weight, block.gate_up_bias, room.wide)
        program.swiglu(room.wide, room.inner, config.inner)
        program.linear(room.inner, block.down_weight, block.down_bias, room.x, adds=True)
    return twice


def write_norm(params: LlamaParams, program: "Program", x: Array, out: Array) -> None:
    """The norm before the head."""
    program.rms_norm(x, params.norm, params.config.norm_epsilon, out)


def _record(params: LlamaParams, rows: int) -> Recorded:
    return Recorded(rows, sizes(params.config), partial(write_layers, params))


def _record_head(params: LlamaParams, rows: int) -> RecordedHead:
    return RecordedHead(rows, params.head, partial(write_norm, params))


def _attention(
    x: Array,
    block: Block,
    layer: int,
    config: LlamaConfig,
    turn: tuple[Array, Array],
    turn_sinks: tuple[Array, Array] | None,
    positions: np.ndarray,
    cache: Cache | Batch,
    numerics: Numerics,
) -> Array:
    """[R, E] -> [R, E]"""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    h = rms_norm(x, block.attention_norm, config.norm_epsilon, numerics)
    qkv = linear(h, block.qkv_weight, block.qkv_bias, numerics).reshape(len(x), -1, config.head_dim)  # [R, Hq + 2 Hkv, D]
    if block.q_norm is not None:
        qkv[:, :heads] = rms_norm(qkv[:, :heads], block.q_norm, config.norm_epsilon, numerics)
        keys = slice(heads, heads + kv_heads)
        qkv[:, keys] = rms_norm(qkv[:, keys], block.k_norm, config.norm_epsilon, numerics)
    q_sinks = None if turn_sinks is None else rotate(qkv[:, :heads], *turn_sinks, config.rope.adjacent, numerics)
    turned = rotate(qkv[:, : heads + kv_heads], *turn, config.rope.adjacent, numerics)  # [R, Hq + Hkv, D]
    q, k, v = turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :]
    mixed = cached_attention(q, k, v, positions, cache, layer, numerics=numerics, q_sinks=q_sinks)
    return linear(mixed.reshape(len(x), -1), block.output_weight, block.output_bias, numerics)  # [R, Hq D] -> [R, E]


def _mlp(x: Array, block: Block, config: LlamaConfig, numerics: Numerics) -> Array:
    """[R, E] -> [R, I] -> [R, E]"""
    h = rms_norm(x, block.mlp_norm, config.norm_epsilon, numerics)
    h = swiglu(linear(h, block.gate_up_weight, block.gate_up_bias, numerics), numerics)
    return linear(h, block.down_weight, block.down_bias, numerics)


def block_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The fields of Block that a model of this shape has, and their shapes."""
    e, i, q, kv = config.width, config.inner, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (e,), "qkv_weight": (q + 2 * kv, e), "output_weight": (e, q),
        "mlp_norm": (e,), "gate_up_weight": (2 * i, e), "down_weight": (e, i),
    }  # fmt: skip
    if config.qkv_bias:
        shapes["qkv_bias"] = (q + 2 * kv,)
    if config.output_bias:
        shapes["output_bias"] = (e,)
    if config.mlp_bias:
        shapes |= {"gate_up_bias": (2 * i,), "down_bias": (e,)}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return shapes


def random_params(config: LlamaConfig, seed: int = 0, dtype: type = np.float32, scale: float = 0.02) -> LlamaParams:
    """Random weights of a shape, for tests and benchmarks: normal with deviation `scale`, norms around one."""
    rng = np.random.default_rng(seed)

    def normal(name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = rng.standard_normal(shape, dtype=np.float32)
        array *= np.float32(scale)
        array += np.float32(name.endswith("norm"))
        return array.astype(dtype, copy=False)

    shapes = block_shapes(config)
    blocks = tuple(Block(**{name: normal(name, shape) for name, shape in shapes.items()}) for _ in range(config.num_layers))
    table = config.vocab_size, config.width
    embedding = normal("embedding", table)
    head = embedding if config.tied_head else normal("head", table)
    return LlamaParams(config, embedding, blocks, normal("norm", (config.width,)), head)
