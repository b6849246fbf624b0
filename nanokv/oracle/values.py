"""Numbers that tell: q, k and v planted so that a fault shows in some output far above rounding (docs/oracle.md).

Every key has an output channel of its own: v of token j in head h is large in channel (j + 5 h) mod D and small elsewhere. So
a key that is missing, doubled, weighted wrongly or taken from another head moves its channel by a large share of it, however
small its weight, and an elementwise bound on that channel is as small as the weight. Every head has its own size, so that
scales of quantised K and V differ. Scores spread over a few units, so that a wrong scale or mask changes every weight. With
rope they come mostly from channels that turn far, so that a wrong position does.

Symbols: R rows, S tokens, Hq query heads, Hkv key-value heads, D head width.
"""

from typing import NamedTuple

import numpy as np

from nanokv.oracle.formats import dtype_of, format_of, rounded
from nanokv.oracle.spec import Spec

SPREAD = 1.5  # standard deviation of the scores
SMALL = 0.02  # v outside its token's channel
OFFSET = 100.0  # exp(100) is infinite in float32
LARGE = 30.0  # of what unused memory holds: a key of this size takes all weight
EQUAL = -0.357  # log 0.7: numerators of 0.7 are rounded to 0.5 in a half-precision sum that has reached 512


class Values(NamedTuple):
    """One sequence. q [R, Hq, D] as stored; `k_codes`, `v_codes` [S, Hkv, D] in the stored format; `k_scale`, `v_scale`
    [S, Hkv] float32, or None where the format needs none. k and v are what they mean, float64."""

    q: np.ndarray
    k_codes: np.ndarray
    v_codes: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None

    @property
    def k(self) -> np.ndarray:
        return meaning(self.k_codes, self.k_scale)

    @property
    def v(self) -> np.ndarray:
        return meaning(self.v_codes, self.v_scale)


def meaning(codes: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Codes [..., D] times their scale [...] in float64."""
    wide = codes.astype(np.float64)
    return wide if scale is None else wide * scale.astype(np.float64)[..., None]


def planted(spec: Spec) -> list[Values]:
    """The values of every sequence, the same for the same spec."""
    raw = [_sequence(spec, np.random.default_rng([spec.seed, 1 + i]), q, kv) for i, (q, kv) in enumerate(spec.lengths)]
    k_scales, v_scales = (_scales(spec, [each[which] for each in raw]) for which in (1, 2))
    found = []
    for (q, k, v), k_scale, v_scale in zip(raw, k_scales, v_scales, strict=True):
        found.append(Values(rounded(q, spec.dtype), _codes(spec, k, k_scale), _codes(spec, v, v_scale), k_scale, v_scale))
    return found


def _sequence(spec: Spec, rng: np.random.Generator, rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    heads, dim = spec.num_kv_heads, spec.head_dim
    q = rng.standard_normal((rows, spec.num_heads, dim))
    k = rng.standard_normal((tokens, heads, dim))
    v = SMALL * rng.standard_normal((tokens, heads, dim))
    size = 2.0 ** (np.arange(heads) % 3 - 1)  # heads of three sizes, neighbours never alike
    k *= (size**0.5)[:, None]
    q /= np.repeat(size**0.5, spec.group)[:, None]
    q *= SPREAD / (spec.score_scale * dim**0.5)
    if spec.rope:
        speed = _speeds(spec)
        q, k = (x * (speed / np.sqrt((speed**2).mean())) ** 0.5 for x in (q, k))
    token, head = np.ogrid[:tokens, :heads]
    v[token, head, (token + 5 * head) % dim] = rng.choice([-1.0, 1.0], (tokens, heads)) * rng.uniform(1, 3, (tokens, heads))
    v *= size[:, None]
    if spec.logits == "offset":
        k[:, :, 0] = 2.0
        q[:, :, 0] = OFFSET / (2 * spec.score_scale)
    elif spec.logits == "equal":
        q *= 0
        q[:, :, 0] = EQUAL / (2 * spec.score_scale)
        k[1:, :, 0] = 2.0
        k[:1, :, 0] = 0.0
    return q, k, v


def _speeds(spec: Spec) -> np.ndarray:
    """[D] how far a token turns each channel. Scores come mostly from the fast ones: a position that is off by one hardly turns
    the others."""
    speed = spec.rope_theta ** (-2 * np.arange(spec.head_dim // 2) / spec.head_dim)
    return np.repeat(speed, 2) if spec.rope == "pairs" else np.tile(speed, 2)


def _scales(spec: Spec, tensors: list[np.ndarray]) -> list[np.ndarray] | list[None]:
    """[S, Hkv] for every sequence: the largest magnitude over the format's largest value, of a token and head, of a head, or
    of everything."""
    if not spec.scaled:
        return [None] * len(tensors)
    largest = [np.abs(x).max(axis=-1) for x in tensors]  # [S, Hkv]
    if spec.scales != "token":
        axis = 0 if spec.scales == "head" else None
        most = np.max([x.max(axis=axis, initial=1e-3) for x in largest], axis=0)
        largest = [np.broadcast_to(most, x.shape) for x in largest]
    return [(np.maximum(x, 1e-3) / format_of(spec.stored).top).astype(np.float32) for x in largest]


def _codes(spec: Spec, x: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    return rounded(x if scale is None else x / scale.astype(np.float64)[..., None], spec.stored)


def unused(spec: Spec, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """What memory that nobody should read holds: NaN, or the largest code where a format has none; or large numbers."""
    if spec.unused == "nan":
        return np.full(shape, 127 if spec.stored == "int8" else np.nan).astype(dtype_of(spec.stored))
    if spec.scaled:
        return rounded(rng.uniform(-1, 1, shape) * format_of(spec.stored).top, spec.stored)
    return rounded(LARGE * rng.standard_normal(shape), spec.stored)
