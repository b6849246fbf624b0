"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): a query or key at position p is turned by p times a
frequency in each of D / 2 planes, so that a score depends on the distance of two positions alone.

Which two of the D numbers make a plane is a matter of layout: Hugging Face's files pair i with i + D / 2 ("halves"),
Meta's and llama2.c's pair 2i with 2i + 1 ("pairs"). A permutation of the rows of W_q and W_k turns one into the other.

Angles are float64 up to and including cos and sin, and only then rounded: at position 2000 a float16 angle is off by up to
half a radian, and bfloat16 does not tell position 256 from 257.

Symbols: R rows, H heads, D head width.
"""

import math
from dataclasses import dataclass

import numpy as np

from nanokv.backend import Array, module_of
from nanokv.errors import ConfigError
from nanokv.numerics import COMPILED, EXACT, Numerics, compiled_kernels

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
        if self.divisors and len(self.divisors) != self.dim // 2:
            raise ConfigError(f"{len(self.divisors)} divisors of rotary frequencies for {self.dim // 2} of them")

    def frequencies(self) -> np.ndarray:
        """Radians a position in each plane, float64 [D / 2]."""
        base = self.theta ** (-np.arange(0, self.dim, 2) / self.dim)
        if self.divisors:
            base = base / np.asarray(self.divisors)
        match self.scaling.kind:
            case "linear":
                return base / self.scaling.factor
            case "llama3":
                return _llama3(base, self.scaling)
            case "yarn":
                return _yarn(base, self.theta, self.scaling)
        return base

    def tables(self, positions: np.ndarray, like: Array) -> tuple[Array, Array]:
        """cos and sin [R, 1, D / 2] at host `positions` [R], in the dtype and memory of `like`."""
        angles = positions[:, None].astype(np.float64) * self.frequencies()
        xp, factor = module_of(like), self.scaling.attention_factor
        cos, sin = (xp.asarray((turn * factor)[:, None].astype(like.dtype)) for turn in (np.cos(angles), np.sin(angles)))
        return cos, sin


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


def _llama3(base: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Llama 3.1's rule (meta-llama/llama-models, model.py, apply_scaling): frequencies that turn fewer than
    `low_freq_factor` times in the original context are divided by the factor, those that turn more than
    `high_freq_factor` times stay, and between them the share of the latter grows linearly."""
    turns = scaling.original_positions * base / (2 * math.pi)
    kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return (1 - kept) * base / scaling.factor + kept * base


def _yarn(base: np.ndarray, theta: float, scaling: Scaling) -> np.ndarray:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): as llama3, but the share is linear in the plane's number,
    between the planes that turn `beta_fast` and `beta_slow` times in the original context."""
    planes = len(base)

    def plane(turns: float) -> float:
        return planes * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    low, high = plane(scaling.beta_fast), plane(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * planes - 1)
    if low == high:
        high += 0.001  # the published code's way out of dividing by zero
    scaled = np.clip((np.arange(planes) - low) / (high - low), 0, 1)
    return scaled * base / scaling.factor + (1 - scaled) * base
