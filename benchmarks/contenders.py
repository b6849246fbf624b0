"""Contenders of a benchmark in processes of their own, which take turns.

Two pools of threads in one process disturb each other: PyTorch takes twice as long a token once numba's threads exist, and
BLAS's threads and numba's keep each other off the cores. So each contender has a process, built once, that waits for its turn.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

Calls = Mapping[str, Callable[[], Any]]


def _serve(pipe: Connection, build: Callable[..., Calls], arguments: Sequence[Any]) -> None:
    calls = build(*arguments)
    pipe.send(None)
    while (name := pipe.recv()) is not None:
        begin = time.perf_counter()
        found = calls[name]()
        pipe.send((time.perf_counter() - begin, found if isinstance(found, float) else None))


class Contender:
    """A process in which `build(*arguments)` has made some calls, by name. `build` is a function of a module."""

    def __init__(self, build: Callable[..., Calls], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def seconds(self, name: str) -> float:
        """What one call took; its own result, if that is a float."""
        self._pipe.send(name)
        taken, own = self._pipe.recv()
        return float(taken if own is None else own)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


@contextmanager
def contenders(**builds: Sequence[Any]) -> Iterator[dict[str, Contender]]:
    """Contenders by name, each from (build, *arguments); their processes end with the block."""
    made = {name: Contender(*each) for name, each in builds.items()}
    try:
        yield made
    finally:
        for each in made.values():
            each.close()


def in_turns(made: Mapping[str, Contender], call: str, repeat: int) -> dict[str, float]:
    """Seconds of a call of each contender: the median of `repeat` rounds, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in made}
    for round_ in range(repeat + 1):
        for name, each in made.items():
            taken = each.seconds(call)
            if round_:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}
