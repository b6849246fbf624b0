"""From what the layers cache to bytes, and back: how many tokens and requests fit in a number of bytes.

Bytes are a function of tokens, not a rate: a window stops growing, a state never grows. The inverse inverts that function
itself. Two ways of holding K and V are counted. `kv` is what the layers need, windows capped. `allocated` is what a paged
allocator with one pool reserves: a block holds `block_size` tokens of every layer, windowed ones too, and a request takes
whole blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanokv.errors import ConfigError, UsageError
from sim.formats import Format
from sim.planner.kv_formats import kv_format, token_bytes
from sim.planner.layers import GROWING, Geometry, Kind, Layer, State

MOST_TOKENS = 1 << 48  # beyond this a context is as good as unlimited


@dataclass(frozen=True)
class Need:
    """Bytes that the caches of `batch` requests of `context` tokens take. `kv` and `indexer` grow with tokens."""

    kv: int
    allocated: int
    indexer: int
    indexer_allocated: int
    cross: int
    state: int

    @property
    def total(self) -> int:
        """All of it, with K and V as the layers need them."""
        return self.kv + self.indexer + self.cross + self.state

    @property
    def total_allocated(self) -> int:
        """All of it, with K and V as one paged pool reserves them."""
        return self.allocated + self.indexer_allocated + self.cross + self.state


def need(geometry: Geometry, context: int, batch: int, form: Format, block_size: int = 16) -> Need:
    """What `batch` requests of `context` tokens take with K and V in `form`. UsageError for a negative or zero argument."""
    for name, value, least in (("context", context, 0), ("batch", batch, 0), ("block size", block_size, 1)):
        if value < least:
            raise UsageError(f"{name} {value} is below {least}")
    rounded = -(-context // block_size) * block_size
    kv = allocated = indexer = cross = state = 0
    for layer, count in geometry.groups():
        width = token_bytes(layer, form)
        if layer.kind in GROWING:
            kv += count * width * layer.tokens(context)
            allocated += count * width * rounded
            indexer += count * layer.index_bytes
        if layer.kind is Kind.CROSS:
            cross += count * width * (geometry.cross_tokens or 0)
        state += count * sum(_state_bytes(part, geometry.dtype) for part in layer.state)
    return Need(
        kv * batch, allocated * batch, indexer * context * batch, indexer * rounded * batch, cross * batch, state * batch
    )


def _state_bytes(state: State, dtype: str) -> int:
    itemsize = kv_format(dtype).bits // 8 if state.itemsize is None else state.itemsize
    return state.heads * state.per_head * itemsize


def first_token_bytes(geometry: Geometry, form: Format) -> int:
    """K and V of one request's first token: every layer holds it. It is a rate only for a model without windows."""
    return need(geometry, 1, 1, form).kv


def pool_tokens(geometry: Geometry, budget: int, form: Format, block_size: int = 16) -> int:
    """Token slots of one paged pool of `budget` bytes: what vLLM's log calls the GPU KV cache size."""
    block = need(geometry, block_size, 1, form, block_size)
    size = block.allocated + block.indexer_allocated
    return max(0, budget) // size * block_size if size else 0


def max_tokens(
    geometry: Geometry, budget: int, batch: int, form: Format, block_size: int = 16, *, one_pool: bool = False
) -> int | None:
    """The longest context at which `batch` requests fit in `budget` bytes; None where it never runs out."""

    def size(context: int) -> int:
        found = need(geometry, context, batch, form, block_size)
        return found.total_allocated if one_pool else found.total

    return largest(size, budget)


def max_requests(
    geometry: Geometry, budget: int, context: int, form: Format, block_size: int = 16, *, one_pool: bool = False
) -> int | None:
    """How many requests of `context` tokens fit in `budget` bytes; None where a request takes nothing."""
    one = need(geometry, context, 1, form, block_size)
    size = one.total_allocated if one_pool else one.total
    return max(0, budget) // size if size else None


def largest(function: Callable[[int], int], limit: int) -> int | None:
    """The largest n >= 0 with function(n) <= limit, for a function that never falls: 0 if there is none, None if all are."""
    if function(0) > limit:
        return 0
    low, high = 0, 1
    while function(high) <= limit:
        low, high = high, 2 * high
        if high > MOST_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if function(middle) <= limit else (low, middle)
    return low


def shard(geometry: Geometry, parts: int) -> Geometry:
    """What each of `parts` tensor-parallel GPUs caches.

    Query heads must divide evenly. Key-value heads are split where `parts` divides them and repeated where they are fewer;
    a latent vector counts as one head, so every GPU keeps all of it, and an indexer's keys likewise (vLLM does so).
    """
    if parts < 1:
        raise UsageError(f"tensor parallel {parts} is below 1")
    if geometry.num_heads % parts:
        raise ConfigError(f"{geometry.num_heads} attention heads cannot be split over {parts} GPUs")
    return replace(geometry, layers=tuple(_shard_layer(layer, parts) for layer in geometry.layers))


def _shard_layer(layer: Layer, parts: int) -> Layer:
    heads = share(layer.kv_heads, parts, "key-value heads")
    state = tuple(replace(part, heads=share(part.heads, parts, "state heads")) for part in layer.state)
    return replace(layer, kv_heads=heads, state=state)


def share(heads: int, parts: int, what: str) -> int:
    """Heads that one of `parts` GPUs holds: an equal part, or one head where there are fewer heads than GPUs."""
    if heads % parts == 0:
        return heads // parts
    if parts % heads == 0:
        return 1
    raise ConfigError(f"{heads} {what} can be neither split over nor repeated on {parts} GPUs")
