"""Bytes as a function of tokens: it never falls, its inverse is exact, and splitting it over GPUs loses nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import ConfigError, UsageError
from sim.formats import FORMATS, Format
from sim.planner.capacity import Need, first_token_bytes, largest, max_requests, max_tokens, need, pool_tokens, shard, share
from sim.planner.kv_formats import BLOCKS, kv_format, token_bytes, vector_bytes
from sim.planner.layers import GROWING, Geometry, Kind, Layer, State

DIMS = st.sampled_from([32, 64, 96, 128, 192, 256])
FORMS = st.sampled_from([*FORMATS.values(), *BLOCKS.values()])


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    kind = draw(st.sampled_from(list(Kind)))
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    if kind in (Kind.FULL, Kind.CROSS):
        return Layer(kind, heads, draw(DIMS), draw(DIMS), index_bytes=draw(st.sampled_from([0, 132])))
    if kind in (Kind.SLIDING, Kind.CHUNKED):
        return Layer(kind, heads, draw(DIMS), draw(DIMS), draw(st.integers(1, 300)))
    if kind is Kind.MLA:
        return Layer(kind, 1, draw(DIMS), 0)
    if kind in (Kind.LINEAR, Kind.MAMBA, Kind.CONV):
        return Layer(kind, state=(State(heads, draw(st.integers(1, 99)), draw(st.sampled_from([None, 2, 4]))),))
    return Layer(kind)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    found = tuple(draw(st.lists(layers(), min_size=1, max_size=6)))
    return Geometry("drawn", found, 8, None, draw(st.sampled_from(["float32", "bfloat16"])), draw(st.integers(0, 50)))


CONTEXTS = st.one_of(st.integers(0, 700), st.integers(0, 1 << 20))
BATCHES = st.integers(0, 40)
BLOCK_SIZES = st.sampled_from([1, 8, 16, 128])


def figures(found: Need) -> tuple[int, ...]:
    return (found.kv, found.allocated, found.indexer, found.indexer_allocated, found.cross, found.state, found.total,
            found.total_allocated)  # fmt: skip


def at_least(more: Need, less: Need) -> bool:
    return all(a >= b for a, b in zip(figures(more), figures(less), strict=True))


@given(geometries(), CONTEXTS, BATCHES, FORMS, BLOCK_SIZES)
def test_more_of_anything_never_takes_less(geometry: Geometry, context: int, batch: int, form: Format, block: int) -> None:
    """A token, a request, a layer."""
    base = need(geometry, context, batch, form, block)
    assert at_least(need(geometry, context + 1, batch, form, block), base)
    assert at_least(need(geometry, context, batch + 1, form, block), base)
    wider = replace(geometry, layers=(*geometry.layers, Layer(Kind.FULL, 2, 64, 64)))
    assert at_least(need(wider, context, batch, form, block), base)


@given(geometries(), CONTEXTS, BATCHES, FORMS, BLOCK_SIZES)
def test_a_pool_reserves_at_least_what_is_needed(
    geometry: Geometry, context: int, batch: int, form: Format, block: int
) -> None:
    found = need(geometry, context, batch, form, block)
    assert found.allocated >= found.kv
    assert found.indexer_allocated >= found.indexer


@given(geometries(), st.integers(0, 1 << 34), st.integers(1, 40), FORMS, BLOCK_SIZES, st.booleans())
def test_the_inverse_is_exact(geometry: Geometry, budget: int, batch: int, form: Format, block: int, one_pool: bool) -> None:
    """The answer fits, and one token more does not."""

    def size(context: int) -> int:
        found = need(geometry, context, batch, form, block)
        return found.total_allocated if one_pool else found.total

    tokens = max_tokens(geometry, budget, batch, form, block, one_pool=one_pool)
    if tokens is None:
        assert size(1 << 40) == size(1 << 41) <= budget
        return
    if tokens:
        assert size(tokens) <= budget
    assert size(tokens + 1) > budget or size(0) > budget


@given(geometries(), st.integers(0, 1 << 34), CONTEXTS, FORMS, BLOCK_SIZES, st.booleans())
def test_requests_that_fit(geometry: Geometry, budget: int, context: int, form: Format, block: int, one_pool: bool) -> None:
    count = max_requests(geometry, budget, context, form, block, one_pool=one_pool)
    sizes = [need(geometry, context, batch, form, block) for batch in (count or 0, (count or 0) + 1)]
    fits = [(each.total_allocated if one_pool else each.total) <= budget for each in sizes]
    assert fits == ([True, True] if count is None else [True, False])


@given(geometries(), st.integers(0, 1 << 34), FORMS, BLOCK_SIZES)
def test_slots_of_a_pool_are_whole_blocks_and_all_that_fit(geometry: Geometry, budget: int, form: Format, block: int) -> None:
    slots = pool_tokens(geometry, budget, form, block)
    assert slots % block == 0
    one = need(geometry, 1, 1, form, block)
    if slots or one.allocated:
        used = need(geometry, slots, 1, form, block)
        more = need(geometry, slots + 1, 1, form, block)
        assert used.allocated + used.indexer_allocated <= budget < more.allocated + more.indexer_allocated


@given(st.integers(1, 6), DIMS, st.sampled_from([(8, 8), (8, 4), (8, 2), (8, 1)]), CONTEXTS, FORMS)
def test_fewer_key_value_heads_never_take_more(
    count: int, dim: int, heads: tuple[int, int], context: int, form: Format
) -> None:
    """MQA <= GQA <= MHA, and by exactly the ratio of the heads."""
    queries, kv_heads = heads
    many, few = (Geometry("drawn", (Layer(Kind.FULL, n, dim, dim),) * count, queries, None, "bfloat16") for n in heads)
    assert need(few, context, 1, form).kv * queries == need(many, context, 1, form).kv * kv_heads


@given(geometries(), CONTEXTS, FORMS)
def test_windows_beyond_the_context_change_nothing(geometry: Geometry, context: int, form: Format) -> None:
    without = tuple(replace(layer, kind=Kind.FULL, window=None) if layer.window and layer.window >= context else layer
                    for layer in geometry.layers)  # fmt: skip
    assert need(replace(geometry, layers=without), context, 1, form).kv == need(geometry, context, 1, form).kv


@given(geometries(), CONTEXTS, FORMS, st.sampled_from([1, 2, 4, 8]))
def test_gpus_together_hold_everything_and_each_no_more_than_one_alone(
    geometry: Geometry, context: int, form: Format, parts: int
) -> None:
    whole, part = need(geometry, context, 3, form), need(shard(geometry, parts), context, 3, form)
    assert all(one * parts >= every >= one for one, every in zip(figures(part), figures(whole), strict=True))


def test_heads_are_split_evenly_or_repeated() -> None:
    assert [share(8, parts, "heads") for parts in (1, 2, 4, 8, 16, 32)] == [8, 4, 2, 1, 1, 1]
    with pytest.raises(ConfigError, match="8 heads can be neither split over nor repeated on 3 GPUs"):
        share(8, 3, "heads")


def test_a_latent_vector_is_on_every_gpu() -> None:
    geometry = Geometry("deepseek_v3", (Layer(Kind.MLA, 1, 576, 0, index_bytes=132),) * 2, 128, None, "bfloat16")
    whole, part = need(geometry, 100, 1, kv_format("bf16")), need(shard(geometry, 8), 100, 1, kv_format("bf16"))
    assert part == whole


def test_an_indexers_keys_grow_with_tokens_and_requests() -> None:
    geometry = Geometry("deepseek_v32", (Layer(Kind.MLA, 1, 576, 0, index_bytes=132),) * 2, 128, None, "bfloat16")
    found = need(geometry, 100, 3, kv_format("fp8"), block_size=16)
    assert (found.indexer, found.indexer_allocated) == (2 * 132 * 100 * 3, 2 * 132 * 112 * 3)
    assert found.total == found.indexer + 2 * 576 * 100 * 3


def test_query_heads_must_divide() -> None:
    with pytest.raises(ConfigError, match="40 attention heads cannot be split over 3 GPUs"):
        shard(Geometry("llama", (Layer(Kind.FULL, 8, 128, 128),), 40, None, "bfloat16"), 3)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(-5, 2000))
def test_largest_finds_the_last_argument_within_the_limit(steps: list[int], limit: int) -> None:
    """Against a scan, for any function that never falls and then rises forever."""
    totals = [sum(steps[:n]) for n in range(len(steps) + 1)]

    def function(n: int) -> int:
        return totals[n] if n < len(totals) else totals[-1] + n

    scan = [n for n in range(3000) if function(n) <= limit]
    assert largest(function, limit) == (scan[-1] if scan else 0)


def test_largest_has_no_answer_for_a_function_that_stops() -> None:
    assert largest(lambda n: min(n, 7), 7) is None


@pytest.mark.parametrize(
    ("name", "dim", "expected"),
    [
        ("float32", 128, 512), ("fp16", 128, 256), ("bf16", 128, 256), ("fp8", 128, 128),
        ("int8", 128, 128 + 4),  # a float32 scale a token and head
        ("int4", 128, 64 + 4 * 8),  # a float32 minimum and span for each 32 elements
        ("q8_0", 128, 4 * 34), ("q4_0", 128, 4 * 18),  # ggml-common.h: blocks of 34 and 18 bytes
        ("int4", 80, 40 + 3 * 8), ("int8", 80, 84),
    ],
)  # fmt: skip
def test_bytes_of_a_vector(name: str, dim: int, expected: int) -> None:
    assert vector_bytes(kv_format(name), dim) == expected


@pytest.mark.parametrize("form", [*FORMATS.values(), *BLOCKS.values()], ids=lambda form: form.name)
def test_a_value_of_no_width_takes_nothing(form: Format) -> None:
    """MLA's latent serves as the value too: not even a scale is stored for it."""
    assert vector_bytes(form, 0) == 0
    assert token_bytes(Layer(Kind.MLA, 1, 576, 0), form) == vector_bytes(form, 576)


