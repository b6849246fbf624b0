"""How long a step takes: a lower bound, as a roofline gives it, in whole picoseconds.

A step reads the weights and the K and V of every token it attends to, and multiplies every new token with every weight:

    max((weights + cached tokens x bytes a token) / bandwidth, new tokens x 2 x parameters / rate)

on each of the GPUs that share the model. Attention's own operations, activations, launches and the wires between GPUs are
not counted, and of a mixture of experts all experts are. Whole numbers make many steps at once equal to one by one.
"""

from dataclasses import dataclass

import numpy as np

from sim.gpus import GPU
from sim.planner.kv_formats import kv_format
from sim.planner.weights_size import Weights

PICOSECONDS = 10**12


@dataclass(frozen=True)
class StepTime:
    """Picoseconds: to read the weights, to read a token's K and V, to compute a token."""

    weights: int
    cached_token: int
    new_token: int

    def step(self, new: int, cached: int) -> int:
        """One step of `new` tokens, after which `cached` are attended to."""
        return max(self.weights + self.cached_token * cached, self.new_token * new)

    def steps(self, new: int, cached: np.ndarray) -> np.ndarray:
        """The same for many steps of `new` tokens: cached [n] -> [n] int64."""
        return np.maximum(self.weights + self.cached_token * cached, self.new_token * new)


def step_time(gpu: GPU, weights: Weights, dtype: str, token_bytes: int, parts: int = 1) -> StepTime:
    """On `parts` GPUs, each of which keeps `token_bytes` of a token's K and V.

    The rate is the GPU's for `dtype`, or for float16 where it has none (packed weights are unpacked to multiply). Where
    the parameters are not known they follow from the weights' bytes. UsageError where the GPU has neither rate.
    """
    form = kv_format(dtype)
    parameters = weights.parameters or weights.total * 8 // form.bits
    rate = gpu.rates[form.name] if form.name in gpu.rates else gpu.rate("float16")
    return StepTime(
        round(weights.total * PICOSECONDS / parts / gpu.bandwidth),
        round(token_bytes * PICOSECONDS / gpu.bandwidth),
        round(2 * parameters * PICOSECONDS / parts / rate),
    )
