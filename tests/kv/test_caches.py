"""Every storage, visibility and codec against the run that recomputes everything: the same bits.

What "recomputing" means: each text is fed at once to a fresh contiguous cache with the same visibility and codec.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.attention import attend
from nanokv.backend import NUMPY
from nanokv.errors import CapacityError, UsageError
from nanokv.kernels.matrix import FORMATS
from nanokv.kv.codec import CODECS, get_codec
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedPool
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import CAUSAL, TILE, Batch, Visibility
from nanokv.models.families import Params, module_for
from nanokv.numerics import COMPILED, EXACT, FAST, Numerics
from nanokv.rope import Rope
from tests.llama_support import small_llama
from tests.support import (
    EXACT_KERNELS,
    chunkings,
    examples,
    fit_for,
    forward,
    head_counts,
    in_chunks,
    poisoned,
    small_config,
)

BLOCK_SIZES = st.sampled_from([1, 2, 8, 16, 32, 64, 128])


@dataclass(frozen=True)
class Kind:
    """A combination of codec and visibility, a model and caches for it; `form` is the format of packed weights."""

    params: Params = field(repr=False)
    dtype: type
    codec: str | None
    visibility: list[Visibility]
    form: str = "float32"
    numerics: Numerics = EXACT

    def by(self, numerics):
        """The same computed by other kernels: the compiled ones in float32, from packed weights."""
        dtype = np.float32 if numerics is COMPILED else self.dtype
        return replace(self, params=fit_for(self.params, numerics, self.form), numerics=numerics, dtype=dtype)

    def forward(self, tokens, cache):
        return forward(self.params, tokens, cache, numerics=self.numerics)

    def in_chunks(self, tokens, sizes, cache):
        return in_chunks(self.params, tokens, sizes, cache, self.numerics)

    def shape(self):
        config = self.params.config
        codec = get_codec(self.codec, self.dtype, NUMPY)
        return (config.num_layers, config.num_kv_heads, config.head_dim), {
            "dtype": self.dtype, "codec": codec, "visibility": self.visibility,
        }  # fmt: skip

    def contiguous(self, capacity):
        args, more = self.shape()
        return poisoned(ContiguousCache(*args, capacity, **more))

    def pool(self, num_blocks, block_size):
        args, more = self.shape()
        pool = PagedPool(*args, num_blocks, block_size, **more)
        for plane in pool.storage.planes:
            plane[:, 1:] = np.iinfo(plane.dtype).max if plane.dtype.kind in "iu" else np.nan
        return pool

    def whole(self, tokens):
        """Recomputed, in steps as large as a window allows."""
        cache = self.contiguous(len(tokens))
        step = cache.max_step or len(tokens)
        sizes = [min(step, len(tokens) - at) for at in range(0, len(tokens), step)]
        return self.in_chunks(tokens, sizes, cache)


@st.composite
def kinds(draw, codecs=(None, *CODECS), windows=True, streaming=True):
    heads, kv_heads = draw(head_counts())
    layers = draw(st.integers(1, 2))
    dim = draw(st.sampled_from([4, 7, 16, 40]))
    if draw(st.booleans()):
        config = small_config(layers=layers, heads=heads, kv_heads=kv_heads, dim=dim, positions=420)
    else:
        even = dim + dim % 2
        config = small_llama(layers, heads, kv_heads, even, 420, rope=Rope(even, adjacent=draw(st.booleans())))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    window = st.integers(1, 200)
    choices = [st.just([Visibility()] * layers)]
    if windows:
        each = st.one_of(st.just(Visibility()), st.builds(Visibility, window, st.integers(0, 140)))
        choices += [st.lists(each, min_size=layers, max_size=layers)]
    if windows and streaming:
        choices += [st.builds(Visibility, window, st.integers(0, 140), st.just(True)).map(lambda v: [v] * layers)]
    params = module_for(config).random_params(config, draw(st.integers(0, 99)), dtype, scale=0.3)
    form = draw(st.sampled_from(FORMATS))
    return Kind(params, dtype, draw(st.sampled_from(codecs)), draw(st.one_of(choices)), form)


def texts(longest=400):
    length, seed = st.integers(1, longest), st.integers(0, 99)
    return st.builds(lambda n, seed: np.random.default_rng(seed).integers(0, 61, n), length, seed)


def steps(sizes, cache):
    """Chunks no larger than the cache takes at once."""
    most = cache.max_step or max(sizes)
    return [part for size in sizes for part in [most] * (size // most) + [size % most] if part]


@EXACT_KERNELS
@examples(60)
@given(kinds(), texts(), st.data())
def test_a_contiguous_cache_equals_recomputing(numerics, kind, tokens, draw):
    kind = kind.by(numerics)
    cache = kind.contiguous(len(tokens) + draw.draw(st.integers(0, 200)))
    pieces = kind.in_chunks(tokens, steps(draw.draw(chunkings(len(tokens))), cache), cache)
    assert np.array_equal(pieces, kind.whole(tokens))


@EXACT_KERNELS
@examples(80)
@given(kinds(), texts(), BLOCK_SIZES, st.data())
def test_a_paged_cache_equals_recomputing(numerics, kind, tokens, block_size, draw):
    """Whatever the block size, the order of the blocks, and what they held before."""
    kind = kind.by(numerics)
    if kind.codec == "int4" and block_size % 32:
        with pytest.raises(UsageError, match="int4 works on groups of 32"):
            kind.pool(10, block_size)
        return
    pool = kind.pool(2 * (-(-len(tokens) // block_size)) + 2, block_size)
    shuffle(pool, draw.draw(st.integers(0, 99)))
    cache = pool.new_sequence()
    assert np.array_equal(kind.in_chunks(tokens, draw.draw(chunkings(len(tokens))), cache), kind.whole(tokens))
    used = sum(block != 0 for block in cache.block_table)
    assert pool.blocks.stats().used == used
    for visibility in [max(kind.visibility, key=lambda v: v.held(len(tokens)))]:
        assert used <= visibility.held(len(tokens)) // block_size + 3 + visibility.sinks // block_size


def shuffle(pool, seed):
    """Frees all blocks in a random order, so that the next ones come in that order."""
    blocks = pool.blocks.get_new_blocks(pool.blocks.num_free)
    pool.blocks.free_blocks(np.random.default_rng(seed).permutation(blocks).tolist())


@EXACT_KERNELS
@examples(40)
@given(kinds(), texts(200), texts(200), BLOCK_SIZES, st.data())
def test_forks_go_their_own_ways(numerics, kind, tokens, other, block_size, draw):
    """Parent and child share every block, then each is as if alone; the last holder writes in place."""
    kind = kind.by(numerics)
    if kind.codec == "int4":
        block_size = max(32, block_size)
    pool = kind.pool(4 * (400 // block_size + 2), block_size)
    shuffle(pool, 1)
    parent = pool.new_sequence()
    kind.forward(tokens, parent)
    held = pool.blocks.stats().used
    child = parent.fork()
    assert pool.blocks.stats().used == held
    mine, theirs = np.append(other, 1), np.append(other[::-1], 2)
    rows = {}
    for name, cache, more in draw.draw(st.permutations([("parent", parent, mine), ("child", child, theirs)])):
        rows[name] = kind.in_chunks(more, draw.draw(chunkings(len(more))), cache)
    assert np.array_equal(rows["parent"], kind.whole(np.concatenate([tokens, mine]))[len(tokens) :])
    assert np.array_equal(rows["child"], kind.whole(np.concatenate([tokens, theirs]))[len(tokens) :])
    parent.reset()
    child.reset()
    assert pool.blocks.stats().used == 0


@EXACT_KERNELS
@examples(40)
@given(kinds(), texts(200), texts(60), st.lists(st.integers(0, 2), min_size=3, max_size=3), BLOCK_SIZES, st.booleans())
def test_beams_reorder_every_kind_of_cache(numerics, kind, tokens, other, order, block_size, paged):
    """Three sequences; then each row goes on from the one that `order` names, keys, values and scales: [1, 1, 0] too."""
    kind = kind.by(numerics)
    pool = kind.pool(8 * (300 // max(32, block_size) + 2), max(32, block_size))
    caches = [pool.new_sequence() if paged else kind.contiguous(300) for _ in range(3)]
    starts = [np.roll(tokens, i) for i in range(3)]
    for cache, start in zip(caches, starts, strict=True):
        kind.in_chunks(start, steps([len(start)], cache), cache)
    beams = [caches[i].copy() for i in order]
    if paged:
        for cache in caches:
            cache.reset()
    for row, (beam, i) in enumerate(zip(beams, order, strict=True)):
        more = np.append(other, row)
        logits = kind.in_chunks(more, steps([1, len(more) - 1], beam), beam)
        assert np.array_equal(logits, kind.whole(np.concatenate([starts[i], more]))[len(tokens) :])


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("after", ["extend", "fork", "truncate"])
def test_no_slot_keeps_what_does_not_count(codec, after):
    """A step that failed, tokens that were cut off: whoever takes the next step finds zeros behind its own tokens."""
    pool = PagedPool(1, 1, 2, 12, 8, codec=get_codec(codec, np.float32, NUMPY))
    cache = pool.new_sequence()
    write(cache, 11)
    cache.extend(7)
    cache.write(0, np.full((7, 1, 2), 5, np.float32), np.full((7, 1, 2), 5, np.float32))
    if after == "fork":
        cache = cache.fork()
    if after == "truncate":
        cache.truncate(10)
    length = cache.length
    assert length == {"extend": 11, "fork": 11, "truncate": 10}[after]
    cache.extend(1)
    (tiles,) = cache.tiles(0, 0)
    assert np.all(tiles.k[0, :length] == 1)
    assert np.all(tiles.k[0, length:] == 0)
    assert np.all(tiles.v[0, length:] == 0)


def write(cache, count):
    cache.extend(count)
    cache.write(0, np.ones((count, 1, 2), np.float32), np.ones((count, 1, 2), np.float32))
    cache.commit()


def test_a_fork_does_not_write_into_the_tile_that_its_parent_keeps_in_full():
    pool = PagedPool(1, 1, 2, 12, 32, codec=get_codec("int4", np.float32, NUMPY))
    parent = pool.new_sequence()
    write(parent, 5)
    child = parent.fork()
    write(parent, 1)
    child.extend(1)
    child.write(0, np.full((1, 1, 2), 7, np.float32), np.full((1, 1, 2), 7, np.float32))
    parent.extend(1)
    for cache, last in ((parent, 1), (child, 7)):
        assert cache.tiles(0, 0)[-1].k[0, :7, 0, 0].tolist() == [1] * 5 + [last, 0]


def test_a_prompt_that_is_all_cached_shares_all_but_its_last_block():
    pool = PagedPool(1, 1, 2, 12, 4)
    first = pool.new_sequence()
    write(first, 8)
    first.publish(list(range(8)))
    again = pool.new_sequence()
    assert again.adopt(list(range(8))) == 4
    assert again.block_table == first.block_table[:1]
    assert again.blocks_needed(4) == 1
    assert pool.new_sequence().adopt([*range(8), 9]) == 8


def hit(pool, text):
    sequence = pool.new_sequence()
    found = sequence.adopt(text)
    sequence.reset()
    return found


def test_a_block_that_was_cut_and_filled_again_is_found_by_its_new_content_only():
    pool = PagedPool(1, 1, 2, 12, 4)
    cache = pool.new_sequence()
    write(cache, 8)
    cache.publish([1] * 8)
    cache.truncate(6)
    assert hit(pool, [1] * 9) == 8
    write(cache, 2)
    cache.publish([1] * 6 + [2] * 2)
    cache.reset()
    assert hit(pool, [1] * 9) == 4
    assert hit(pool, [1] * 6 + [2] * 3) == 8


@pytest.mark.parametrize("window", [1, 4, 50, 128, 130])
@pytest.mark.parametrize("paged", [False, True])
def test_all_keys_of_a_window_are_seen_long_after_it_has_filled(window, paged):
    """At step 3 W + 1, and at every one before: slots of a ring are not positions."""
    visibility = Visibility(window)
    cache = (
        PagedPool(1, 1, 1, 60, 8, visibility=visibility).new_sequence()
        if paged
        else ContiguousCache(1, 1, 1, None, visibility=visibility)
    )
    for at in range(3 * window + 1):
        positions = cache.extend(1)
        cache.write(0, np.zeros((1, 1, 1), np.float32), np.full((1, 1, 1), at, np.float32))
        out = attend(np.ones((1, 1, 1), np.float32), positions, partial(cache.tiles, 0), visibility=visibility)
        assert out.item() == pytest.approx(np.mean(range(max(0, at - window + 1), at + 1)), rel=1e-6)
        cache.commit()


@pytest.mark.parametrize("kv_dtype", [None, *CODECS])
@pytest.mark.parametrize("window", [None, 20])
def test_every_kind_has_the_capacity_that_was_asked_for(kv_dtype, window):
    """2048 tokens from a prompt of 32: neither more nor less, whatever the codec and the storage."""
    for kind in ("contiguous", "paged"):
        spec = CacheSpec(kind, 32, window, kv_dtype=kv_dtype)
        if kind == "contiguous":
            cache = spec.contiguous([CAUSAL], 1, 2, 2048, np.float32, NUMPY)
        else:
            cache = spec.pool([CAUSAL], 1, 2, spec.blocks_for(2048, 128, [CAUSAL]) + 1, np.float32, NUMPY).new_sequence()
        assert cache.codec.name == kv_dtype if kind == "contiguous" and kv_dtype else True
        for count in [32, *[96] * 21]:
            write(cache, count)
        assert cache.length == 2048
        if kind == "contiguous" or window is None:
            with pytest.raises(CapacityError):
                cache.extend(1)


@EXACT_KERNELS
@examples(40)
@given(kinds(), texts(300), texts(100), BLOCK_SIZES)
def test_a_prefix_hit_equals_a_cold_run(numerics, kind, tokens, other, block_size):
    kind = kind.by(numerics)
    if kind.codec == "int4":
        block_size = max(32, block_size)
    pool = kind.pool(4 * (400 // block_size + 2), block_size)
    shuffle(pool, 2)
    first = pool.new_sequence()
    assert first.adopt(tokens) == 0
    kind.forward(tokens, first)
    first.publish(tokens)
    first.reset()
    for text in (tokens, np.concatenate([tokens, other]), np.concatenate([tokens[: len(tokens) // 2], other])):
        again = pool.new_sequence()
        hit = again.adopt(text)
        assert hit % block_size == 0 or hit == len(text) - 1
        assert hit < len(text)
        assert np.array_equal(kind.forward(text[hit:], again), kind.whole(text)[hit:])
        again.publish(text)
        again.reset()
    assert pool.blocks.stats().used == 0


@EXACT_KERNELS
@examples(30)
@given(kinds(windows=False), texts(300), st.data())
def test_truncation_leaves_no_trace_in_any_storage(numerics, kind, tokens, draw):
    kind = kind.by(numerics)
    own = kind.codec == "int4"
    block = draw.draw(st.sampled_from([32, 128] if own else [1, 16, 128]))
    keep = draw.draw(st.integers(0, len(tokens) // TILE)) * TILE if own else draw.draw(st.integers(0, len(tokens)))
    whole = kind.whole(tokens)
    pool = kind.pool(2 * (400 // block + 2), block)
    for cache in (kind.contiguous(420), pool.new_sequence()):
        junk = np.concatenate([tokens[:keep], np.random.default_rng(3).integers(0, 61, 50)])
        kind.forward(junk, cache)
        if isinstance(cache, ContiguousCache):
            cache = cache.copy()
        else:
            cache.publish(junk)
        cache.truncate(keep)
        if keep < len(tokens):
            assert np.array_equal(kind.forward(tokens[keep:], cache), whole[keep:])
        with pytest.raises(UsageError):
            cache.truncate(len(tokens) + 1)
        cache.reset()
        assert np.array_equal(kind.forward(tokens, cache), whole)
        cache.reset()
    again = pool.new_sequence()  # what the index still finds of the junk was not overwritten
    hit = again.adopt(junk)
    assert np.array_equal(kind.forward(junk[hit:], again), kind.whole(junk)[hit:])


@EXACT_KERNELS
@examples(25)
@given(kinds(), st.lists(texts(150), min_size=2, max_size=4), BLOCK_SIZES)
def test_sequences_of_one_pool_do_not_know_each_other(numerics, kind, prompts, block_size):
    kind = kind.by(numerics)
    if kind.codec == "int4":
        block_size = max(32, block_size)
    pool = kind.pool(5 * (200 // block_size + 2), block_size)
    shuffle(pool, 4)
    caches = [pool.new_sequence() for _ in prompts]
    logits = kind.forward(np.concatenate(prompts), Batch([(c, len(p)) for c, p in zip(caches, prompts, strict=True)]))
    for step in range(3):
        more = kind.forward(np.array([step] * len(prompts)), Batch([(cache, 1) for cache in caches]))
        for i, prompt in enumerate(prompts):
            text = np.concatenate([prompt, np.arange(step + 1)])
            assert np.array_equal(more[i], kind.whole(text)[-1])
    start = 0
    for prompt in prompts:
        assert np.array_equal(logits[start : start + len(prompt)], kind.whole(prompt))
        start += len(prompt)


@EXACT_KERNELS
@examples(15)
@given(kinds(), st.lists(st.tuples(texts(200), st.sampled_from([0, 1, 16, 64]), st.integers(1, 20)), min_size=2, max_size=4))
def test_caches_of_different_kinds_in_one_step(numerics, kind, members):
    """Contiguous (0) and paged, of several block sizes, some with one new row and some with many."""
    kind, caches = kind.by(numerics), []
    for tokens, block_size, _ in members:
        if kind.codec == "int4" and block_size:
            block_size = max(32, block_size)
        paged = block_size and kind.pool(2 * (256 // block_size + 3), block_size)
        caches.append(paged.new_sequence() if paged else kind.contiguous(220))
        kind.in_chunks(tokens, steps([len(tokens)], caches[-1]), caches[-1])
    ends = [np.arange(more) for _, _, more in members]
    batch = Batch([(cache, len(end)) for cache, end in zip(caches, ends, strict=True)])
    parts = np.split(kind.forward(np.concatenate(ends), batch), np.cumsum([len(end) for end in ends])[:-1])
    for (tokens, _, _), end, part in zip(members, ends, parts, strict=True):
        assert np.array_equal(part, kind.whole(np.concatenate([tokens, end]))[len(tokens) :])


@examples(20)
@given(kinds(codecs=(None,)), texts(300), BLOCK_SIZES)
def test_fast_runs_on_every_storage(kind, tokens, block_size):
    """Within the bound of docs/numerics.md."""
    pool = kind.pool(400 // block_size + 2, block_size)
    size = 100
    sizes = [min(size, len(tokens) - at) for at in range(0, len(tokens), size)]
    a = in_chunks(kind.params, tokens, sizes, kind.contiguous(420), FAST)
    b = in_chunks(kind.params, tokens, sizes, pool.new_sequence(), FAST)
    cache, module = kind.contiguous(420), module_for(kind.params)
    step = cache.max_step or len(tokens)
    hidden = [module.hidden_states(kind.params, tokens[at : at + step], cache) for at in range(0, len(tokens), step)]
    bound = module.fast_bound(kind.params, np.concatenate(hidden))
    exact = kind.whole(tokens)
    assert np.all(np.abs(a - exact) <= bound)
    assert np.all(np.abs(b - exact) <= bound)


@pytest.mark.parametrize("paged", [False, True])
def test_only_the_windowed_layer_stops_growing(paged):
    """Layers [window 4, full] and 10 tokens: the full layer sees 10 keys, and keeps all of them as the text grows."""
    visibility = [Visibility(4), Visibility()]
    if paged:
        cache = PagedPool(2, 1, 1, 600, 2, visibility=visibility).new_sequence()
    else:
        cache = ContiguousCache(2, 1, 1, 1000, visibility=visibility)
    for at in range(9):
        positions = cache.extend(1)
        for layer in range(2):
            cache.write(layer, np.zeros((1, 1, 1), np.float32), np.full((1, 1, 1), at, np.float32))
        cache.commit()
    positions = cache.extend(1)
    for layer, seen in ((0, [6, 7, 8, 9]), (1, list(range(10)))):
        cache.write(layer, np.zeros((1, 1, 1), np.float32), np.full((1, 1, 1), 9, np.float32))
        out = attend(np.ones((1, 1, 1), np.float32), positions, partial(cache.tiles, layer), visibility=cache.visibility(layer))
        assert out.item() == pytest.approx(np.mean(seen), rel=1e-6)
    cache.commit()
    assert cache.held == 10
    if not paged:
        small, large = (ring.storage.nbytes for ring in cache._rings)
        assert small < large


def test_a_window_keeps_at_most_its_tokens():
    """After any step: no more than window + sinks in a rolling array; in blocks, that rounded up at either edge."""
    window, sinks, size = 20, 3, 8
    visibility = Visibility(window, sinks)
    rolling = poisoned(ContiguousCache(1, 1, 1, None, visibility=visibility))
    pool = PagedPool(1, 1, 1, 12, size, visibility=visibility)
    paged = pool.new_sequence()
    for step in [1, 5, 30, *[1] * 100, 128 - 7, 3]:
        for cache in (rolling, paged):
            for _ in range(0, step, 30):
                count = min(30, step)
                cache.extend(count)
                cache.write(0, np.ones((count, 1, 1), np.float32), np.ones((count, 1, 1), np.float32))
                cache.commit()
        assert rolling.held <= window + sinks
        opened = [rolling._rings[0].storage.k[0][0, place] for place in range(rolling._rings[0].storage.k[0].shape[1])]
        assert sum(np.nan_to_num(tile).sum() for tile in opened) <= window + sinks  # each token is a 1
        blocks = sum(block != 0 for block in paged.block_table)
        assert blocks <= -(-sinks // size) + -(-window // size) + 1
    assert len(paged.block_table) > 12  # far more than the pool has


def test_a_window_model_hits_up_to_the_last_block_that_agrees():
    """A cached prompt, extended by 3 tokens: a hit at the previous block boundary."""
    pool = PagedPool(1, 1, 1, 40, 4, visibility=Visibility(6))
    first = pool.new_sequence()
    text = list(range(16))
    first.publish(text)
    first.extend(16)
    first.commit()
    assert first.block_table[0] == 0  # the window has let the beginning go
    first.reset()
    assert pool.new_sequence().adopt([*text, 90, 91, 92]) >= 12


def test_offsets_need_more_than_32_bits():
    """Slot 5 * 2^29 and more: int64 throughout."""
    pool = PagedPool(1, 1, 1, 3, 128)
    cache = pool.new_sequence()
    cache.block_table = [2**27]
    assert cache.slot_mapping(0, 2).dtype == np.int64
    assert cache.slot_mapping(0, 2).tolist() == [2**34, 2**34 + 1]


def test_windows_without_an_end_need_a_window_on_every_layer():
    with pytest.raises(UsageError, match="needs a window on every layer"):
        ContiguousCache(2, 1, 1, None, visibility=[Visibility(4), Visibility()])
    with pytest.raises(UsageError, match="1 visibilities for 2 layers"):
        ContiguousCache(2, 1, 1, 4, visibility=[Visibility()])
    with pytest.raises(UsageError, match="every layer needs the same"):
        ContiguousCache(2, 1, 1, 4, visibility=[Visibility(4, 0, True), Visibility(5, 0, True)])


def test_a_step_longer_than_a_window_leaves_room_for_is_refused():
    cache = ContiguousCache(1, 1, 1, None, visibility=Visibility(4))
    assert cache.max_step == TILE
    with pytest.raises(CapacityError, match="129 tokens is too long.*128 at most"):
        cache.extend(129)


def test_truncating_what_a_window_has_dropped_is_refused():
    for cache in (
        ContiguousCache(1, 1, 1, None, visibility=Visibility(4)),
        PagedPool(1, 1, 1, 9, 4, visibility=Visibility(4)).new_sequence(),
    ):
        cache.extend(10)
        cache.commit()
        with pytest.raises(UsageError, match="dropped"):
            cache.truncate(9)
        cache.truncate(10)
    cache = ContiguousCache(1, 1, 1, 300, codec=get_codec("int4", np.float32, NUMPY))
    cache.extend(200)
    for layer in range(1):
        cache.write(layer, np.ones((200, 1, 1), np.float32), np.ones((200, 1, 1), np.float32))
    cache.commit()
    with pytest.raises(UsageError, match="encoded"):
        cache.truncate(100)
    cache.truncate(150)
    cache.truncate(128)
