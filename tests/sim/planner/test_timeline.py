"""A timeline by hand: averages over busy time, peaks of every step, and a series."""

import numpy as np
import pytest

from sim.planner.kv_memory import USES, Usage
from sim.planner.timeline import Timeline


def usage(tokens: list[int]) -> Usage:
    """`tokens` of 10 slots at the end of each step, the others free."""
    held = np.array(tokens)
    return Usage(**{name: np.zeros_like(held) for name in USES[1:-1]}, tokens=held, free=10 - held)


def example() -> Timeline:
    """Two steps of 10 ps, a rest of 20, one step of 20 after three preemptions."""
    made = Timeline()
    made.add(0, np.array([10, 10]), usage([4, 8]), 2, 1, 0)
    made.add(20, np.array([20]), usage([0]), 0, 0, 0)
    made.add(40, np.array([20]), usage([6]), 1, 5, 3)
    return made


def test_averages_are_over_busy_time() -> None:
    means = example().means()
    assert (means["tokens"], means["free"]) == (6.0, 4.0)  # (4 * 10 + 8 * 10 + 6 * 20) / 40
    assert (means["running"], means["waiting"]) == (1.5, 3.0)
    assert (example().busy, example().end) == (40, 60)


def test_peaks_are_of_every_step() -> None:
    made = example()
    assert (made.peak_tokens, made.peak_running, made.peak_waiting) == (8, 2, 5)


def test_a_series() -> None:
    series = example().series(3)
    assert series.seconds == pytest.approx([20e-12, 40e-12, 60e-12])
    assert series.values["tokens"] == pytest.approx([6, 0, 6])
    assert series.values["waiting"] == pytest.approx([1, 0, 5])
    assert series.values["preemptions"].tolist() == [0, 0, 3]


def test_nothing_at_all() -> None:
    made = Timeline()
    assert (made.busy, made.end, set(made.means().values())) == (0, 0, {0.0})
    assert made.series(2).values["tokens"].tolist() == [0.0, 0.0]
