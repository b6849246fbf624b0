"""The engine that a trace is replayed on: a model on GPUs, what is left for K and V, and the ways of giving it out."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from nanokv.errors import CapacityError, ConfigError
from sim.formats import Format
from sim.gpus import GPU
from sim.planner.capacity import need, shard
from sim.planner.kv_memory import Memory
from sim.planner.layers import GROWING
from sim.planner.model import Model
from sim.planner.paging import Paged
from sim.planner.plan import Budget
from sim.planner.replay import Counts, Limits, Replay
from sim.planner.report import size_of
from sim.planner.reservation import RULES, Reserved
from sim.planner.step_time import StepTime, step_time
from sim.planner.timeline import Timeline
from sim.planner.traces import Trace

PAGED = "paged"
POLICIES = (*RULES, PAGED)


@dataclass(frozen=True)
class Server:
    """`kv_bytes` of each of `parts` GPUs are for K and V, of which a token takes `token_bytes`: every layer holds it."""

    model: Model
    gpu: GPU
    parts: int
    form: Format
    kv_bytes: int
    token_bytes: int
    time: StepTime
    limits: Limits

    @property
    def slots(self) -> int:
        """Tokens that fit."""
        return self.kv_bytes // self.token_bytes

    @property
    def machine(self) -> str:
        """4 x h100, or h100."""
        return _machine(self.gpu, self.parts)


@dataclass(frozen=True)
class Policy:
    """A way of giving memory out: `kind` is one of POLICIES; block size and reuse are for paged, the allocator for the rest."""

    kind: str
    block_size: int = 1
    reuse: bool = False
    allocator: str = "buddy"

    @property
    def label(self) -> str:
        """Short, for a table."""
        return f"{PAGED} {self.block_size}{' prefix' if self.reuse else ''}" if self.kind == PAGED else self.kind

    def memory(self, server: Server, trace: Trace) -> Memory:
        """An empty one. CapacityError where not even a block fits."""
        if self.kind != PAGED:
            return Reserved(self.kind, server.slots, server.limits.length, self.allocator)
        blocks = server.kv_bytes // (server.token_bytes * self.block_size)
        if blocks == 0:
            raise CapacityError(f"{size_of(server.kv_bytes)} do not hold one block of {self.block_size} tokens")
        return Paged(blocks, self.block_size, trace.hash_block if self.reuse else None)


@dataclass(frozen=True)
class Outcome:
    """What one policy did with a trace."""

    policy: Policy
    slots: int
    counts: Counts
    timeline: Timeline


def build_server(
    model: Model, gpu: GPU, form: Format, budget: Budget, limits: Limits, parts: int = 1, *,
    kv_bytes: int | None = None, dtype: str | None = None,
) -> Server:  # fmt: skip
    """`kv_bytes` takes the place of what the budget leaves for caches; `dtype` is that of the weights, the model's if None.

    CapacityError where weights and overhead leave nothing, and says by how much; ConfigError for a model whose cache does
    not grow, or whose weights' size is not known. What a request keeps whatever its length is set aside for as many as may
    run.
    """
    part = shard(model.geometry, parts)
    one = need(part, 1, 1, form, 1)
    token_bytes = one.allocated + one.indexer_allocated
    if token_bytes == 0:
        raise ConfigError(f"{model.name} keeps nothing that grows with tokens: there is no KV memory to give out")
    if model.weights is None:
        raise ConfigError(f"{model.name}: the size of the weights is not known ({model.why})")
    left = budget.for_cache if kv_bytes is None else kv_bytes
    if left < 0:
        used = int(budget.memory * budget.utilisation)
        raise CapacityError(
            f"{model.name} does not fit on {_machine(gpu, parts)}: weights of {size_of(budget.weights)} and overhead of "
            f"{size_of(budget.overhead)} a GPU are {size_of(-left)} more than the {size_of(used)} that it may use: take "
            "--tensor-parallel, a larger GPU or a smaller --weights-dtype"
        )
    fixed = limits.sequences * (one.state + one.cross)
    if left - fixed < token_bytes:
        raise CapacityError(
            f"{size_of(left)} for caches, {size_of(fixed)} of it for the fixed state of {limits.sequences} sequences, do not "
            f"hold one token of {size_of(token_bytes)}"
        )
    time = step_time(gpu, model.weights, dtype or model.geometry.dtype, token_bytes, parts)
    return Server(model, gpu, parts, form, left - fixed, token_bytes, time, limits)


def _machine(gpu: GPU, parts: int) -> str:
    return f"{parts} x {gpu.name}" if parts > 1 else gpu.name


def replay_all(
    trace: Trace, server: Server, policies: Sequence[Policy], ended: Callable[[int], object] = lambda count: None, jobs: int = 1
) -> list[Outcome]:
    """Each policy on an empty memory, in `jobs` processes; `ended` is called with the number of requests that have just
    ended, all those of a policy at once where there are several processes."""
    for policy in policies:
        policy.memory(server, trace)  # an error before anything is replayed
    if jobs < 2 or len(policies) < 2:
        return [_replay(trace, server, policy, ended) for policy in policies]
    with ProcessPoolExecutor(min(jobs, len(policies)), get_context("spawn")) as processes:
        tasks = {
            processes.submit(_replay, trace, server, policy): policy for policy in sorted(policies, key=_work, reverse=True)
        }
        for task in as_completed(tasks):
            task.result()
            ended(len(trace.requests))
    found = {policy: task.result() for task, policy in tasks.items()}
    return [found[policy] for policy in policies]


def _replay(trace: Trace, server: Server, policy: Policy, ended: Callable[[int], object] = lambda count: None) -> Outcome:
    memory = policy.memory(server, trace)
    run = Replay(trace.requests, memory, server.time, server.limits, ended)
    return Outcome(policy, memory.slots, run.run(), run.timeline)


def _work(policy: Policy) -> tuple[bool, float]:
    """Grows with the time that a policy takes: what is longest begins first."""
    return policy.reuse, (policy.kind == PAGED) / policy.block_size


def policies(kinds: Sequence[str], block_sizes: Sequence[int], reuse: Sequence[bool], allocator: str) -> list[Policy]:
    """Every combination that means something, in the order of POLICIES."""
    made = [Policy(kind, allocator=allocator) for kind in POLICIES if kind in kinds and kind != PAGED]
    if PAGED in kinds:
        made += [Policy(PAGED, size, with_reuse) for with_reuse in reuse for size in block_sizes]
    return made


def windowed(model: Model) -> bool:
    """Whether some layer would need less than one pool holds for it."""
    return any(layer.kind in GROWING and layer.window is not None for layer in model.geometry.layers)
