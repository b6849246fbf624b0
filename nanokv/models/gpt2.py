"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each sublayer, GELU, a head tied to the embedding.

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
from nanokv.kv.tile import Batch, Cache
from nanokv.models.config import GPT2Config
from nanokv.models.recorded import Recordable, Recorded, RecordedHead, Room, Sizes, can_record
from nanokv.models.tokens import check_positions, check_tokens
from nanokv.numerics import COMPILED, EXACT, Numerics, activate, layer_norm, linear

if TYPE_CHECKING:
    from nanokv.kernels.recording import Program

Matrix = Array
Vector = Array


@dataclass(frozen=True)
class Block:
    """One layer. qkv is queries, keys and values stacked: [(Hq + 2 Hkv) D, E]."""

    ln_1_weight: Vector
    ln_1_bias: Vector
    qkv_weight: Matrix
    qkv_bias: Vector
    proj_weight: Matrix  # [E, E]
    proj_bias: Vector
    ln_2_weight: Vector
    ln_2_bias: Vector
    fc_weight: Matrix  # [I, E]
    fc_bias: Vector
    out_weight: Matrix  # [E, I]
    out_bias: Vector


@dataclass(frozen=True)
class GPT2Params(Recordable):
    """Config and weights; `head` is the very same array as `wte` in a tied model."""

    config: GPT2Config
    wte: Matrix  # [V, E]
    wpe: Matrix  # [positions, E]
    blocks: tuple[Block, ...]
    ln_f_weight: Vector
    ln_f_bias: Vector
    head: Matrix  # [V, E]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.wte.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes that every decoded token reads: all matrices and vectors, the head, not the embedding tables."""
        blocks = sum(array.nbytes for block in self.blocks for array in vars(block).values())
        return blocks + self.ln_f_weight.nbytes + self.ln_f_bias.nbytes + self.head.nbytes

    def to(self, backend: Backend) -> "GPT2Params":
        """The same weights in the memory of `backend`."""
        move = backend.from_numpy
        blocks = tuple(Block(*(move(array) for array in vars(block).values())) for block in self.blocks)
        wte = move(self.wte)
        head = wte if self.head is self.wte else move(self.head)
        return GPT2Params(self.config, wte, backend.table(self.wpe), blocks, move(self.ln_f_weight), move(self.ln_f_bias), head)


def forward(
    params: GPT2Params,
    tokens: np.ndarray,
    cache: Cache | Batch,
    *,
    rows: slice | Sequence[int] = slice(None),
    numerics: Numerics = EXACT,
) -> Array:
    """Logits of the next token after each of `tokens`: host ids [R] -> [len(rows), V].

    The tokens continue the sequence (or sequences) in `cache`, which then holds them too; nothing else is changed. `rows`
    says of which rows to compute logits: a prefill needs the last only. Raises TokenizerError for an unknown id and
    CapacityError past the model's positions or the cache's capacity, before anything is written.
    """
    hidden = _layers(params, tokens, cache, numerics)
    if not isinstance(rows, slice):
        rows = module_of(hidden).asarray(np.asarray(rows, dtype=np.int64))
    logits = unembed(params, hidden[rows], numerics=numerics)
    cache.commit()
    return logits


def hidden_states(params: GPT2Params, tokens: np.ndarray, cache: Cache | Batch, *, numerics: Numerics = EXACT) -> Array:
    """The last layer's output before the final norm: ids [R] -> [R, E]. Otherwise as forward()."""
    x = _layers(params, tokens, cache, numerics)
    cache.commit()
    return x


def _layers(params: GPT2Params, tokens: np.ndarray, cache: Cache | Batch, numerics: Numerics) -> Array:
    """hidden_states() up to the commit, before which everything that can fail has to come."""
    config = params.config
    xp = module_of(params.wte)
    tokens = check_tokens(tokens, config.vocab_size)
    positions = cache.extend(len(tokens))
    learned = cache.position_ids(positions)
    check_positions(learned, config.num_positions)  # a GPU would wrap or clamp the index in silence
    if numerics is COMPILED and can_record(params.wte):
        found = params.recorded(len(tokens), _record).run(tokens, learned, positions, cache)
        if found is not None:
            return found
    x = params.wte[xp.asarray(tokens)] + params.wpe[xp.asarray(learned)]  # [R, E]
    for layer, block in enumerate(params.blocks):
        x += _attention(x, block, layer, config, positions, cache, numerics)
        x += _mlp(x, block, config, numerics)
    return x


def unembed(params: GPT2Params, x: Array, *, numerics: Numerics = EXACT) -> Array:
    """Hidden states [R, E] -> logits [R, V]."""
    if numerics is COMPILED and can_record(params.head):
        return params.recorded(len(x), _record_head).run(x)
    x = layer_norm(x, params.ln_f_weight, params.ln_f_bias, params.config.layer_norm_epsilon, numerics)
    return linear(x, params.head, numerics=numerics)


