"""What a replay's memory and queue held over time, kept as integrals: averages over busy time, and a series of intervals."""

from dataclasses import dataclass

import numpy as np

from sim.planner.kv_memory import USES, Usage
from sim.planner.step_time import PICOSECONDS

AVERAGED = (*USES, "running", "waiting")


@dataclass(frozen=True)
class Series:
    """Intervals of equal length: seconds [n] at which they end; values by name, each [n]: averages of AVERAGED, and the
    preemptions so far."""

    seconds: np.ndarray
    values: dict[str, np.ndarray]


class Timeline:
    """Stretches of steps, and rests between them, in order of time and without gaps."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # picoseconds, as all times here
        self._lengths: list[int] = []
        self._integrals: list[list[float]] = []  # over each stretch, in the order of AVERAGED
        self._preemptions: list[int] = []  # before each stretch and in its first step
        self._busy: list[bool] = []
        self.peak_running = self.peak_waiting = self.peak_tokens = 0

    def add(self, start: int, durations: np.ndarray, usage: Usage, running: int, waiting: int, preemptions: int) -> None:
        """n steps from `start` on: durations [n], `preemptions` so far. Nothing running is a rest."""
        length = int(durations.sum())
        weights = durations.astype(np.float64)
        self._starts.append(start)
        self._lengths.append(length)
        uses = (float(weights @ getattr(usage, name)) for name in USES)
        self._integrals.append([*uses, float(running * length), float(waiting * length)])
        self._preemptions.append(preemptions)
        self._busy.append(running > 0)
        self.peak_running = max(self.peak_running, running)
        self.peak_waiting = max(self.peak_waiting, waiting)
        self.peak_tokens = max(self.peak_tokens, int(usage.tokens.max()))

    @property
    def busy(self) -> int:
        """Time in which something ran."""
        return sum(length for length, busy in zip(self._lengths, self._busy, strict=True) if busy)

    @property
    def end(self) -> int:
        """When the last stretch ended."""
        return self._starts[-1] + self._lengths[-1] if self._starts else 0

    def means(self) -> dict[str, float]:
        """Each value's average over busy time; all 0 where nothing ran."""
        if not self.busy:
            return dict.fromkeys(AVERAGED, 0.0)
        totals = np.array(self._integrals)[np.array(self._busy)].sum(axis=0) / self.busy
        return dict(zip(AVERAGED, totals.tolist(), strict=True))

    def series(self, count: int) -> Series:
        """`count` equal intervals from the first stretch's beginning to the last one's end; within a stretch values are taken
        as even. All 0 where there is no time between them."""
        if not self.end:
            return Series(np.zeros(count), {name: np.zeros(count) for name in (*AVERAGED, "preemptions")})
        edges = np.linspace(self._starts[0], self.end, count + 1)
        times = np.array([*self._starts, self.end], np.float64)
        values = {}
        for name, amounts in zip(AVERAGED, np.array(self._integrals).T, strict=True):
            sums = np.concatenate([[0.0], amounts.cumsum()])
            values[name] = np.diff(np.interp(edges, times, sums)) / np.diff(edges)
        latest = np.searchsorted(times[:-1], edges[1:]) - 1  # the stretch in which an interval ends
        values["preemptions"] = np.array(self._preemptions)[latest]
        return Series(edges[1:] / PICOSECONDS, values)
