"""Rotary positions: frequencies by each rule, angles that stay exact, scores that depend on distances alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import ConfigError
from nanokv.models.rope_config import read_rope
from nanokv.rope import Rope, Scaling, rotate

LLAMA31 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def turned(x: np.ndarray, position: int, rope: Rope) -> np.ndarray:
    return rotate(x[None, None], *rope.tables(np.array([position]), like=x), rope.adjacent)[0, 0]


@given(
    st.integers(1, 20).map(lambda half: 2 * half), st.booleans(), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 99)
)
def test_a_score_depends_on_the_distance(dim, adjacent, query, key, seed):
    """q at p and k at p' give what q at p - p' and k at 0 give: to 1e-9, since angles of up to 5000 radians carry a rounding
    of 5000 * 2^-53."""
    q, k = np.random.default_rng(seed).standard_normal((2, dim))
    rope = Rope(dim, adjacent=adjacent)
    there = turned(q, query, rope) @ turned(k, key, rope)
    assert there == pytest.approx(turned(q, query - key, rope) @ k, abs=1e-9)
    assert np.linalg.norm(turned(q, query, rope)) == pytest.approx(np.linalg.norm(q), rel=1e-12)


def test_a_quarter_turn_by_hand():
    """One plane of frequency 1 per position: after pi / 2 positions it would be a quarter turn; here 1 radian."""
    x = np.array([3.0, 4.0])
    c, s = math.cos(1), math.sin(1)
    for adjacent in (False, True):
        assert turned(x, 1, Rope(2, adjacent=adjacent)) == pytest.approx([3 * c - 4 * s, 4 * c + 3 * s])


def test_which_numbers_make_a_plane():
    """A plane of frequency 1 and one that hardly turns: only the first plane's numbers change."""
    x = np.arange(1.0, 5.0)
    for adjacent, plane in ((False, [0, 2]), (True, [0, 1])):
        moved = np.flatnonzero(np.abs(turned(x, 1, Rope(4, 1e12, adjacent)) - x) > 1e-3)
        assert moved.tolist() == plane


def test_angles_are_float64_whatever_the_dtype():
    """B03: dim 32, base 10000: entry (1857, 1) is 1044.2678, which float16 makes 1045, a cosine off by 0.78. The angle that the
    library is given here is itself rounded twice, by 2^-43 each time; test_turns.py has the sharper comparison."""
    rope = Rope(32)
    assert 1857 * rope.frequencies()[1] == pytest.approx(1044.2678, abs=1e-4)
    for dtype, tolerance in ((np.float16, 2**-11), (np.float32, 2**-24), (np.float64, 2**-42)):
        cos, sin = rope.tables(np.array([1857]), like=np.zeros(1, dtype))
        assert cos.dtype == sin.dtype == dtype
        assert abs(float(cos[0, 0, 1]) - math.cos(1857 * 10000 ** (-1 / 16))) <= tolerance


def test_neighbouring_positions_have_their_own_angles():
    """B04: positions 250 .. 262, some of which bfloat16 cannot tell apart."""
    import ml_dtypes

    cos, _ = Rope(2).tables(np.arange(250, 263), like=np.zeros(1, np.float64))
    assert len(np.unique(cos)) == 13
    half, _ = Rope(2).tables(np.arange(250, 263), like=np.zeros(1, ml_dtypes.bfloat16))
    assert np.array_equal(half, cos.astype(ml_dtypes.bfloat16))


def test_rows_do_not_depend_on_each_other():
    positions = np.random.default_rng(0).integers(0, 100000, 37)
    rope, like = Rope(30, 10000.0, scaling=Scaling("yarn", 4.0, 4096.0)), np.zeros(1)
    together = rope.tables(positions, like)
    for i, position in enumerate(positions):
        alone = rope.tables(np.array([position]), like)
        assert all(np.array_equal(a[i], b[0]) for a, b in zip(together, alone, strict=True))


def test_llama3_keeps_fast_planes_and_slows_slow_ones():
    """Llama 3.1 8B: planes that turn more than 4 times in 8192 positions stay, fewer than once are divided by 8."""
    rope = read_rope(LLAMA31, 128, 131072)
    plain, scaled = Rope(128, 500000.0).frequencies(), rope.frequencies()
    turns = 8192 * plain / (2 * math.pi)
    assert np.array_equal(scaled[turns > 4], plain[turns > 4])
    assert scaled[turns < 1] == pytest.approx(plain[turns < 1] / 8, rel=1e-15)
    middle = (turns > 1) & (turns < 4)
    assert middle.any()
    smooth = (turns[middle] - 1) / 3
    assert scaled[middle] == pytest.approx((1 - smooth) * plain[middle] / 8 + smooth * plain[middle], rel=1e-15)


