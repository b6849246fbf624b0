"""What the tests of the replay share: small requests whose prefixes meet, memories, and a run that is watched."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from sim.planner.kv_memory import Memory
from sim.planner.paging import Paged
from sim.planner.replay import Limits, Replay, Stretch
from sim.planner.reservation import ALLOCATORS, RULES, Reserved
from sim.planner.step_time import StepTime
from sim.planner.traces import Request

LONGEST = 64
NAMED = 4  # tokens that a node of a prefix names
TIME = StepTime(7, 3, 5)  # picoseconds: small numbers make steps end beside arrivals


@st.composite
def request_lists(draw: st.DrawFn, most: int = 10) -> tuple[Request, ...]:
    """Requests in order of arrival; a node of a prefix is the path to it, so that equal nodes have equal pasts."""
    arrivals = sorted(draw(st.lists(st.integers(0, 900), min_size=1, max_size=most)))
    nodes: dict[tuple[int, ...], int] = {}
    requests = []
    for arrival in arrivals:
        prompt = draw(st.integers(1, 40))
        ids = draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=-(-prompt // NAMED), max_size=-(-prompt // NAMED)))
        if prompt % NAMED:
            ids[-1] = 10 + ids[-1] * NAMED + prompt % NAMED  # a block that is not full has another id than a full one
        prefix = tuple(nodes.setdefault(tuple(ids[: at + 1]), len(nodes)) for at in range(len(ids)))
        requests.append(Request(arrival * 1e-12, prompt, draw(st.integers(0, 24)), prefix))
    return tuple(requests)


def limits(tokens: int = 1000, sequences: int = 1000) -> Limits:
    return Limits(tokens, sequences, LONGEST)


limit_values = st.builds(limits, st.integers(1, 60), st.integers(1, 6))
block_sizes = st.sampled_from([1, 2, 3, 4, 8, 16])


@st.composite
def paged(draw: st.DrawFn) -> Callable[[], Paged]:
    """Pools from one that holds the longest request only to ample ones; each call makes an empty one."""
    size = draw(block_sizes)
    blocks = -(-LONGEST // size) + draw(st.sampled_from([0, 1, 5, 30, 1000]))
    named = draw(st.sampled_from([None, NAMED]))
    return lambda: Paged(blocks, size, named)


@st.composite
def reserved(draw: st.DrawFn) -> Callable[[], Reserved]:
    rule, allocator = draw(st.sampled_from(sorted(RULES))), draw(st.sampled_from(sorted(ALLOCATORS)))
    slots = LONGEST + draw(st.sampled_from([0, 1, 40, 64, 200, 2000]))
    return lambda: Reserved(rule, slots, LONGEST, allocator)


@dataclass
class Watched:
    """A run and every stretch of it."""

    replay: Replay
    stretches: list[Stretch] = field(default_factory=list)


class OneByOne(Replay):
    """Takes no steps together."""

    def _decode_together(self) -> bool:
        return False


def watched(
    requests: tuple[Request, ...], memory: Memory, limit: Limits, kind: type[Replay] = Replay, time: StepTime = TIME
) -> Watched:
    """Runs to the end."""
    seen: list[Stretch] = []
    replay = kind(requests, memory, time, limit, watch=seen.append)
    replay.run()
    return Watched(replay, seen)