def test_llama_cpps_blocks_must_divide_a_head() -> None:
    with pytest.raises(UsageError, match="blocks of 32 elements, which do not divide a head of 80"):
        vector_bytes(kv_format("q8_0"), 80)


def test_unknown_formats_and_absurd_arguments() -> None:
    with pytest.raises(UsageError, match=r"unknown KV dtype 'int3'.*q4_0"):
        kv_format("int3")
    geometry = Geometry("llama", (Layer(Kind.FULL, 8, 128, 128),), 32, None, "bfloat16")
    for context, batch, block in ((-1, 1, 16), (1, -1, 16), (1, 1, 0)):
        with pytest.raises(UsageError, match="is below"):
            need(geometry, context, batch, kv_format("bf16"), block)


def test_only_growing_kinds_grow() -> None:
    """Cross-attention and states take the same at any length, and the first token of the rest is the whole rate."""
    form = kv_format("bf16")
    kept = (Layer(Kind.CROSS, 4, 64, 64), Layer(Kind.LINEAR, state=(State(4, 10, 4),)), Layer(Kind.SHARED), Layer(Kind.NONE))
    geometry = Geometry("drawn", kept, 8, None, "bfloat16", cross_tokens=7)
    assert not GROWING & {layer.kind for layer in kept}
    assert need(geometry, 1, 1, form) == need(geometry, 999, 1, form) == Need(0, 0, 0, 0, 7 * 4 * 256, 160)
    assert first_token_bytes(geometry, form) == 0
