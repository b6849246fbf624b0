"""Cached equals uncached, bit for bit, for Llama and its relatives; and what their parts compute."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.errors import CapacityError, TokenizerError, UsageError
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedPool
from nanokv.kv.tile import Batch, Visibility
from nanokv.models import llama
from nanokv.models.llama import fast_bound, forward, hidden_states, random_params
from nanokv.numerics import EXACT, FAST
from nanokv.rope import Rope, Scaling
from tests.llama_support import adjacent, cache_for, reference, run, small_llama, whole
from tests.support import EXACT_KERNELS, chunkings, fit_for, head_counts

SCALINGS = [
    Scaling(),
    Scaling("linear", 4.0),
    Scaling("llama3", 8.0, 64.0, 1.0, 4.0),
    Scaling("yarn", 4.0, 64.0, attention_factor=1.1386),
]


@st.composite
def cases(draw, longest=300, windows=True):
    """A small random model of any of the families, and a text for it."""
    heads, kv_heads = draw(head_counts())
    layers, dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 14, 16]))
    window = st.one_of(st.none(), st.integers(1, 200)) if windows else st.none()
    config = small_llama(
        layers, heads, kv_heads, dim,
        rope=Rope(dim, draw(st.sampled_from([100.0, 10000.0])), draw(st.booleans()), draw(st.sampled_from(SCALINGS))),
        qkv_bias=draw(st.booleans()), output_bias=draw(st.booleans()), mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()), tied_head=draw(st.booleans()),
        windows=tuple(draw(st.lists(window, min_size=layers, max_size=layers))),
    )  # fmt: skip
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    params = random_params(config, draw(st.integers(0, 1000)), dtype, scale=0.2)
    length = draw(st.integers(1, longest))
    tokens = np.random.default_rng(draw(st.integers(0, 1000))).integers(0, config.vocab_size, length)
    return params, tokens, dtype


@EXACT_KERNELS
@given(cases(), st.data())
def test_cached_equals_recomputed_however_the_prompt_is_cut(numerics, case, draw):
    params, tokens = fit_for(case[0], numerics), case[1]
    dtype = params.dtype.type
    cache = cache_for(params.config, draw.draw(st.integers(len(tokens), len(tokens) + 300)), dtype)
    pieces = run(params, tokens, draw.draw(chunkings(len(tokens))), cache, numerics)
    assert np.array_equal(pieces, whole(params, tokens, numerics))
    assert cache.length == len(tokens)


@EXACT_KERNELS
@given(cases(), st.sampled_from([1, 8, 16, 128]), st.data())
def test_paged_equals_recomputed(numerics, case, block_size, draw):
    params, tokens = fit_for(case[0], numerics), case[1]
    dtype = params.dtype.type
    config = params.config
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    pool = PagedPool(*shape, 400 // block_size + 3, block_size, dtype, visibility=config.visibility())
    for plane in pool.storage.planes:
        plane[:, 1:] = np.nan
    assert np.array_equal(
        run(params, tokens, draw.draw(chunkings(len(tokens))), pool.new_sequence(), numerics), whole(params, tokens, numerics)
    )


@EXACT_KERNELS
@given(cases(), st.integers(1, 8))
def test_decoding_equals_recomputing_the_text_at_every_step(numerics, case, steps):
    params, tokens = fit_for(case[0], numerics), case[1]
    dtype = params.dtype.type
    steps = min(steps, len(tokens))
    cache = cache_for(params.config, len(tokens), dtype)
    if steps < len(tokens):
        run(params, tokens[:-steps], [len(tokens) - steps], cache, numerics)
    for end in range(len(tokens) - steps + 1, len(tokens) + 1):
        cached = forward(params, tokens[end - 1 : end], cache, numerics=numerics)
        assert np.array_equal(cached[0], whole(params, tokens[:end], numerics)[-1])


@EXACT_KERNELS
@given(cases(longest=120), st.lists(st.integers(1, 120), min_size=1, max_size=4), st.data())
def test_a_sequence_does_not_know_its_batch(numerics, case, lengths, draw):
    """Alone and among others, prompt and single tokens mixed."""
    params, tokens = fit_for(case[0], numerics), case[1]
    dtype = params.dtype.type
    rng = np.random.default_rng(1)
    texts = [tokens, *(rng.integers(0, params.config.vocab_size, n) for n in lengths)]
    caches = [cache_for(params.config, 310, dtype) for _ in texts]
    cut = draw.draw(st.integers(0, len(tokens) - 1))
    if cut:
        run(params, tokens[:cut], [cut], caches[0], numerics)
        texts[0] = tokens[cut:]
    order = draw.draw(st.permutations(range(len(texts))))
    logits = forward(
        params, np.concatenate([texts[i] for i in order]), Batch([(caches[i], len(texts[i])) for i in order]), numerics=numerics
    )
    start = sum(len(texts[i]) for i in order[: order.index(0)])
    assert np.array_equal(logits[start : start + len(texts[0])], whole(params, tokens, numerics)[cut:])


@EXACT_KERNELS
@given(cases(windows=False), st.data())
def test_truncate_and_copy_leave_no_trace(numerics, case, draw):
    params, tokens = fit_for(case[0], numerics), case[1]
    dtype = params.dtype.type
    cache = cache_for(params.config, 320, dtype)
    other = np.random.default_rng(5).integers(0, params.config.vocab_size, draw.draw(st.integers(1, 300)))
    keep = draw.draw(st.integers(0, min(len(tokens), len(other))))
    forward(params, np.concatenate([tokens[:keep], other[keep:]]), cache, numerics=numerics)
    cache.truncate(keep)
    for each in (cache.copy(), cache):
        if keep < len(tokens):
            assert np.array_equal(
                forward(params, tokens[keep:], each, numerics=numerics), whole(params, tokens, numerics)[keep:]
            )


@given(cases(longest=150))
def test_the_textbook_in_float64(case):
    """Another program for the same formulas. 1e-9 of logits of size 10 is far above float64's rounding, and far below what
    any slip would make."""
    params, tokens, _ = case
    wide = random_params(params.config, 3, np.float64, scale=0.2)
    assert np.abs(whole(wide, tokens) - reference(wide, tokens)).max() <= 1e-9


@given(cases(longest=100, windows=False))
def test_both_rotary_layouts_are_one_model(case):
    """L11: the same weights with their rows in the other order. 1e-9 as above."""
    params, tokens, _ = case
    config = replace(params.config, rope=replace(params.config.rope, adjacent=False))
    halves = random_params(config, 3, np.float64, scale=0.2)
    assert np.abs(whole(halves, tokens) - whole(adjacent(halves), tokens)).max() <= 1e-9


@settings(max_examples=25)
@given(cases(), st.data())
def test_fast_stays_in_its_bound(case, draw):
    params, tokens, dtype = case
    cache = cache_for(params.config, len(tokens), dtype)
    step = cache.max_step or len(tokens)
    hidden = np.concatenate([hidden_states(params, tokens[at : at + step], cache) for at in range(0, len(tokens), step)])
    exact = llama.unembed(params, hidden)
    fast = run(params, tokens, draw.draw(chunkings(len(tokens))), cache_for(params.config, len(tokens), dtype), FAST)
    assert np.all(np.abs(fast - exact) <= fast_bound(params, hidden))


@pytest.mark.parametrize(("width", "heads", "kv_heads", "inner"), [(576, 9, 3, 1536), (896, 14, 2, 4864)])
def test_identity_at_real_widths(width, heads, kv_heads, inner):
    """SmolLM2-135M's and Qwen2.5-0.5B's layers."""
    config = replace(small_llama(1, heads, kv_heads, 64, vocab=500), width=width, inner=inner, qkv_bias=True)
    params = random_params(config, scale=0.05)
    tokens = np.random.default_rng(0).integers(0, 500, 140)
    expected = whole(params, tokens)
    for chunks in ([1] * 140, [139, 1], [5, 128, 7]):
        assert np.array_equal(run(params, tokens, chunks, cache_for(config, 200)), expected)


@pytest.mark.parametrize("heads", [(28, 4), (32, 32), (8, 1), (9, 3)])
def test_query_heads_share_their_groups_key_head(heads):
    """A08, A09: query head h reads key-value head h // (Hq / Hkv). A value head of ones shows which heads read it."""
    count, kv_heads = heads
    config = small_llama(1, count, kv_heads, 2)
    params = random_params(config, scale=0.2)
    for kv in range(kv_heads):
        weight = params.blocks[0].qkv_weight.copy()
        weight[(count + kv_heads) * 2 :] = 0
        bias = np.zeros(len(weight), np.float32)
        bias[(count + kv_heads + kv) * 2 :][:2] = 1
        seen = np.zeros((config.width, count * 2), np.float32)
        seen[0] = 1 + np.arange(count * 2)
        silent = params.blocks[0].down_weight * 0
        block = replace(params.blocks[0], qkv_weight=weight, qkv_bias=bias, output_weight=seen, down_weight=silent)
        changed = replace(params, blocks=(block,))
        tokens = np.array([1, 2, 3])
        out = hidden_states(changed, tokens, cache_for(config, 3)) - changed.embedding[tokens]
        group = count // kv_heads
        expected = seen[0, kv * group * 2 : (kv + 1) * group * 2].sum()
        assert out[:, 0] == pytest.approx([expected] * 3, rel=1e-5)


