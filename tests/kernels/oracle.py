"""The canonical order of docs/numerics.md in plain NumPy, slow and readable: the compiled kernels equal it bit for bit.

A fused multiply-add is exact: the product of two float32 is a float64, and the sum with the third is rounded to odd, which
loses nothing that the rounding to float32 could ask for (Boldo and Melquiond 2008, Emulation of FMA and correctly rounded
sums: proved algorithms using rounding to odd).
"""

import numpy as np

from nanokv.kv.tile import TILE, Visibility

F = np.float32
SEGMENT = LANES = 64
LOWEST = np.finfo(F).min


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float32 arrays, rounded once."""
    with np.errstate(all="ignore"):
        product, c = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
        total = product + c
        back = total - product
        error = (product - (total - back)) + (c - back)  # exact: Knuth's two-sum
        bits = np.atleast_1d(total).view(np.int64)
        inexact = np.atleast_1d((error != 0) & np.isfinite(total))
        away = np.atleast_1d((error > 0) == (total > 0))
        odd = np.where(inexact & (bits & 1 == 0), bits + np.where(away, 1, -1), bits)
        return odd.view(np.float64).reshape(np.shape(total)).astype(F)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product rule over the first axis: a [K, ...], b [K, ...], broadcast -> [...]."""
    total = np.zeros(np.broadcast_shapes(a.shape, b.shape)[1:], F)
    for start in range(0, len(a), SEGMENT):
        chain = np.zeros_like(total)
        for k in range(start, min(start + SEGMENT, len(a))):
            chain = fma(a[k], b[k], chain)
        total = total + chain
    return total


def lanes_sum(x: np.ndarray, squared: bool = False) -> np.ndarray:
    """The sum rule over the last axis, of the numbers or their squares: [..., n] -> [...]."""
    lanes = np.zeros((*x.shape[:-1], LANES), F)
    for start in range(0, x.shape[-1], LANES):
        part = x[..., start : start + LANES]
        here = lanes[..., : part.shape[-1]]
        lanes[..., : part.shape[-1]] = fma(part, part, here) if squared else here + part
    apart = LANES // 2
    while apart:
        lanes = lanes[..., :apart] + lanes[..., apart : 2 * apart]
        apart //= 2
    return lanes[..., 0]


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [R, K], weight [N, K], bias [N] -> [R, N]"""
    out = product(x.T[:, :, None], weight.T[:, None, :])
    return out if bias is None else out + bias


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    share = F(1 / x.shape[-1])
    centred = x - (lanes_sum(x) * share)[..., None]
    scale = F(1) / np.sqrt(lanes_sum(centred, squared=True) * share + F(eps))
    return fma(centred * scale[..., None], weight, bias)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    scale = F(1) / np.sqrt(lanes_sum(x, squared=True) * F(1 / x.shape[-1]) + F(eps))
    return x * scale[..., None] * weight


def exp(x: np.ndarray) -> np.ndarray:
    """exp(x) for x <= 0."""
    end = F(-87)
    with np.errstate(all="ignore"):
        y = np.where(x < end, end, x)
        t = fma(y, F(1.44269504), F(12582912.0))
        n = t - F(12582912.0)
        r = fma(n, F(2.12194440e-4), fma(n, F(-0.693359375), y))
        p = F(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = fma(p, r, F(c))
        p = fma(p, r * r, r) + F(1)
        power = ((t.view(np.int32) << 23) + np.int32(127 << 23)).view(F)
        return np.where(x < end, F(0), p * power)


def times_sigmoid(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    e = exp(-np.abs(z))
    return np.where(z < 0, x * e, x) / (F(1) + e)


def gelu_new(x: np.ndarray) -> np.ndarray:
    size = 2 * np.sqrt(2 / np.pi)
    return times_sigmoid(x, x * fma(F(size * 0.044715), x * x, F(size)))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    t = np.where(np.abs(x) < F(14), np.abs(x), F(14))
    square = t * t
    e = exp(square * F(-0.5))
    e = fma(e * F(-0.5), fma(t, t, -square), e)
    above, below = F(3.99084156e-3), F(1.00034093e-2)
    for c in (3.97992767e-2, 1.80777177e-1, 4.35000986e-1, 0.5):
        above = fma(above, t, F(c))
    for c in (9.97695178e-2, 4.62976545e-1, 1.19233203, 1.66788673, 1):
        below = fma(below, t, F(c))
    with np.errstate(invalid="ignore"):
        g = np.where(x < 0, x, t) * above / below
        return np.where(x < 0, g * e, fma(-g, e, x))


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=-1)
    return times_sigmoid(gate, gate) * up


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, adjacent: bool) -> np.ndarray:
    half = x.shape[-1] // 2
    one, other = (slice(0, None, 2), slice(1, None, 2)) if adjacent else (slice(half), slice(half, None))
    a, b, out = x[..., one], x[..., other], np.empty_like(x)
    out[..., one], out[..., other] = fma(a, cos, -(b * sin)), fma(b, cos, a * sin)
    return out


def attend(
    q: np.ndarray, positions: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, visibility: Visibility
) -> np.ndarray:
    """q [R, Hq, D] at `positions` over k, v [S, H, D] at 0 .. S - 1 -> [R, Hq, D]."""
    out = np.zeros(q.shape, F)
    group = q.shape[1] // k.shape[1]
    for r, position in enumerate(positions):
        for h in range(q.shape[1]):
            query = q[r, h] * F(scale)
            m, total, value = LOWEST, F(0), np.zeros(q.shape[2], F)
            for start in range(0, position + 1, TILE):
                keys = np.arange(start, min(start + TILE, position + 1))
                scores = product(query[:, None], k[keys, h // group].T)
                scores = np.where(visibility.sees(np.array(position), keys), scores, F(-np.inf))
                here = max(LOWEST, scores.max())
                weights = np.zeros(TILE, F)
                weights[: len(keys)] = exp(scores - here)
                both = product(weights[: len(keys), None], v[keys, h // group])
                top = max(m, here)
                old, new = exp(np.array(m - top, F)), exp(np.array(here - top, F))
                total = fma(total, old, lanes_sum(weights) * new)
                value = fma(value, old, both * new)
                m = top
            out[r, h] = 0 if total == 0 else value / total
    return out
