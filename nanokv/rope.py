"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): a query or key at position p is turned by p times a
frequency in each of D / 2 planes, so that a score depends on the distance of two positions alone.

Which two of the D numbers make a plane is a matter of layout: Hugging Face's files pair i with i + D / 2 ("halves"),
Meta's and llama2.c's pair 2i with 2i + 1 ("pairs"). A permutation of the rows of W_q and W_k turns one into the other.

Angles are kept in more than float64, and cos and sin in float64, and only then rounded: at position 2000 a float16 angle is
off by up to half a radian, and bfloat16 does not tell position 256 from 257. Frequencies are computed in decimal, cos and sin
by nanokv/turns.py: no library's pow, log, cos or sin, whose last bits differ between machines.

Symbols: R rows, H heads, D head width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property

import numpy as np

from nanokv.backend import Array, module_of
from nanokv.errors import ConfigError
from nanokv.numerics import COMPILED, EXACT, Numerics, compiled_kernels
from nanokv.turns import DIGITS, TWO_PI, cos_sin, quarter_turns

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Scaling:
    """How frequencies are changed for texts longer than those of pretraining. Fields that a kind does not use are unread.

    `attention_factor` multiplies cos and sin, and so every score by its square.
    """

    kind: str = "default"
    factor: float = 1.0
    original_positions: float = 0.0  # positions of pretraining
    low_freq_factor: float = 1.0  # llama3: turns in `original_positions` up to which a frequency is fully scaled
    high_freq_factor: float = 4.0  # llama3: ... and from which it is left as it is
    beta_slow: float = 1.0  # yarn: the same two
    beta_fast: float = 32.0
    truncate: bool = True  # yarn: the planes between which it passes from one to the other are whole numbers
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Rope:
    """The rotation of a model: heads of width `dim`, frequencies theta^(-2i / dim) before scaling.

    `adjacent` is the layout (see above). `divisors` [dim / 2], where a file stores them instead of a scaling, divide the
    frequencies.
    """

    dim: int
    theta: float = 10000.0
    adjacent: bool = False
    scaling: Scaling = Scaling()
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ConfigError(f"head width {self.dim} is odd: rotary positions turn pairs of numbers")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ConfigError(f"rotary base {self.theta} is not a positive number")
        if not all(math.isfinite(each) and each > 0 for each in self.divisors):
            raise ConfigError("a divisor of the rotary frequencies is not a positive number")
        if self.divisors and len(self.divisors) != self.dim // 2:
            raise ConfigError(f"{len(self.divisors)} divisors of rotary frequencies for {self.dim // 2} of them")

    def frequencies(self) -> np.ndarray:
        """Radians a position in each plane, float64 [D / 2]."""
        return np.array([float(each) for each in self._exact()])

    def tables(self, positions: np.ndarray, like: Array) -> tuple[Array, Array]:
        """cos and sin [R, 1, D / 2] at host `positions` [R], in the dtype and memory of `like`."""
        xp, factor = module_of(like), self.scaling.attention_factor
        parts = cos_sin(positions, *self._turns)
        cos, sin = (xp.asarray((part if factor == 1.0 else part * factor)[:, None].astype(like.dtype)) for part in parts)
        return cos, sin

    @cached_property
    def _turns(self) -> tuple[np.ndarray, np.ndarray]:
        with localcontext(prec=DIGITS):
            return quarter_turns(self._exact())

    def _exact(self) -> list[Decimal]:
        """Radians a position in each plane."""
        with localcontext(prec=DIGITS):
            step = Decimal(self.theta) ** (Decimal(-2) / self.dim)
            base = [step**i for i in range(self.dim // 2)]
            if self.divisors:
                base = [each / Decimal(divisor) for each, divisor in zip(base, self.divisors, strict=True)]
            match self.scaling.kind:
                case "linear":
                    return [each / Decimal(self.scaling.factor) for each in base]
                case "llama3":
                    return _llama3(base, self.scaling)
                case "yarn":
                    return _yarn(base, self.theta, self.scaling)
            return base


def attention_term(factor: float, scale: float = 1.0) -> float:
    """YaRN's 0.1 scale ln(factor) + 1 (equation 22), by which cos and sin are multiplied."""
    with localcontext(prec=DIGITS):
        return float(Decimal("0.1") * Decimal(scale) * Decimal(factor).ln() + 1)


def rotate(x: Array, cos: Array, sin: Array, adjacent: bool, numerics: Numerics = EXACT) -> Array:
    """x [R, H, D] turned by the angles of each row, cos and sin [R, 1, D / 2] -> [R, H, D]."""
    if numerics is COMPILED:
        return compiled_kernels(x).rotate(x, cos, sin, adjacent)
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if adjacent else (x[..., :half], x[..., half:])
    out = module_of(x).empty(x.shape, dtype=x.dtype)
    new_a, new_b = (out[..., 0::2], out[..., 1::2]) if adjacent else (out[..., :half], out[..., half:])
    new_a[...] = a * cos - b * sin
    new_b[...] = b * cos + a * sin
    return out


def _llama3(base: Sequence[Decimal], scaling: Scaling) -> list[Decimal]:
    """Llama 3.1's rule (meta-llama/llama-models, model.py, apply_scaling): frequencies that turn fewer than
    `low_freq_factor` times in the original context are divided by the factor, those that turn more than
    `high_freq_factor` times stay, and between them the share of the latter grows linearly."""
    low, high = Decimal(scaling.low_freq_factor), Decimal(scaling.high_freq_factor)
    turns = [Decimal(scaling.original_positions) * each / TWO_PI for each in base]
    return _blended(base, [(each - low) / (high - low) for each in turns], scaling)


def _yarn(base: Sequence[Decimal], theta: float, scaling: Scaling) -> list[Decimal]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): as llama3, but the share is linear in the plane's number,
    between the planes that turn `beta_fast` and `beta_slow` times in the original context."""
    planes = len(base)

    def plane(turns: float) -> Decimal:
        return planes * (Decimal(scaling.original_positions) / (Decimal(turns) * TWO_PI)).ln() / Decimal(theta).ln()

    low, high = plane(scaling.beta_fast), plane(scaling.beta_slow)
    if scaling.truncate:
        low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
    low, high = max(low, Decimal(0)), min(high, Decimal(2 * planes - 1))
    if low == high:
        high += Decimal("0.001")  # the published code's way out of dividing by zero
    return _blended(base, [1 - (i - low) / (high - low) for i in range(planes)], scaling)


def _blended(base: Sequence[Decimal], kept: Sequence[Decimal], scaling: Scaling) -> list[Decimal]:
    """Each frequency with the share `kept`, cut to 0 .. 1, as it is and the rest divided by the factor."""
    shares = [min(max(each, Decimal(0)), Decimal(1)) for each in kept]
    factor = Decimal(scaling.factor)
    return [(1 - share) * each / factor + share * each for each, share in zip(base, shares, strict=True)]