def test_many_decode_steps_with_grouped_heads():
    """A10: 70 steps with 8/2 heads."""
    params, tokens = random_params(small_llama(heads=8, kv_heads=2)), np.random.default_rng(0).integers(0, 61, 70)
    assert np.array_equal(run(params, tokens, [1] * 70, cache_for(params.config, 70)), whole(params, tokens))


def test_only_the_windowed_layer_forgets():
    """D03, D04, D09: layers [window 4, full]. A change of a token 5 back reaches a later one through the full layer only."""
    for windows, reaches in (((4, 4), False), ((4, None), True), ((None, 4), True)):
        params = random_params(small_llama(windows=windows), scale=0.5)
        tokens = np.arange(20)
        changed = tokens.copy()
        changed[2] = 60
        same = np.array_equal(whole(params, tokens)[15], whole(params, changed)[15])
        assert same is not reaches


def test_a_long_way_past_a_window():
    """D07: decode step 3 W + 1 sees all W keys."""
    params, tokens = random_params(small_llama(windows=(5, 5)), scale=0.5), np.random.default_rng(1).integers(0, 61, 16)
    cached = run(params, tokens, [1] * 16, cache_for(params.config, 16))
    wide = random_params(params.config, 0, np.float64, scale=0.5)
    assert np.array_equal(cached, whole(params, tokens))
    assert np.abs(whole(wide, tokens) - reference(wide, tokens)).max() <= 1e-9


