"""One output against what it should be: within its bounds or not, and where not."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from nanokv.oracle.case import Case
from nanokv.oracle.formats import dtype_of
from nanokv.oracle.layouts import output_shape, unpack
from nanokv.oracle.spec import Spec

NOT_REAL = "cOSUmM"  # NumPy's kinds: complex, objects, strings, times


@dataclass
class Verdict:
    """`faults` say in words what is wrong, none of them if the case passed. `excess` is the largest error over its bound,
    infinite where a number is missing. `wrong` marks the rows' elements that are out of bounds [R, Hq, D]; `out` is what the
    kernel gave, in float64."""

    spec: Spec
    faults: list[str] = field(default_factory=list)
    excess: float = 0.0
    wrong: np.ndarray | None = None
    out: np.ndarray | None = None
    kind: str = "passed"  # passed, numbers, nan, shape, dtype, raised, inputs, repeats, missing

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def heads(self) -> list[int]:
        """Query heads with a wrong element."""
        return [] if self.wrong is None else np.flatnonzero(self.wrong.any(axis=(0, 2))).tolist()

    def __str__(self) -> str:
        return "; ".join(self.faults) or "passed"

    def add(self, kind: str, text: str) -> None:
        self.faults.append(text)
        self.kind = kind if self.kind == "passed" else self.kind


def judge(case: Case, out: np.ndarray, lse: np.ndarray | None = None, any_dtype: bool = False) -> Verdict:
    """`out` in the layout of the case, and the natural log-sum-exp where the kernel gives one. `any_dtype` takes an output in
    another format than the case's."""
    verdict = Verdict(case.spec)
    shape = output_shape(case.spec)
    if out.shape != shape:
        verdict.add("shape", f"the output's shape is {list(out.shape)}, not {list(shape)}")
        return verdict
    if out.dtype.kind in NOT_REAL:
        verdict.add("dtype", f"the output's dtype is {out.dtype}, which holds no real numbers")
        return verdict
    if out.dtype != dtype_of(case.spec.dtype) and not any_dtype:
        verdict.add("dtype", f"the output's dtype is {out.dtype}, not {case.spec.dtype}")
    expected = case.expected
    verdict.out = unpack(case.spec, out).astype(np.float64)
    _compare(case, verdict, verdict.out, expected.out, expected.bound)
    if lse is not None:
        _judge_lse(case, verdict, lse)
    return verdict


def exceeds(out: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """|out - exact| in bounds; infinite for NaN; 0 where both are the same infinity, or where the bound is infinite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(out == exact, 0.0, np.abs(out - exact))
        ratio = np.where(error == 0, 0.0, error / bound)
    return np.where(np.isnan(ratio), np.inf, ratio)


def _compare(case: Case, verdict: Verdict, out: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> None:
    ratio = exceeds(out, exact, bound)
    verdict.excess = float(ratio.max(initial=0.0))
    verdict.wrong = ratio > 1
    if not verdict.wrong.any():
        return
    share = f"{int(verdict.wrong.sum())} of {ratio.size} numbers"
    row, head, channel = (int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    sequence, token = case.row_of(row)
    position = int(case.problems[sequence].positions[token])
    at = f"sequence {sequence}, query {token} (position {position}), head {head}, channel {channel}"
    right = f"exact {exact[row, head, channel]:.6g}"
    if np.isfinite(out[row, head, channel]):
        found = f"{out[row, head, channel]:.6g}, {right}, {_times(ratio.max(), bound[row, head, channel])}"
        verdict.add("numbers", f"{share} are out of bounds; worst at {at}: {found}")
    else:
        bad = int((~np.isfinite(out)).sum())
        verdict.add("nan", f"{bad} of {ratio.size} numbers are NaN or infinite, first at {at}; {right}")


def _times(excess: float, bound: float) -> str:
    return f"{excess:.3g} times the bound {bound:.2g}" if bound > 1e-30 else "where nothing may differ"


def _judge_lse(case: Case, verdict: Verdict, lse: np.ndarray) -> None:
    shape = output_shape(case.spec)[:-1]
    if lse.shape != shape:
        verdict.add("shape", f"the log-sum-exp's shape is {list(lse.shape)}, not {list(shape)}")
        return
    if lse.dtype.kind in NOT_REAL:
        verdict.add("dtype", f"the log-sum-exp's dtype is {lse.dtype}, which holds no real numbers")
        return
    found, expected = unpack(case.spec, lse[..., None])[..., 0].astype(np.float64), case.expected
    ratio = exceeds(found, expected.lse, expected.lse_bound)
    if (ratio > 1).any():
        row, head = (int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
        base2 = exceeds(found * np.log(2), expected.lse, expected.lse_bound).max() <= 1
        hint = ": it is the logarithm to base 2, multiply it by log 2" if base2 else ""
        sequence, token = case.row_of(row)
        verdict.add("numbers", f"log-sum-exp {found[row, head]:.6g} at sequence {sequence}, query {token}, head {head}, "
                    f"exact {expected.lse[row, head]:.6g}{hint}")  # fmt: skip


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0..2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}..{b}" for a, b in parts)
