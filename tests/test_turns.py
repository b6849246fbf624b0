"""Rotary angles against arithmetic of fifty digits, and the bits that every machine gives."""

import hashlib
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import ConfigError
from nanokv.rope import Rope, Scaling, attention_term
from nanokv.turns import DIGITS, TWO_PI, cos_sin, quarter_turns
from tests.support import examples

SCALINGS = [Scaling(), Scaling("llama3", 8.0, 8192.0), Scaling("yarn", 4.0, 32768.0, attention_factor=1.138629436111989)]
# sha256 of cos and sin, float64, little-endian, at positions 0, 101, 202, ... below 2^17, heads 64 wide
BITS = {
    (10000.0, "default"): "4af217a9d5a9df09bfa6ee39587d373a42a5020bb7aac97aec42971b6d5272ed",
    (500000.0, "llama3"): "11bcf39ab0d7285dad70277fb94a9199a7d66da4fb655a7c7d54eed2d0b7cd49",
    (1000000.0, "yarn"): "1fe35d07e322b7944cc27281a941de62b9e5cf910a0c438602f4d0d3eec8bd31",
}


def exact_cos_sin(angle: Decimal) -> tuple[Decimal, Decimal]:
    """By Taylor's series, to some forty digits."""
    x = angle % TWO_PI
    sums, term = [Decimal(1), Decimal(0)], Decimal(1)
    for n in range(1, 80):
        term = term * x / n
        sums[n % 2] += term if n % 4 < 2 else -term
    return sums[0], sums[1]


@examples(60)
@given(
    st.sampled_from([2, 6, 64, 128]), st.floats(2.0, 1e7), st.sampled_from(SCALINGS),
    st.one_of(st.integers(0, 5000), st.integers(0, (1 << 22) - 1)), st.data(),
)  # fmt: skip
def test_tables_are_the_exact_cosine_and_sine_rounded(dim, theta, scaling, position, draw):
    """float32 correctly rounded; float64 within 2.5 units in the last place, and 2^-52 at most."""
    rope = Rope(dim, theta, scaling=scaling)
    plane = draw.draw(st.integers(0, dim // 2 - 1))
    with localcontext(prec=60):
        frequency = rope._exact()[plane]
        if scaling.kind == "default":
            assert abs(frequency - Decimal(theta) ** (Decimal(-2 * plane) / dim)) < Decimal("1e-48")
        expected = exact_cos_sin(position * frequency)
    turned = [each[0, plane] for each in cos_sin(np.array([position]), *rope._turns)]
    tables = [each[0, 0, plane] for each in rope.tables(np.array([position]), np.zeros(1, np.float32))]
    for ours, table, truth in zip(turned, tables, expected, strict=True):
        error = abs(Decimal(float(ours)) - truth)
        assert error <= Decimal(2.5 * float(np.spacing(abs(float(truth)))))
        assert error <= Decimal(2.0**-52)
        assert table == np.float32(ours * scaling.attention_factor)
        assert np.float32(ours) == np.float32(float(truth))


@given(st.integers(0, (1 << 30) - 1))
def test_far_positions_lose_precision_slowly(position):
    ours = [each.item() for each in cos_sin(np.array([position]), *Rope(2)._turns)]
    with localcontext(prec=60):
        for mine, truth in zip(ours, exact_cos_sin(Decimal(position)), strict=True):
            assert abs(Decimal(mine) - truth) <= Decimal(2.0**-23)


@pytest.mark.parametrize(("theta", "kind"), list(BITS))
def test_the_bits_of_every_machine(theta, kind):
    scaling = next(each for each in SCALINGS if each.kind == kind)
    both = Rope(64, theta, scaling=scaling).tables(np.arange(0, 1 << 17, 101), np.zeros(1))
    assert hashlib.sha256(np.stack(both).astype("<f8").tobytes()).hexdigest() == BITS[theta, kind]


@given(st.lists(st.floats(1e-30, 100.0), min_size=1, max_size=5))
def test_a_frequency_is_its_two_parts(frequencies):
    """hi of 31 bits, so that whole positions of 22 bits multiply it exactly; with lo, 84 bits of the frequency."""
    with localcontext(prec=DIGITS):
        hi, lo = quarter_turns([Decimal(each) for each in frequencies])
        for each, high, low in zip(frequencies, hi, lo, strict=True):
            turns = Decimal(each) * 4 / TWO_PI
            assert abs(Decimal(float(high)) + Decimal(float(low)) - turns) <= turns * Decimal(2) ** -84
            numerator = float(high).as_integer_ratio()[0]
            assert (numerator & -numerator) * (1 << 31) >= numerator


def test_yarns_attention_term():
    assert attention_term(1.0) == 1.0
    assert attention_term(40.0, 0.707) == pytest.approx(0.1 * 0.707 * np.log(40) + 1, rel=1e-15)


@pytest.mark.parametrize(("more", "words"), [
    ({"theta": 0.0}, "base 0.0"), ({"theta": float("inf")}, "base inf"), ({"divisors": (1.0, 0.0)}, "divisor"),
    ({"divisors": (1.0, float("nan"))}, "divisor"),
])  # fmt: skip
def test_what_gives_no_frequency_is_refused(more, words):
    with pytest.raises(ConfigError, match=words):
        Rope(4, **more)
