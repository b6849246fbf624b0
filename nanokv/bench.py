"""Time per token with and without a cache as the context grows, and decoding against the read bandwidth."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanokv.backend import get_backend
from nanokv.cost import decode_bytes
from nanokv.errors import UsageError
from nanokv.kernels.choice import memory_for
from nanokv.measure import blas, read_bandwidth, seconds
from nanokv.model import Model, choose_numerics
from nanokv.models.config import known_shapes
from nanokv.models.gpt2 import random_params
from nanokv.tokenizer import Tokenizer


def random_model(
    shape: str,
    dtype: str,
    backend: str,
    numerics: str | None,
    kernels: str = "auto",
    weights: str | None = None,
    threads: int | None = None,
) -> Model:
    """Random weights of a published GPT-2 size; its tokens are bytes. Raises UsageError for an unknown size."""
    shapes = known_shapes()
    if shape not in shapes:
        raise UsageError(f"unknown shape {shape!r}: choose one of {', '.join(shapes)}")
    chosen = get_backend(backend)
    mode = choose_numerics(numerics, chosen, kernels, dtype)
    params = random_params(shapes[shape], dtype=np.dtype(dtype).type).to(memory_for(chosen, mode, weights, threads))
    return Model(f"{shape} (random weights)", params, Tokenizer.of_bytes(), backend=chosen, numerics=mode).warm_up()


@dataclass(frozen=True)
class Point:
    """Milliseconds for one more token when `context` tokens are known: with them cached, and computing them again."""

    context: int
    cached_ms: float
    uncached_ms: float | None


def curve(
    model: Model, contexts: list[int], repeat: int, uncached_limit: int, done: Callable[[Point], object] = lambda _: None
) -> Iterator[Point]:
    """Medians of `repeat` runs at each context; without a cache only up to `uncached_limit` tokens."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, max(contexts) + 1)
    last = slice(-1, None)
    cache = model.new_cache(max(contexts) + 1)
    for context in sorted(contexts):
        if not 0 < context < model.config.num_positions:
            raise UsageError(f"context {context} is out of range: the model has {model.config.num_positions} positions")
        model.forward(tokens[cache.length : context], cache, last)

        def cached(context: int = context) -> None:
            model.forward(tokens[context : context + 1], cache, last)
            cache.truncate(context)

        def uncached(context: int = context) -> None:
            model.forward(tokens[: context + 1], model.new_cache(context + 1), last)

        again = seconds(uncached, max(1, repeat // 3)) * 1e3 if context <= uncached_limit else None
        point = Point(context, seconds(cached, repeat) * 1e3, again)
        done(point)
        yield point


def report(model: Model, points: list[Point], prefill_tokens: int) -> dict[str, Any]:
    """What `bench --json` prints; decode speed is that of the shortest context measured."""
    name, threads = blas()
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, prefill_tokens)

    def prefill() -> None:
        model.forward(tokens, model.new_cache(prefill_tokens), slice(-1, None))

    first = points[0]
    speed = decode_bytes(model, first.context, model.new_cache(1).bytes_per_token) / (first.cached_ms / 1e3)
    bandwidth = read_bandwidth()
    return {
        "model": model.name,
        "numerics": str(model.numerics),
        "dtype": str(model.dtype),
        "threads": threads,
        "blas": name,
        "read_gb_per_s": bandwidth / 1e9,
        "decode_ms_per_token": first.cached_ms,
        "decode_gb_per_s": speed / 1e9,
        "share_of_read_bandwidth": speed / bandwidth,
        "prefill_tokens_per_s": prefill_tokens / seconds(prefill, 3),
        "curve": [vars(point) for point in points],
    }
