"""The fold over tiles against the textbook, and against itself under every way of splitting the work."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv import attention
from nanokv.attention import Partial, attend, combine, finish, naive_attention, tile_partials
from nanokv.backend import NUMPY
from nanokv.kv.codec import get_codec
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.tile import TILE, Tiles, Visibility
from nanokv.numerics import EXACT, FAST
from tests.support import head_counts, poisoned

DTYPES = st.sampled_from([np.float32, np.float64])
VISIBILITIES = st.one_of(st.just(Visibility()), st.builds(Visibility, st.integers(1, 300), st.integers(0, 5)))


def filled(k: np.ndarray, v: np.ndarray) -> Tiles:
    """The tiles of a cache that holds k, v [S, Hkv, D], its unused memory NaN."""
    cache = poisoned(ContiguousCache(1, *k.shape[1:], capacity=len(k) + 200, dtype=k.dtype))
    cache.extend(len(k))
    cache.write(0, k, v)
    (tiles,) = cache.tiles(0, (len(k) - 1) // TILE)
    return tiles


def random_qkv(seed, length, heads, kv_heads, dim, dtype):
    rng = np.random.default_rng(seed)
    shapes = (length, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@given(st.integers(0, 1 << 30), st.integers(1, 420), head_counts(), st.integers(1, 40), DTYPES, VISIBILITIES, st.data())
def test_a_query_does_not_know_its_companions_nor_later_keys(seed, length, heads, dim, dtype, visibility, draw):
    """Any rows, with any number of later tokens in the cache, have the bits of the whole run."""
    q, k, v = random_qkv(seed, length, *heads, dim, dtype)
    whole = attend(q, np.arange(length), filled(k, v), visibility=visibility)
    some = np.sort(draw.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    known = draw.draw(st.integers(some[-1] + 1, length))
    assert np.array_equal(attend(q[some], some, filled(k[:known], v[:known]), visibility=visibility), whole[some])


@given(st.integers(0, 1 << 30), st.integers(1, 420), head_counts(), st.integers(1, 40), DTYPES, VISIBILITIES,
       st.sampled_from([EXACT, FAST]))  # fmt: skip
def test_the_fold_equals_the_textbook_within_rounding(seed, length, heads, dim, dtype, visibility, numerics):
    """Against float64 (or longdouble). First order, unit roundoff u: a score is a sum of D products (error D u |q||k|), the
    exponential carries its absolute error over as a relative one, two sums of up to S terms add S u each, a tile's
    rescaling 2 u: relative to the weighted mean of |v|, 2 (D |q||k| scale + S + 4 tiles + 4) u."""
    q, k, v = random_qkv(seed, length, *heads, dim, dtype)
    positions = np.arange(length)
    wide = np.float64 if dtype is np.float32 else np.longdouble
    truth = naive_attention(q.astype(wide), k.astype(wide), v.astype(wide), positions, visibility=visibility)
    mean = naive_attention(q.astype(wide), k.astype(wide), np.abs(v).astype(wide), positions, visibility=visibility)
    size = np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max() * dim**-0.5
    unit = np.finfo(dtype).eps / 2
    bound = 2 * (dim * size + length + 4 * (length // TILE + 1) + 4) * unit * mean
    assert np.all(np.abs(attend(q, positions, filled(k, v), visibility=visibility, numerics=numerics) - truth) <= bound)


@given(st.integers(0, 1 << 30), st.integers(1, 300), head_counts())
def test_exact_pieces_equal_however_the_work_is_cut(seed, length, heads):
    q, k, v = random_qkv(seed, length, *heads, 16, np.float32)
    whole = attend(q, np.arange(length), filled(k, v))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SCORE_ELEMENTS", 1)
        assert np.array_equal(attend(q, np.arange(length), filled(k, v)), whole)


@given(st.integers(0, 1 << 30), st.integers(1, 5))
def test_a_tile_without_a_visible_key_changes_nothing(seed, count):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, 1, 2, 1, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, TILE, 2, 8)).astype(np.float32) for _ in range(2))
    hidden = np.zeros((1, 2, 1, 1, TILE), bool)
    hidden[:, 1] = True
    partials = tile_partials(q, k, v, hidden)
    seen, unseen = (Partial(*(a[:, i] for a in partials)) for i in range(2))
    for left, right in ((seen, unseen), (unseen, seen)):
        state = combine(left, right)
        for _ in range(count):
            state = combine(state, unseen)
        assert all(np.array_equal(a, b) for a, b in zip(state, seen, strict=True))
    assert np.array_equal(finish(combine(unseen, unseen)), np.zeros((1, 2, 1, 8)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity times zero, where it is to be
@given(st.integers(0, 1 << 30), st.integers(1, 300), head_counts(), VISIBILITIES, st.sampled_from([EXACT, FAST]),
       st.sampled_from([np.nan, np.inf, -np.inf]), st.data())  # fmt: skip
def test_what_a_query_does_not_see_does_not_reach_it_even_if_it_is_not_a_number(
    seed, length, heads, visibility, numerics, bad, draw
):
    """Keys and values of some positions are NaN or infinite: rows that do not see them keep every bit, rows that do see
    them show it."""
    q, k, v = random_qkv(seed, length, *heads, 8, np.float32)
    positions = np.arange(length)
    plain = attend(q, positions, filled(k, v), visibility=visibility, numerics=numerics)
    spoilt = draw.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=3))
    in_keys = draw.draw(st.booleans())
    v[spoilt] = bad
    if in_keys:
        k[spoilt] = np.nan
    sees = visibility.sees(positions[:, None], np.array(spoilt)).any(axis=1)
    out = attend(q, positions, filled(k, v), visibility=visibility, numerics=numerics)
    assert np.array_equal(out[~sees], plain[~sees])
    assert not np.isfinite(out[sees]).any()


def test_a_row_that_may_see_nothing_is_zero_not_nan_nor_the_mean():
    """V = [1, 3] and an empty mask: 0, where a finite sentinel would give 2 and minus infinity NaN."""
    q, k = np.ones((1, 1, 1), np.float32), np.ones((2, 1, 1), np.float32)
    v = np.array([1, 3], np.float32).reshape(2, 1, 1)

    class Nothing(Visibility):
        def sees(self, query, key):
            return np.zeros(np.broadcast_shapes(query.shape, key.shape), bool)

    for out in (
        attend(q, np.array([1]), filled(k, v), visibility=Nothing()),
        naive_attention(q, k, v, np.array([1]), visibility=Nothing()),
    ):
        assert out.item() == 0


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (12, 12), (32, 8), (28, 4), (6, 1)])
def test_query_heads_share_key_value_heads_in_groups(heads, kv_heads):
    """Head h reads h // (heads / kv_heads): 28/4 gives 0 to heads 0-6 and 3 to 21-27; never tiled 0, 1, 0, 1."""
    k = np.zeros((3, kv_heads, 2), np.float32)
    v = np.broadcast_to(np.arange(kv_heads, dtype=np.float32)[None, :, None], k.shape)
    q = np.ones((1, heads, 2), np.float32)
    for numerics in (EXACT, FAST):
        out = attend(q, np.array([2]), filled(k, v), numerics=numerics)
        assert out[0, :, 0].tolist() == [head // (heads // kv_heads) for head in range(heads)]


def test_a_query_after_many_cached_keys_sees_all_of_them():
    """One query at position 99 over 100 keys: the causal frontier is bottom-right, not top-left."""
    v = np.arange(100, dtype=np.float64).reshape(100, 1, 1)
    k = np.zeros_like(v)
    assert attend(np.ones((1, 1, 1)), np.array([99]), filled(k, v)).item() == pytest.approx(49.5, rel=1e-14)


def test_scores_beyond_half_precision_stay_finite():
    """d = 128 and entries of 256: the scaled score is 741455, beyond float16's 65504."""
    q = np.full((1, 1, 128), 256, np.float32)
    assert np.all(attend(q, np.array([0]), filled(q, q)) == 256)
    half = ContiguousCache(1, 1, 128, 1, codec=get_codec("float16", np.float32, NUMPY))
    half.extend(1)
    half.write(0, q, q)
    assert np.all(attend(q, np.array([0]), partial(half.tiles, 0)) == 256)


def test_a_worked_example_row_by_row():
    """Three tokens of width 4, scale 1/2: the third from the cache of the first two, and by the formula."""
    x = np.array([[0.1, 0.3, 0.2, -0.1], [0.2, -0.1, 0.4, 0.5], [0.4, 0.2, 0.3, -0.1]])
    w_q = np.array([[0.3, -0.3, -0.1, 0.2], [0.2, 0.4, 0.1, 0.3], [0.1, 0.2, 0.3, 0.5], [-0.3, 0.3, 0.4, -0.5]])
    w_k = np.array([[0.1, 0.8, 0.2, -0.3], [0.6, 0.5, -0.3, 0.1], [-0.4, 0.3, 0.7, 0.2], [0.6, -0.1, 0.2, 0.3]])
    w_v = np.array([[-0.7, 0.5, -0.9, 0.1], [0.1, 0.8, 0.4, 0.3], [0.4, 0.2, -0.4, 0.5], [0.1, 0.2, 0.1, -0.4]])
    q, k, v = ((x @ w)[:, None] for w in (w_q, w_k, w_v))
    whole = attend(q, np.arange(3), filled(k, v), scale=0.5)
    cache = poisoned(ContiguousCache(1, 1, 4, 8, np.float64))
    for at in range(3):
        positions = cache.extend(1)
        cache.write(0, k[at : at + 1], v[at : at + 1])
        assert np.array_equal(attend(q[at : at + 1], positions, partial(cache.tiles, 0), scale=0.5)[0], whole[at])
        cache.commit()
    # The same by hand: softmax of the third query's three scores over the three values, each sum spelled out.
    scores = [sum(q[2, 0, d] * k[s, 0, d] for d in range(4)) / 2 for s in range(3)]
    weights = np.exp(scores) / np.exp(scores).sum()
    by_hand = sum(weights[s] * v[s, 0] for s in range(3))
    np.testing.assert_array_max_ulp(whole[2, 0], by_hand, maxulp=8)
