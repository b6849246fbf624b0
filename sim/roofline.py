"""From counts to time: a lower bound, and an estimate fitted on measured kernels.

The bound is the roofline's (Williams, Waterman and Patterson 2009): no kernel is faster than its bytes over the peak
bandwidth, nor than its operations over the peak rate. Nothing is said about how near a kernel comes.

The estimate is t0 + bytes / (efficiency x bandwidth) for decoding, with t0 and the efficiency fitted on public
measurements. It is an estimate of one kernel library's latency in the range of the fit, never a measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sim.gpus import GPU
from sim.schedules.base import row_bytes
from sim.shape import Shape


@dataclass(frozen=True)
class Bound:
    """`seconds` at least; `kind` is the resource that sets it, "memory" or "compute"; `intensity` in operations a byte."""

    seconds: float
    kind: str
    intensity: float


def lower_bound(nbytes: int, flops: int, gpu: GPU, dtype: str) -> Bound:
    """max(bytes / bandwidth, operations / rate of `dtype`); UsageError where the GPU has no such rate."""
    memory, compute = nbytes / gpu.bandwidth, flops / gpu.rate(dtype)
    return Bound(max(memory, compute), "compute" if compute > memory else "memory", flops / nbytes if nbytes else 0.0)


def minimum_bytes(shape: Shape, *, per_query_head: bool = False) -> int:
    """What HBM must move whatever the algorithm: Q, and the visible keys and values, read once, O written once.

    `per_query_head` counts K and V once for each query head, as a kernel that knows nothing of groups would.
    """
    first, last = shape.key_range((0, shape.rows))
    readers = shape.all_heads if per_query_head else shape.all_kv_heads
    kv = 2 * readers * (last - first) * row_bytes(shape, shape.kv)
    return kv + 2 * shape.all_heads * shape.rows * row_bytes(shape, shape.dtype)


def minimum_flops(shape: Shape) -> int:
    """What must be multiplied: two products of D terms for each pair of a query and a key that it may see."""
    return 4 * shape.all_heads * shape.visible_pairs() * shape.head_dim


@dataclass(frozen=True)
class Estimate:
    """t0 + bytes / (efficiency x bandwidth): t0 in seconds, and the median relative error on rows held out of the fit."""

    t0: float
    efficiency: float
    held_out_error: float = float("nan")

    def seconds(self, nbytes: int, gpu: GPU) -> float:
        return self.t0 + nbytes / (self.efficiency * gpu.bandwidth)


ESTIMATE_FROM = 100_000_000  # bytes; below, launches and caches rule

# Decode attention of vLLM's kernels, bfloat16, head_dim 128, as AIConfigurator publishes it (Apache-2.0): fitted on a random
# half (seed 0) of the rows above ESTIMATE_FROM, the error taken on the other half. benchmarks/simulator_figures.py refits.
ESTIMATES: Mapping[str, Estimate] = {
    "a100-80": Estimate(31.5e-6, 0.763, 0.078),
    "h100": Estimate(25.0e-6, 0.907, 0.120),
    "l40s": Estimate(16.3e-6, 0.810, 0.047),
}


def estimate(shape: Shape, gpu: GPU) -> float | None:
    """Seconds of a decode kernel that works by group; None where nothing was fitted: another GPU, prefill, too few bytes, a
    head_dim other than 128, or K and V that are not stored in 16 bits."""
    fitted, nbytes = ESTIMATES.get(gpu.name), minimum_bytes(shape)
    alike = shape.rows == 1 and shape.head_dim == 128 and shape.kv.bits == shape.dtype.bits == 16
    return fitted.seconds(nbytes, gpu) if fitted and alike and nbytes >= ESTIMATE_FROM else None


def fit_estimate(nbytes: np.ndarray, seconds: np.ndarray, bandwidth: float, seed: int = 0) -> Estimate:
    """Least squares of the relative error on a random half of the rows; the median error on the other half."""
    order = np.random.default_rng(seed).permutation(len(nbytes))
    train, test = order[: len(order) // 2], order[len(order) // 2 :]
    terms = np.stack([np.ones(len(train)), nbytes[train]], axis=1) / seconds[train, None]
    (t0, per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(train)), rcond=None)
    error = np.median(np.abs((t0 + per_byte * nbytes[test]) / seconds[test] - 1))
    return Estimate(float(t0), float(1 / (per_byte * bandwidth)), float(error))