def fast_bound(params: GPT2Params, x: Array) -> Array:
    """How far the logits of two runs from the hidden states x [R, E] may lie apart when one is fast -> [R, 1].

    First order in the unit roundoff: each of the 2 L + 1 sublayers rounds sums of at most K terms, so it adds at most
    gamma_K of its output's size, and passes on what came in without making it larger relative to that size; a logit is a
    product of a row of the head and a normalised x. Twice, for the two runs. docs/numerics.md has the derivation and
    where it does not hold.
    """
    config = params.config
    widest = max(config.width, config.inner, len(x))
    unit = np.finfo(x.dtype).eps / 2
    gamma = widest * unit / (1 - widest * unit)
    normed = layer_norm(x, params.ln_f_weight, params.ln_f_bias, config.layer_norm_epsilon)
    size = np.linalg.norm(params.head, axis=-1).max() * np.linalg.norm(normed, axis=-1, keepdims=True)
    return 2 * (2 * config.num_layers + 1) * gamma * size


def sizes(config: GPT2Config) -> Sizes:
    """What a room for this model is made for."""
    shape = config.num_heads, config.num_kv_heads, config.head_dim
    return Sizes(config.num_layers, config.width, *shape, config.inner, config.inner, turned=False)


def write_layers(params: GPT2Params, program: "Program", room: Room) -> list[int]:
    """All layers, from ids to hidden states, in operations of a program. The list is of those that only a cache of sinks needs
    (llama.write_layers): none."""
    config, told = params.config, room.told
    eps, heads, kv_heads, dim = config.layer_norm_epsilon, config.num_heads, config.num_kv_heads, config.head_dim
    shape, stride = (kv_heads, heads // kv_heads, dim), (heads + 2 * kv_heads) * dim
    q, k, v = room.parts
    program.embed(told.tokens, params.wte, params.wpe, told.positions, room.x)
    for layer, block in enumerate(params.blocks):
        scale = config.attention_scale(layer)
        program.layer_norm(room.x, block.ln_1_weight, block.ln_1_bias, eps, room.h)
        program.linear(room.h, block.qkv_weight, block.qkv_bias, room.qkv)
        program.append(k, kv_heads, dim, told.slots[layer], layer, values=False, stride=stride)
        program.append(v, kv_heads, dim, told.slots[layer], layer, values=True, stride=stride)
        program.attend(q, q, shape, layer, layer, dim**-0.5 if scale is None else scale, room.mixed, (stride, stride))
        program.linear(room.mixed, block.proj_weight, block.proj_bias, room.x, adds=True)
        program.layer_norm(room.x, block.ln_2_weight, block.ln_2_bias, eps, room.h)
        program.linear(room.h, block.fc_weight, block.fc_bias, room.wide)
        program.gelu(room.wide, room.inner, config.inner, by_erf=config.activation == "gelu")
        program.linear(room.inner, block.out_weight, block.out_bias, room.x, adds=True)
    return []


def write_norm(params: GPT2Params, program: "Program", x: Array, out: Array) -> None:
    """The norm before the head."""
    program.layer_norm(x, params.ln_f_weight, params.ln_f_bias, params.config.layer_norm_epsilon, out)


def _record(params: GPT2Params, rows: int) -> Recorded:
    return Recorded(rows, sizes(params.config), partial(write_layers, params))


def _record_head(params: GPT2Params, rows: int) -> RecordedHead:
    return RecordedHead(rows, params.head, partial(write_norm, params))


def _attention(
    x: Array, block: Block, layer: int, config: GPT2Config, positions: np.ndarray, cache: Cache | Batch, numerics: Numerics
) -> Array:
    """[R, E] -> [R, E]"""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    h = layer_norm(x, block.ln_1_weight, block.ln_1_bias, config.layer_norm_epsilon, numerics)
    qkv = linear(h, block.qkv_weight, block.qkv_bias, numerics).reshape(len(x), -1, dim)  # [R, Hq + 2 Hkv, D]
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    mixed = cached_attention(q, k, v, positions, cache, layer, config.attention_scale(layer), numerics=numerics)
    return linear(mixed.reshape(x.shape), block.proj_weight, block.proj_bias, numerics)


def _mlp(x: Array, block: Block, config: GPT2Config, numerics: Numerics) -> Array:
    """[R, E] -> [R, I] -> [R, E]"""
    h = layer_norm(x, block.ln_2_weight, block.ln_2_bias, config.layer_norm_epsilon, numerics)
    h = activate(linear(h, block.fc_weight, block.fc_bias, numerics), config.activation, numerics)
    return linear(h, block.out_weight, block.out_bias, numerics)


def random_params(config: GPT2Config, seed: int = 0, dtype: type = np.float32, scale: float = 0.02) -> GPT2Params:
    """Random weights of a shape, for tests and benchmarks: normal with deviation `scale`, norms around one."""
    rng = np.random.default_rng(seed)
    e, i = config.width, config.inner
    stacked = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def normal(*shape: int, mean: float = 0.0) -> np.ndarray:
        array = rng.standard_normal(shape, dtype=np.float32)
        array *= np.float32(scale)
        array += np.float32(mean)
        return array.astype(dtype, copy=False)

    blocks = tuple(
        Block(
            normal(e, mean=1), normal(e), normal(stacked, e), normal(stacked), normal(e, e), normal(e),
            normal(e, mean=1), normal(e), normal(i, e), normal(i), normal(e, i), normal(e),
        )
        for _ in range(config.num_layers)
    )  # fmt: skip
    wte = normal(config.vocab_size, e)
    head = wte if config.tied_head else normal(config.vocab_size, e)
    return GPT2Params(config, wte, normal(config.num_positions, e), blocks, normal(e, mean=1), normal(e), head)
