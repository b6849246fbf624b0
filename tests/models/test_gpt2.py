"""Cached equals uncached, bit for bit, and what a decoder must not get wrong."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import CapacityError, TokenizerError, UsageError
from nanokv.kv.tile import Batch
from nanokv.models import gpt2
from nanokv.models.gpt2 import fast_bound, forward, hidden_states, random_params
from nanokv.numerics import EXACT, FAST, Numerics
from tests.support import EXACT_KERNELS, chunkings, fit_for, head_counts, in_chunks, nan_cache, small_config


@st.composite
def cases(draw, longest=300):
    """A small random model and a text for it."""
    heads, kv_heads = draw(head_counts())
    config = small_config(
        layers=draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 4, 7, 16])),
        activation=draw(st.sampled_from(["gelu_new", "gelu"])),
        scale_by_layer=draw(st.booleans()),
        tied_head=draw(st.booleans()),
    )
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    params = random_params(config, draw(st.integers(0, 1000)), dtype, scale=0.2)
    length = draw(st.integers(1, longest))
    tokens = np.random.default_rng(draw(st.integers(0, 1000))).integers(0, config.vocab_size, length)
    return params, tokens, dtype


def by(numerics: Numerics, case: tuple) -> tuple:
    """A case as these numerics take it: parameters, tokens, dtype and the forward pass."""
    params, tokens, _ = case
    params = fit_for(params, numerics)
    return params, tokens, params.dtype.type, partial(forward, numerics=numerics)


@EXACT_KERNELS
@given(cases(), st.data())
def test_cached_equals_recomputed_however_the_prompt_is_cut(numerics, case, draw):
    params, tokens, dtype, run = by(numerics, case)
    whole = run(params, tokens, nan_cache(params.config, len(tokens), dtype))
    capacity = draw.draw(st.integers(len(tokens), len(tokens) + 300))
    cache = nan_cache(params.config, capacity, dtype)
    pieces = in_chunks(params, tokens, draw.draw(chunkings(len(tokens))), cache, numerics)
    assert np.array_equal(pieces, whole)
    assert cache.length == len(tokens)


@EXACT_KERNELS
@given(cases(), st.integers(1, 8))
def test_decoding_equals_recomputing_the_text_at_every_step(numerics, case, steps):
    params, tokens, dtype, run = by(numerics, case)
    steps = min(steps, len(tokens))
    cache = nan_cache(params.config, len(tokens), dtype)
    for end in range(len(tokens) - steps + 1, len(tokens) + 1):
        cached = run(params, tokens[cache.length : end], cache, rows=slice(-1, None))
        again = run(params, tokens[:end], nan_cache(params.config, end, dtype), rows=slice(-1, None))
        assert np.array_equal(cached, again)


@EXACT_KERNELS
@given(cases(longest=150), st.lists(st.integers(1, 150), min_size=1, max_size=4), st.data())
def test_a_sequence_does_not_know_its_batch(numerics, case, lengths, draw):
    """Alone and among others, prompt and single tokens mixed."""
    params, tokens, dtype, run = by(numerics, case)
    rng = np.random.default_rng(1)
    texts = [tokens, *(rng.integers(0, params.config.vocab_size, n) for n in lengths)]
    caches = [nan_cache(params.config, 310, dtype) for _ in texts]
    cut = draw.draw(st.integers(0, len(tokens) - 1))
    if cut:
        run(params, tokens[:cut], caches[0])
        texts[0] = tokens[cut:]
    order = draw.draw(st.permutations(range(len(texts))))
    batch = Batch([(caches[i], len(texts[i])) for i in order])
    logits = run(params, np.concatenate([texts[i] for i in order]), batch)
    start = sum(len(texts[i]) for i in order[: order.index(0)])
    alone = run(params, tokens, nan_cache(params.config, 310, dtype))[cut:]
    assert np.array_equal(logits[start : start + len(texts[0])], alone)


@EXACT_KERNELS
@given(cases(), st.data())
def test_truncate_reset_and_copy_leave_no_trace(numerics, case, draw):
    params, tokens, dtype, run = by(numerics, case)
    whole = run(params, tokens, nan_cache(params.config, len(tokens), dtype))
    cache = nan_cache(params.config, 320, dtype)
    other = np.random.default_rng(5).integers(0, params.config.vocab_size, draw.draw(st.integers(1, 300)))
    keep = draw.draw(st.integers(0, min(len(tokens), len(other))))
    run(params, np.concatenate([tokens[:keep], other[keep:]]), cache)
    cache.truncate(keep)
    branch = cache.copy()
    for each in (cache, branch):
        if keep < len(tokens):
            assert np.array_equal(run(params, tokens[keep:], each), whole[keep:])
    cache.reset()
    assert np.array_equal(run(params, tokens, cache), whole)


@EXACT_KERNELS
@given(cases(), st.data())
def test_a_step_that_failed_leaves_no_trace(numerics, case, draw):
    params, tokens, dtype, run = by(numerics, case)
    cut = draw.draw(st.integers(0, len(tokens) - 1))
    cache = nan_cache(params.config, 320, dtype)
    if cut:
        run(params, tokens[:cut], cache)
    cache.extend(draw.draw(st.integers(1, 320 - cut)))
    junk = np.full((1, params.config.num_kv_heads, params.config.head_dim), np.inf, dtype)
    cache.write(0, junk, junk)
    whole = run(params, tokens, nan_cache(params.config, len(tokens), dtype))
    assert np.array_equal(run(params, tokens[cut:], cache), whole[cut:])


@given(cases(), st.data())
def test_fast_stays_in_its_bound(case, draw):
    params, tokens, dtype = case
    config = params.config
    hidden = hidden_states(params, tokens, nan_cache(config, len(tokens), dtype))
    exact = gpt2.unembed(params, hidden)
    chunks = draw.draw(chunkings(len(tokens)))
    fast = in_chunks(params, tokens, chunks, nan_cache(config, len(tokens), dtype), FAST)
    bound = fast_bound(params, hidden)
    assert np.all(np.abs(fast - exact) <= bound)
    for row in range(len(tokens)):
        best, second = np.sort(exact[row])[::-1][:2]
        if best - second > 2 * bound[row].max():
            assert fast[row].argmax() == exact[row].argmax()


@EXACT_KERNELS
@pytest.mark.parametrize("heads", [(12, 768), (16, 1024)])
def test_identity_at_real_widths(heads, numerics):
    count, width = heads
    config = small_config(layers=1, heads=count, kv_heads=count, dim=width // count, vocab=500)
    params = fit_for(random_params(config, scale=0.05), numerics)
    tokens = np.random.default_rng(0).integers(0, 500, 140)
    whole = forward(params, tokens, nan_cache(config, 140), numerics=numerics)
    for chunks in ([1] * 140, [139, 1], [5, 128, 7]):
        assert np.array_equal(in_chunks(params, tokens, chunks, nan_cache(config, 200), numerics), whole)


def test_logits_do_not_depend_on_capacity():
    config = small_config()
    params, tokens = random_params(config), np.arange(20)
    first, *others = (forward(params, tokens, nan_cache(config, capacity)) for capacity in (20, 30, 40, 320))
    assert all(np.array_equal(first, other) for other in others)


def test_the_next_position_follows_the_cache_not_its_shape():
    """12 heads and 5 cached tokens: the next position is 5, so row 5 of the position table is what counts."""
    config = small_config(heads=12, kv_heads=12)
    params = random_params(config)
    cache = nan_cache(config, 100)
    forward(params, np.arange(5), cache)
    assert cache.extend(1).tolist() == [5]
    changed = params.wpe.copy()
    changed[5] += 1
    other = random_params(config)
    object.__setattr__(other, "wpe", changed)
    step = forward(params, np.array([9]), cache)
    again = nan_cache(config, 100)
    forward(other, np.arange(5), again)
    assert not np.array_equal(step, forward(other, np.array([9]), again))


def test_many_decode_steps_with_grouped_heads():
    """70 steps with 8/2 heads: a cache strided by the width of the queries breaks after 64."""
    config = small_config(heads=8, kv_heads=2)
    params, tokens = random_params(config), np.random.default_rng(0).integers(0, 61, 70)
    assert np.array_equal(
        in_chunks(params, tokens, [1] * 70, nan_cache(config, 70)), forward(params, tokens, nan_cache(config, 70))
    )


def test_a_decode_step_computes_one_token():
    config = small_config()
    params, cache = random_params(config), nan_cache(config, 50)
    forward(params, np.arange(30), cache)
    assert forward(params, np.array([1]), cache).shape == (1, config.vocab_size)
    assert cache.length == 31


@pytest.mark.parametrize("numerics", [EXACT, FAST])
def test_past_the_last_position(numerics):
    """320 positions: 320 tokens run, the 321st is refused before anything is written."""
    config = small_config(positions=320)
    params, cache = random_params(config), nan_cache(config, 400)
    forward(params, np.zeros(320, int), cache, numerics=numerics)
    before = [plane.copy() for plane in cache.planes]
    with pytest.raises(CapacityError, match="320 is past the model's 320 positions"):
        forward(params, np.array([1]), cache, numerics=numerics)
    assert cache.length == 320
    for now, then in zip(cache.planes, before, strict=True):
        assert np.array_equal(now.reshape(-1, 4, 8)[:320], then.reshape(-1, 4, 8)[:320])


@pytest.mark.parametrize(("tokens", "error", "words"), [
    ([61], TokenizerError, "61"), ([3, -1], TokenizerError, "-1"), ([], UsageError, "at least one"),
    ([[1, 2]], UsageError, "shape"), ([1.5], UsageError, "whole numbers"),
])  # fmt: skip
def test_bad_tokens_are_refused_before_anything_is_written(tokens, error, words):
    config = small_config(vocab=61)
    cache = nan_cache(config, 10)
    with pytest.raises(error, match=words):
        forward(random_params(config), np.array(tokens), cache)
    assert all(np.all(np.isnan(plane)) for plane in cache.planes)


def test_a_batch_of_the_wrong_size_is_refused():
    config = small_config()
    with pytest.raises(UsageError, match="3 tokens for a batch of 2 rows"):
        forward(random_params(config), np.arange(3), Batch([(nan_cache(config, 9), 2)]))


def test_an_uncached_call_after_cached_steps_is_as_before():
    """The position lives in the cache, not in the model: two decode steps, then a fresh run."""
    config = small_config()
    params, cache = random_params(config), nan_cache(config, 20)
    fresh = forward(params, np.arange(6), nan_cache(config, 20))
    for token in range(3):
        forward(params, np.array([token]), cache)
    assert np.array_equal(forward(params, np.arange(6), nan_cache(config, 20)), fresh)