def test_a_cache_that_shows_too_much_is_refused():
    config = small_llama(windows=(None, 4))
    params, shape = random_params(config), (2, 2, 8)
    for visibility in (Visibility(), Visibility(5), [Visibility(), Visibility(4, 1)]):
        cache = ContiguousCache(*shape, 20, visibility=visibility)
        with pytest.raises(UsageError, match="layer 1 of the model sees the last 4 keys"):
            forward(params, np.array([1]), cache)
        assert cache.length == 0
    forward(params, np.array([1]), ContiguousCache(*shape, 20, visibility=Visibility(3)))


@given(cases(longest=200, windows=False), st.integers(1, 150), st.integers(0, 20))
def test_streaming_is_the_textbook_with_positions_inside_the_cache(case, window, sinks):
    """Keys kept unrotated and turned at their places in the cache, for every query anew, as the paper has it: in float64, to
    1e-9 (above)."""
    params, tokens, _ = case
    wide, visibility = random_params(params.config, 3, np.float64, scale=0.2), Visibility(window, sinks, True)
    shape = params.config.num_layers, params.config.num_kv_heads, params.config.head_dim
    cache = ContiguousCache(*shape, None, np.float64, visibility=visibility)
    ours = run(wide, tokens, [len(tokens)], cache)
    assert np.abs(ours - reference(wide, tokens, visibility)).max() <= 1e-9


