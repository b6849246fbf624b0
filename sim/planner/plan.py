"""A model on GPUs: what is left for the caches, and what fits into it.

The rule is vLLM's: of each GPU's memory the engine takes a share (`utilisation`, its gpu_memory_utilization), and what the
weights and the overhead leave of that share is for K and V.
"""

from dataclasses import dataclass

from nanokv.errors import UsageError
from sim.formats import Format
from sim.planner.capacity import Need, max_requests, max_tokens, need, pool_tokens, shard
from sim.planner.layers import Geometry

# Llama-3.1-8B on an RTX 4090 at 0.9: vLLM's log has 2,588 blocks of 16 tokens, 41,408. 0.9 of the card's 24,564 MiB less the
# weights would hold 54,328: 1.69 GB of what CUDA keeps for itself, activations and graphs. Mostly constant; --overhead sets it.
OVERHEAD = 1_690_000_000
UTILISATION = 0.9  # vLLM's default


@dataclass(frozen=True)
class Budget:
    """Bytes of one GPU: its memory, the share that the engine takes, what the weights and the overhead take of it."""

    memory: int
    utilisation: float
    weights: int
    overhead: int

    @property
    def for_cache(self) -> int:
        """What is left for the caches; negative where the weights do not fit."""
        return int(self.memory * self.utilisation) - self.weights - self.overhead


@dataclass(frozen=True)
class Fit:
    """What a budget holds, counted in one way: `spare` bytes beside what was asked for, negative where it does not fit.

    The limits are those of memory alone; None is no limit (a model that stops growing, or that keeps nothing).
    """

    spare: int
    max_tokens: int | None
    max_requests: int | None

    @property
    def fits(self) -> bool:
        return self.spare >= 0


@dataclass(frozen=True)
class Question:
    """`batch` requests of `context` tokens, K and V in `form`, on `parts` tensor-parallel GPUs."""

    context: int
    batch: int
    form: Format
    block_size: int = 16
    parts: int = 1


@dataclass(frozen=True)
class Plan:
    """The answer. `per_gpu`, the fits and `pool_tokens` are of one GPU; the last four are None where no bytes were named."""

    asked: Question
    needed: Need
    per_gpu: Need
    available: int | None = None
    as_needed: Fit | None = None
    one_pool: Fit | None = None
    pool_tokens: int | None = None


def split_budget(memory: int, utilisation: float, weights: int, overhead: int, parts: int) -> Budget:
    """The budget of one GPU where the weights are split evenly over `parts`.

    Even is an approximation: norms, and key-value projections with fewer heads than GPUs, are on every GPU; they are below
    a hundredth of a model.
    """
    if not 0 < utilisation <= 1:
        raise UsageError(f"utilisation {utilisation} is not above 0 and at most 1")
    return Budget(memory, utilisation, -(-weights // parts), overhead)


def plan(geometry: Geometry, asked: Question, available: int | None = None) -> Plan:
    """What the caches need in all and on each GPU, and what `available` bytes a GPU hold."""
    part = shard(geometry, asked.parts)
    needed, per_gpu = (need(each, asked.context, asked.batch, asked.form, asked.block_size) for each in (geometry, part))
    if available is None:
        return Plan(asked, needed, per_gpu)
    return Plan(
        asked,
        needed,
        per_gpu,
        available,
        _fit(part, asked, available, per_gpu.total, one_pool=False),
        _fit(part, asked, available, per_gpu.total_allocated, one_pool=True),
        pool_tokens(part, available, asked.form, asked.block_size),
    )


def _fit(part: Geometry, asked: Question, available: int, size: int, one_pool: bool) -> Fit:
    return Fit(
        available - size,
        max_tokens(part, available, asked.batch, asked.form, asked.block_size, one_pool=one_pool),
        max_requests(part, available, asked.context, asked.form, asked.block_size, one_pool=one_pool),
    )
