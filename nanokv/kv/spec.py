"""Which cache: storage, visibility and codec, as a user names them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanokv.backend import Backend
from nanokv.errors import UsageError
from nanokv.kv.codec import CODECS, Codec, get_codec
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedPool
from nanokv.kv.tile import TILE, Visibility

KINDS = ("contiguous", "paged", "none")


@dataclass(frozen=True)
class CacheSpec:
    """`kind` "none" recomputes everything at every token. `window` W keeps the last W tokens; `sinks` S, with it, the
    first S too, and counts positions inside the cache (streaming; 0 is streaming without sinks). `kv_dtype` is a name of
    nanokv.kv.codec.CODECS; None stores K and V as they are computed. `kv_scale` goes with fp8: one scale for everything.

    Raises UsageError for a combination that cannot work, by name.
    """

    kind: str = "contiguous"
    block_size: int = 16
    window: int | None = None
    sinks: int | None = None
    kv_dtype: str | None = None
    kv_scale: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown cache {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.sinks is not None and self.window is None:
            raise UsageError("--sinks needs --window: without one every token is kept anyway")
        if self.kv_dtype is not None and self.kv_dtype not in CODECS:
            raise UsageError(f"unknown KV format {self.kv_dtype!r}: choose one of {', '.join(CODECS)}")
        if self.kv_scale is not None and self.kv_dtype != "fp8":
            raise UsageError("a KV scale goes with fp8 only: the other formats keep their own")
        if self.kv_dtype == "int4" and self.kind == "paged" and self.block_size % 32:
            raise UsageError(f"KV format int4 works on groups of 32 tokens: block size {self.block_size} is no multiple of 32")
        if not 1 <= self.block_size <= TILE or TILE % self.block_size:
            raise UsageError(f"block size {self.block_size} does not divide the tile of {TILE} tokens: use 1, 2, 4 … {TILE}")
        _ = self.visibility

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.window, self.sinks or 0, self.sinks is not None)

    @property
    def endless(self) -> bool:
        """Whether positions are counted inside the cache, so that a text may outgrow the model's positions."""
        return self.sinks is not None

    def codec(self, dtype: Any, backend: Backend) -> Codec:
        return get_codec(self.kv_dtype, dtype, backend, self.kv_scale)

    def layers(self, own: Sequence[Visibility]) -> list[Visibility]:
        """What each layer of a model sees whose own visibility is `own`: that, or the last `window` of it and the sinks.

        Raises UsageError for sinks where a layer has a window of its own: it was trained without them.
        """
        if self.window is None:
            return list(own)
        if self.sinks is not None and any(each.window is not None for each in own):
            raise UsageError("sinks do not go with a model whose layers have windows of their own: leave out --sinks")
        return [replace(self.visibility, window=min(self.window, each.window or self.window)) for each in own]

    def contiguous(
        self, own: Sequence[Visibility], kv_heads: int, dim: int, capacity: int | None, dtype: Any, backend: Backend
    ) -> ContiguousCache:
        """An empty contiguous cache for a model of the visibility `own`; also what a run without a cache computes in."""
        codec = self.codec(dtype, backend)
        return ContiguousCache(len(own), kv_heads, dim, capacity, dtype, backend, codec, self.layers(own))

    def pool(
        self,
        own: Sequence[Visibility],
        kv_heads: int,
        dim: int,
        num_blocks: int,
        dtype: Any,
        backend: Backend,
        name: str = "",
    ) -> PagedPool:
        """A pool of `num_blocks` blocks, the null block included, for the model called `name` of the visibility `own`."""
        codec = self.codec(dtype, backend)
        extra = {"model": name, "dtype": str(dtype), "scale": str(self.kv_scale)}
        visibility = self.layers(own)
        return PagedPool(len(own), kv_heads, dim, num_blocks, self.block_size, dtype, backend, codec, visibility, extra)

    def blocks_for(self, tokens: int, step: int, own: Sequence[Visibility]) -> int:
        """Blocks that one sequence of `tokens` tokens, fed at most `step` at once, can come to hold in a model of the
        visibility `own`. A layer that sees everything keeps everything, whatever the others drop."""
        windows = [each.window for each in self.layers(own)]
        if None not in windows:
            kept = max(window for window in windows if window is not None) + (self.sinks or 0)
            tokens = min(tokens, kept + step + 2 * self.block_size)
        return -(-tokens // self.block_size)
