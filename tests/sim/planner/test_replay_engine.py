"""The replay schedules exactly as the engine does: the same plan at every step, the same preemptions, hits and blocks."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from nanokv.engine import Engine
from nanokv.generate import Options
from nanokv.kv.spec import CacheSpec
from nanokv.sampling import SamplingParams
from sim.planner.paging import Paged
from sim.planner.replay import Limits
from sim.planner.step_time import StepTime
from sim.planner.traces import Request
from tests.sim.planner.replay_cases import watched
from tests.support import examples, tiny_model

MODEL = tiny_model(layers=1, heads=2, kv_heads=1, eos=False)
Plan = list[tuple[int, int]]  # (request, tokens)

prompts = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=50)
jobs = st.lists(st.tuples(st.integers(0, 12), prompts, st.integers(1, 25)), min_size=1, max_size=7)  # (step, prompt, output)


def run_engine(engine: Engine, requests: list[tuple[int, list[int], int]]) -> tuple[list[Plan], list[Any], int]:
    """The plan of every step, the generations, and the most blocks in use. A request comes before the step of its number;
    steps in which there is nothing to do pass at once."""
    plans: list[Plan] = []
    runs: list[Any] = []
    schedule = engine._scheduler.schedule

    def recorded() -> Any:
        plan = schedule()
        plans.append([(next(i for i, run in enumerate(runs) if run is each.run), count) for each, count in plan])
        return plan

    engine._scheduler.schedule = recorded  # type: ignore[method-assign]
    now = 0
    while len(runs) < len(requests) or engine.has_work:
        if not engine.has_work:
            now = max(now, requests[len(runs)][0])
        while len(runs) < len(requests) and requests[len(runs)][0] <= now:
            _, prompt, output = requests[len(runs)]
            runs.append(engine.add(prompt, Options(output, SamplingParams(1.0, seed=len(runs))))[0])
        engine.step()
        now += 1
    return plans, runs, engine.stats.peak_blocks


def as_requests(jobs: list[tuple[int, list[int], int]], size: int) -> tuple[Request, ...]:
    """A step lasts a picosecond. Blocks of a prompt are named by all tokens up to their end."""
    nodes: dict[tuple[int, ...], int] = {}
    requests = []
    for step, prompt, output in jobs:
        ends = [*range(size, len(prompt), size), len(prompt)]
        prefix = tuple(nodes.setdefault(tuple(prompt[:end]), len(nodes)) for end in ends)
        requests.append(Request(step * 1e-12, len(prompt), output, prefix))
    return tuple(requests)


def outputs_differ(runs: list[Any], size: int) -> bool:
    """No full block with generated tokens is like another request's: a trace cannot name those."""
    blocks = [
        tuple(run.all_tokens[:end]) for run in runs for end in range(size, len(run.all_tokens), size)
        if end > len(run.prompt_tokens)
    ]  # fmt: skip
    prompts = {tuple(run.prompt_tokens[:end]) for run in runs for end in range(size, len(run.prompt_tokens) + 1, size)}
    return len(set(blocks)) == len(blocks) and not prompts & set(blocks)


@examples(150)
@given(
    jobs.map(lambda each: sorted(each, key=lambda job: job[0])), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 30),
    st.integers(1, 70), st.integers(1, 6), st.booleans(),
)  # fmt: skip
def test_the_engine_and_the_replay_agree_at_every_step(
    jobs: list[tuple[int, list[int], int]], size: int, spare: int, tokens: int, sequences: int, caching: bool
) -> None:
    longest = max(len(prompt) + output for _, prompt, output in jobs)
    blocks = -(-longest // size) + spare
    engine = Engine(MODEL, CacheSpec(block_size=size), num_blocks=blocks + 1, max_batch_tokens=tokens,
                    max_sequences=sequences, prefix_caching=caching)  # fmt: skip
    plans, runs, peak = run_engine(engine, jobs)
    assume(not caching or outputs_differ(runs, size))

    memory = Paged(blocks, size, size if caching else None)
    run = watched(as_requests(jobs, size), memory, Limits(tokens, sequences, longest), time=StepTime(1, 0, 0))
    replayed = [
        [(each.index, count) for each, count in stretch.plan] for stretch in run.stretches for _ in range(stretch.steps)
    ]
    assert replayed == plans
    stats, counts = engine.stats, run.replay.counts
    for name in ("steps", "computed_tokens", "recomputed_tokens", "prompt_tokens", "prefix_hit_tokens", "preemptions",
                 "peak_shared_blocks"):  # fmt: skip
        assert getattr(counts, name) == getattr(stats, name), name
    used = max(int((memory.slots - each.usage.free - each.usage.cached).max()) for each in run.stretches)
    assert used == peak * size
    assert counts.peak_saved_blocks * engine._block_bytes == stats.bytes_saved
    assert memory.pool.stats() == engine.pool.blocks.stats()
