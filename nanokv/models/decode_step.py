"""One decoded token for each of B sequences as launches over fixed memory: what a CUDA graph can hold.

    step = DecodeStep(params, pool, batch, most_tokens)
    step.prepare(caches, tokens)     # the host's part: blocks, tables; one copy to the card
    step.run()                       # launches only: nothing is allocated, copied or waited for
    step.finish()                    # the caches hold the tokens; step.logits [B, V], step.chosen [B] are on the card

run() reads all that changes from step to step (tokens, positions, block tables) from the card's memory, so a graph that was
captured once serves every step of up to `most_tokens` tokens a sequence: capture() makes run() launch it. The bits are those
of forward(). Sequences share one pool, whose layers see alike, in a KV format without a tile apart; matrices are packed
(arrays.CardMemory).

Symbols: B sequences, E width, Hq query heads, H key-value heads, D head width, N tiles of the list, T = 128 keys a tile.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from nanokv.backend import Array, Backend, address_of
from nanokv.errors import CapacityError, UsageError
from nanokv.kernels import layout
from nanokv.kernels.cuda import launches
from nanokv.kernels.cuda.card import Card
from nanokv.kernels.cuda.launches import TILE, Tables
from nanokv.kv.paged import PagedCache, PagedPool
from nanokv.kv.pages import codec_number
from nanokv.models import gpt2, llama
from nanokv.models.config import GPT2Config
from nanokv.models.gpt2 import GPT2Params
from nanokv.models.llama import LlamaParams
from nanokv.models.llama_config import LlamaConfig

F, I = np.float32, np.int32  # noqa: E741


class _Sent:
    """Arrays of fixed shapes that go to the card together: written on the host, sent by one copy."""

    def __init__(self, xp: ModuleType, **shapes: tuple[tuple[int, ...], Any]):
        sizes = [-(-int(np.prod(shape)) * np.dtype(kind).itemsize // 16) * 16 for shape, kind in shapes.values()]
        self._host, self._there = np.zeros(sum(sizes), np.uint8), xp.zeros(sum(sizes), dtype=np.uint8)
        self.host: dict[str, np.ndarray] = {}
        self.there: dict[str, Array] = {}
        start = 0
        for (name, (shape, kind)), size in zip(shapes.items(), sizes, strict=True):
            stop = start + int(np.prod(shape)) * np.dtype(kind).itemsize
            self.host[name] = self._host[start:stop].view(kind).reshape(shape)
            self.there[name] = self._there[start:stop].view(kind).reshape(shape)
            start += size

    def send(self) -> None:
        self._there.set(self._host)


class DecodeStep:
    """See the module. UsageError for a pool that it cannot work with."""

    def __init__(self, params: GPT2Params | LlamaParams, pool: PagedPool, batch: int, most_tokens: int, backend: Backend):
        if pool.codec.own_tile:
            raise UsageError(f"KV format {pool.codec.name} keeps a tile apart in full precision: a fixed step cannot read it")
        if len(set(pool.visibility)) > 1 or pool.visibility[0].streaming:
            raise UsageError("a fixed step needs layers that all see alike and count absolute positions")
        config, xp = params.config, backend.xp
        if isinstance(config, GPT2Config) and config.activation != "gelu_new":
            raise UsageError(f"activation {config.activation} has no kernel: a fixed step needs gelu_new or SwiGLU")
        self._params, self._pool, self._card, self._xp = params, pool, Card(xp), xp
        self._codec, self._fixed = codec_number(pool.codec), float(getattr(pool.codec, "scale", None) or 1.0)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        count, each = batch * -(-most_tokens // TILE), TILE // pool.block_size
        self._each_tiles = count // batch
        half = (batch, dim // 2)
        row = ((batch,), I)
        self._sent = _Sent(
            xp, tokens=row, positions=row, slots=row, run_of=row, runs=((batch, layout.RUN_COLUMNS), np.int64), cos=(half, F),
            sin=(half, F), tiles=((count, 5), I), units=((count, each), I), owner=((count,), I),
        )  # fmt: skip
        self._sent.host["run_of"][:] = np.arange(batch)
        planes = pool.storage.k, pool.storage.v
        sources = np.zeros((config.num_layers, 1, 7), np.int64)
        for layer in range(config.num_layers):
            sources[layer, 0, 0] = self._codec
            for column, those in zip((1, 4), planes, strict=True):
                for i, plane in enumerate(those):
                    sources[layer, 0, column + i] = address_of(plane) + layer * plane.strides[0]
        there, nothing = self._sent.there, xp.zeros((0, 2), dtype=I)
        sent_sources = xp.asarray(sources)
        self._tables = [
            Tables(
                there["positions"], there["runs"], there["tiles"], sent_sources[layer], there["units"], there["owner"],
                there["run_of"], nothing, pool.block_size, 1,
            )
            for layer in range(config.num_layers)
        ]  # fmt: skip

        def room(*shape: int) -> Array:
            return xp.zeros(shape, dtype=F)

        matrices = [each for block in params.blocks for each in vars(block).values() if getattr(each, "ndim", 0) == 2]
        shapes = [launches.sums_shape(batch, matrix) for matrix in (*matrices, params.head)]
        self._sums = room(max(int(np.prod(shape)) for shape in shapes))
        widest = max(matrix.shape[0] for matrix in matrices)
        self._x, self._h, self._y = (room(batch, config.width) for _ in range(3))
        self._qkv = room(batch, heads + 2 * kv_heads, dim)
        self._q, self._k, self._mixed = room(batch, heads, dim), room(batch, kv_heads, dim), room(batch, heads, dim)
        self._wide, self._inner = room(batch, widest), room(batch, widest)
        self._partial = room(count, 1, heads), room(count, 1, heads), room(count, 1, heads, dim)
        self.logits, self.chosen = room(batch, config.vocab_size), xp.zeros((batch,), dtype=I)
        self._caches: Sequence[PagedCache] = ()
        self._graph: Any = None

    def prepare(self, caches: Sequence[PagedCache], tokens: Sequence[int]) -> None:
        """Room for one token in each cache, and all that the kernels look up, sent in one copy. CapacityError, before
        anything is changed, for a cache that is at `most_tokens`."""
        if max(cache.length for cache in caches) >= self._each_tiles * TILE:
            raise CapacityError(f"this step was made for {self._each_tiles * TILE} tokens a sequence: make a longer one")
        host, visibility, at = self._sent.host, self._pool.visibility[0], 0
        host["owner"][:] = -1
        for b, (cache, token) in enumerate(zip(caches, tokens, strict=True)):
            position = int(cache.extend(1)[0])
            pages = cache.pages(0, position // TILE)
            stop = at + len(pages.numbers)
            host["tokens"][b], host["positions"][b] = token, position
            host["slots"][b] = cache.slot_mapping(position, position + 1)[0]
            host["runs"][b] = b, b + 1, at, stop, visibility.window or 0, visibility.sinks
            host["tiles"][at:stop] = 0
            host["tiles"][at:stop, 0], host["tiles"][at:stop, 4] = pages.numbers, np.iinfo(I).max
            host["units"][at:stop], host["owner"][at:stop], at = pages.units, b, stop
        rope = getattr(self._params.config, "rope", None)
        if rope is not None:
            turn = rope.tables(host["positions"].astype(np.int64), like=host["cos"])
            host["cos"][:], host["sin"][:] = (each[:, 0] for each in turn)
        self._caches = caches
        self._sent.send()

    def finish(self) -> None:
        """The caches hold the step's tokens."""
        for cache in self._caches:
            cache.commit()

    def run(self) -> None:
        """The step, by the graph where one was captured."""
        if self._graph is None:
            self._launch()
        else:
            self._graph.launch()

    def capture(self) -> None:
        """From now on run() launches one graph. Kernels must have been loaded: run() once before, after a prepare()."""
        stream = self._xp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            self._launch()
            self._graph = stream.end_capture()

    def _linear(self, x: Array, matrix: Any, bias: Array | None, out: Array) -> None:
        launches.linear(self._card, x, matrix, bias, out, self._sums)

    def _launch(self) -> None:
        params, there, card = self._params, self._sent.there, self._card
        launches.embed_rows(card, there["tokens"], self._table, self._x)
        if isinstance(params, GPT2Params):
            launches.embed(card, there["positions"], params.wpe, there["positions"], None, self._y)
            launches.add(card, self._x, self._y)
            for layer, block in enumerate(params.blocks):
                self._gpt2_layer(layer, block, params.config)
            eps = params.config.layer_norm_epsilon
            launches.layer_norm(card, self._x, params.ln_f_weight, params.ln_f_bias, eps, self._h)
        else:
            for layer, each in enumerate(params.blocks):
                self._llama_layer(layer, each, params.config)
            launches.rms_norm(card, self._x, params.norm, params.config.norm_epsilon, self._h)
        self._linear(self._h, params.head, None, self.logits)
        launches.argmax(card, self.logits, self.chosen)

    @property
    def _table(self) -> Any:
        """The embedding's matrix [V, E]."""
        return self._params.wte if isinstance(self._params, GPT2Params) else self._params.embedding

    def _attend(self, layer: int, q: Array, k: Array, scale: float, q_stride: int | None, k_stride: int | None) -> None:
        """The step's keys and values into their slots, then every query over its tiles -> self._mixed."""
        storage, card, slots = self._pool.storage, self._card, self._sent.there["slots"]
        wide = self._qkv.shape[1] * self._qkv.shape[2]
        v = self._qkv[:, -self._k.shape[1] :]
        for x, planes, stride in ((k, storage.k, k_stride), (v, storage.v, wide)):
            scales = planes[1][layer] if len(planes) > 1 else None
            launches.append(card, x, slots, self._codec, planes[0][layer], scales, self._fixed, stride)
        kv_heads = self._k.shape[1]
        launches.attend(card, q, q, self._tables[layer], kv_heads, self._fixed, scale, self._mixed, self._partial, q_stride)

    def _gpt2_layer(self, layer: int, block: gpt2.Block, config: GPT2Config) -> None:
        card = self._card
        eps, batch, heads = config.layer_norm_epsilon, len(self._x), config.num_heads
        launches.layer_norm(card, self._x, block.ln_1_weight, block.ln_1_bias, eps, self._h)
        flat = self._qkv.reshape(batch, -1)
        self._linear(self._h, block.qkv_weight, block.qkv_bias, flat)
        q, k = self._qkv[:, :heads], self._qkv[:, heads : heads + config.num_kv_heads]
        scale = config.attention_scale(layer)
        self._attend(layer, q, k, config.head_dim**-0.5 if scale is None else scale, flat.shape[1], flat.shape[1])
        self._linear(self._mixed.reshape(batch, -1), block.proj_weight, block.proj_bias, self._y)
        launches.add(card, self._x, self._y)
        launches.layer_norm(card, self._x, block.ln_2_weight, block.ln_2_bias, eps, self._h)
        wide, inner = (
            each.reshape(-1)[: batch * block.fc_weight.shape[0]].reshape(batch, -1) for each in (self._wide, self._inner)
        )
        self._linear(self._h, block.fc_weight, block.fc_bias, wide)
        launches.gelu_new(card, wide, inner)
        self._linear(inner, block.out_weight, block.out_bias, self._y)
        launches.add(card, self._x, self._y)

    def _llama_layer(self, layer: int, block: llama.Block, config: LlamaConfig) -> None:
        card, there = self._card, self._sent.there
        eps, batch, heads = config.norm_epsilon, len(self._x), config.num_heads
        launches.rms_norm(card, self._x, block.attention_norm, eps, self._h)
        flat = self._qkv.reshape(batch, -1)
        self._linear(self._h, block.qkv_weight, block.qkv_bias, flat)
        q, k, stride = self._qkv[:, :heads], self._qkv[:, heads : heads + config.num_kv_heads], flat.shape[1]
        if block.q_norm is not None:
            inner = self._inner.reshape(-1)
            normed = inner[: q.size].reshape(q.shape), inner[q.size : q.size + k.size].reshape(k.shape)
            launches.rms_norm(card, q, block.q_norm, eps, normed[0], stride)
            launches.rms_norm(card, k, block.k_norm, eps, normed[1], stride)
            (q, k), stride = normed, 0
        launches.rotate(card, q, there["cos"], there["sin"], config.rope.adjacent, self._q, stride or None)
        launches.rotate(card, k, there["cos"], there["sin"], config.rope.adjacent, self._k, stride or None)
        self._attend(layer, self._q, self._k, config.head_dim**-0.5, None, None)
        self._linear(self._mixed.reshape(batch, -1), block.output_weight, block.output_bias, self._y)
        launches.add(card, self._x, self._y)
        launches.rms_norm(card, self._x, block.mlp_norm, eps, self._h)
        count = batch * block.gate_up_weight.shape[0]
        wide = self._wide.reshape(-1)[:count].reshape(batch, -1)
        inner = self._inner.reshape(-1)[: count // 2].reshape(batch, -1)
        self._linear(self._h, block.gate_up_weight, block.gate_up_bias, wide)
        launches.swiglu(card, wide, inner)
        self._linear(inner, block.down_weight, block.down_bias, self._y)
        launches.add(card, self._x, self._y)