def test_linear_divides_every_frequency():
    """Positions 0, 4, 8 of a model scaled by 4 are positions 0, 1, 2 of the plain one."""
    rope = read_rope({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8, 100)
    ours, plain = rope.tables(np.array([0, 4, 8]), np.zeros(1)), Rope(8).tables(np.arange(3), np.zeros(1))
    assert all(np.allclose(a, b, atol=1e-15) for a, b in zip(ours, plain, strict=True))


def test_yarn():
    """Qwen2.5's setting: the paper's factor on cos and sin; fast planes stay, slow ones are divided by 4."""
    rope = read_rope({"rope_theta": 1e6, "rope_scaling": YARN}, 128, 131072)
    assert rope.scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    plain, scaled = Rope(128, 1e6).frequencies(), rope.frequencies()
    low = math.floor(128 * math.log(32768 / (32 * 2 * math.pi)) / (2 * math.log(1e6)))
    high = math.ceil(128 * math.log(32768 / (2 * math.pi)) / (2 * math.log(1e6)))
    assert np.array_equal(scaled[: low + 1], plain[: low + 1])
    assert scaled[high:] == pytest.approx(plain[high:] / 4, rel=1e-15)
    middle = np.arange(low + 1, high)
    assert len(middle) > 10
    share = (middle - low) / (high - low)
    assert scaled[middle] == pytest.approx(plain[middle] * (share / 4 + 1 - share), rel=1e-14)
    cos, _ = rope.tables(np.array([0]), np.zeros(1))
    assert np.all(cos == rope.scaling.attention_factor)


def test_divisors_of_a_file():
    """llama.cpp stores llama3 scaling as one divisor a plane."""
    plain, scaled = Rope(128, 500000.0), read_rope(LLAMA31, 128, 131072)
    stored = tuple(plain.frequencies() / scaled.frequencies())
    assert Rope(128, 500000.0, divisors=stored).frequencies() == pytest.approx(scaled.frequencies(), rel=1e-15)
    with pytest.raises(ConfigError, match="3 divisors of rotary frequencies for 4"):
        Rope(8, divisors=(1.0,) * 3)


@pytest.mark.parametrize("spelling", ["rope_type", "type", "both", "rope_parameters"])
@pytest.mark.parametrize("parameters", [LLAMA31["rope_scaling"], YARN, {"rope_type": "linear", "factor": 2.0}])
def test_every_spelling_gives_the_same_table(spelling, parameters):
    """B02: the kind under `rope_type` or `type`; everything under rope_scaling, or with theta under rope_parameters."""
    named = dict(parameters)
    if spelling in ("type", "both"):
        named["type"] = named["rope_type"] if spelling == "both" else named.pop("rope_type")
    raw = {"rope_theta": 500000.0, "rope_scaling": named}
    if spelling == "rope_parameters":
        raw = {"rope_parameters": {**named, "rope_theta": 500000.0}, "rope_scaling": None}
    expected = read_rope({"rope_theta": 500000.0, "rope_scaling": parameters}, 64, 131072)
    assert expected.scaling.kind == parameters["rope_type"]
    assert read_rope(raw, 64, 131072) == expected


def test_what_a_file_may_leave_out():
    assert read_rope({}, 8, 100) == Rope(8)
    assert read_rope({"rope_scaling": None, "rope_theta": 1e6}, 8, 100) == Rope(8, 1e6)
    assert read_rope({"rope_scaling": {"rope_type": "default"}}, 8, 100) == Rope(8)
    assert read_rope({"rope_scaling": {**YARN, "attention_factor": 1.5}}, 8, 100).scaling.attention_factor == 1.5
    half = read_rope({"rope_scaling": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}}, 8, 100).scaling.attention_factor
    assert half == pytest.approx((0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    beside = read_rope({"rope_scaling": YARN, "original_max_position_embeddings": 1000}, 8, 100)
    assert beside.scaling.original_positions == 1000


@pytest.mark.parametrize(("raw", "words"), [
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
    ({"rope_scaling": {"rope_type": "default", "type": "mrope"}}, "contradict"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported"),
    ({"rope_scaling": {"factor": 2.0}}, "no rope_type"),
    ({"rope_scaling": "yarn"}, "is not an object"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor 0.5"),
    ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor nan"),
    ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "factor True"),
    ({"rope_scaling": {**LLAMA31["rope_scaling"], "low_freq_factor": 4.0}}, "not below"),
    ({"rope_scaling": {**LLAMA31["rope_scaling"], "high_freq_factor": None}}, "high_freq_factor"),
    ({"rope_scaling": {**YARN, "beta_slow": 64.0}}, "above beta_fast"),
    ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate"),
    ({"rope_theta": 0}, "rope_theta 0"),
    ({"rope_theta": "10000"}, "rope_theta '10000'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
])  # fmt: skip
def test_what_is_refused(raw, words):
    """B05: dynamic scaling changes the base under keys that are cached already."""
    with pytest.raises(ConfigError, match=words):
        read_rope(raw, 8, 100)


def test_an_odd_head_is_refused():
    with pytest.raises(ConfigError, match="head width 7 is odd"):
        Rope(7)