def test_streaming_knows_no_end():
    """Far past the model's positions, in memory that does not grow: every cut and storage, the same bits; and a step in a
    batch with a sequence whose positions are absolute."""
    params, tokens = random_params(small_llama(positions=40), scale=0.2), np.random.default_rng(4).integers(0, 61, 700)
    shape, visibility = (2, 2, 8), Visibility(30, 4, True)

    def rolling():
        return ContiguousCache(*shape, None, visibility=visibility)

    cache, expected = rolling(), run(params, tokens, [700], rolling())
    assert np.array_equal(run(params, tokens, [300, 1, 1, 98, 300], cache), expected)
    pool = PagedPool(*shape, 60, 8, visibility=visibility)
    assert np.array_equal(run(params, tokens, [7] * 100, pool.new_sequence()), expected)
    full = cache_for(params.config, 20)
    forward(params, np.arange(9), full)
    alone = forward(params, np.array([9]), full.copy())
    both = forward(params, np.array([9, 5]), Batch([(full, 1), (cache, 1)]))
    assert np.array_equal(both[:1], alone)
    assert np.array_equal(both[1:], run(params, np.append(tokens, 5), [701], rolling())[-1:])


@pytest.mark.parametrize("numerics", [EXACT, FAST])
def test_past_the_last_position(numerics):
    config = small_llama(positions=32)
    params, cache = random_params(config), cache_for(config, 40)
    forward(params, np.zeros(32, int), cache, numerics=numerics)
    with pytest.raises(CapacityError, match="32 is past the model's 32 positions"):
        forward(params, np.array([1]), cache, numerics=numerics)
    assert cache.length == 32


@pytest.mark.parametrize(("tokens", "error", "words"), [
    ([61], TokenizerError, "61"), ([3, -1], TokenizerError, "-1"), ([], UsageError, "at least one"),
])  # fmt: skip
def test_bad_tokens_are_refused_before_anything_is_written(tokens, error, words):
    config = small_llama(vocab=61)
    cache = cache_for(config, 10)
    with pytest.raises(error, match=words):
        forward(random_params(config), np.array(tokens), cache)
    assert all(np.all(np.isnan(plane)) for plane in cache.planes)


def test_rows_choose_logits():
    params, tokens = random_params(small_llama()), np.arange(9)
    expected = whole(params, tokens)
    for rows in (slice(-1, None), [0, 4, 8]):
        assert np.array_equal(forward(params, tokens, cache_for(params.config, 9), rows=rows), expected[rows])


@given(cases(longest=1))
def test_parameters_are_counted(case):
    params, _, _ = case
    arrays = [params.embedding, params.norm, *(array for block in params.blocks for array in block.arrays())]
    arrays += [] if params.config.tied_head else [params.head]
    assert sum(array.size for array in arrays) == params.config.num_parameters
    itemsize = params.dtype.itemsize
    table = 0 if params.config.tied_head else params.embedding.size
    assert params.weight_bytes == (params.config.num_parameters - table) * itemsize


def test_moving_keeps_a_tied_head_tied():
    for tied in (True, False):
        params = random_params(small_llama(tied_head=tied, qk_norm=True))
        moved = params.to(NUMPY)
        assert (moved.head is moved.embedding) is tied
        for mine, theirs in zip(moved.blocks, params.blocks, strict=True):
            assert all(a is b for a, b in zip(mine.arrays(), theirs.arrays(), strict=True))
