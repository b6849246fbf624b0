"""Which fault of the catalogue gives the very numbers that a kernel gave."""

from dataclasses import dataclass, replace

import numpy as np

from nanokv.oracle.bounds import Arithmetic, default_arithmetic
from nanokv.oracle.case import Case
from nanokv.oracle.faults import FAULTS, Fault, moved
from nanokv.oracle.formats import format_of
from nanokv.oracle.judge import Verdict, exceeds, ranges
from nanokv.oracle.reference import solve

NEAR = 2.0  # bounds of the faulty result within which an output is taken for it
PLAIN = 4.0  # a case that passed contradicts a fault that would have moved it by more bounds than this


@dataclass(frozen=True)
class Diagnosis:
    """`names` of the faults that explain every failing case and contradict no passing one; more than one where the cases
    cannot tell them apart. `text` says it in words."""

    names: tuple[str, ...]
    text: str


def matches(fault: Fault, case: Case, out: np.ndarray) -> bool | None:
    """Whether `out` [R, Hq, D] is what the faulty kernel gives, and not what a right one gives. None where the case cannot
    tell: the fault makes numbers so large that rounding alone may change the answer everywhere."""
    if not fault.applies(case.spec):
        return False
    with np.errstate(all="ignore"):
        predicted = fault.run(case)
        right = case.expected
        finite = np.isfinite(predicted)
        if (np.isfinite(out) != finite).any():
            return False
        if exceeds(predicted, right.out, right.bound).max(initial=0.0) <= 1:
            return False
        bound = np.maximum(_bound(fault, case), right.bound)
        bound += format_of(case.spec.dtype).roundoff * np.where(finite, np.abs(predicted), 0)
    if not finite.any():
        return True
    if exceeds(predicted[finite], right.out[finite], 2 * NEAR * bound[finite]).max() <= 1:
        return None
    return bool(exceeds(out[finite], predicted[finite], NEAR * bound[finite]).max(initial=0.0) <= 1)


def _bound(fault: Fault, case: Case) -> np.ndarray:
    """What a kernel that has the fault may differ by from the fault in float64."""
    spec = case.spec
    wrong = [fault.apply(case, i, each) for i, each in enumerate(case.problems)]
    return np.concatenate([solve(each, spec.dtype, spec.stored, case.arithmetic).bound for each in wrong])


def _explains(fault: Fault, outs: list[tuple[Case, np.ndarray]]) -> bool:
    """No failing case speaks against the fault, and some speaks for it."""
    answers = []
    for case, out in outs:
        answers.append(matches(fault, case, out))
        if answers[-1] is False:
            return False
    return any(answers)


def diagnose(judged: list[tuple[Case, Verdict]]) -> Diagnosis | None:
    """Over all cases of a run: None where nothing is wrong, or where no fault explains it."""
    failing = [(case, verdict) for case, verdict in judged if verdict.kind in ("numbers", "nan") and verdict.out is not None]
    passing = [case for case, verdict in judged if verdict.passed]
    if not failing:
        return None
    failing.sort(key=lambda each: each[0].spec.size)
    outs = [(case, verdict.out) for case, verdict in failing if verdict.out is not None]
    found = [fault for fault in FAULTS if _explains(fault, outs)]
    agreed = [fault for fault in found if not any(fault.applies(c.spec) and moved(fault, c) > PLAIN for c in passing)]
    if agreed or found:
        return _named(agreed or found, failing, everywhere=bool(agreed))
    return _rounding(failing) or _factor(outs) or _partly(outs)


def _named(faults: list[Fault], failing: list[tuple[Case, Verdict]], everywhere: bool) -> Diagnosis:
    most = max(case.spec.num_heads for case, _ in failing)
    heads = sorted({head for case, verdict in failing if case.spec.num_heads == most for head in verdict.heads})
    what = " or when ".join(fault.text for fault in faults)
    only = "" if everywhere else " (in the failing cases alone: others that passed would show it too)"
    return Diagnosis(
        tuple(fault.name for fault in faults), f"heads {ranges(heads)} of {most} equal what you get when {what}{only}"
    )


def _rounding(failing: list[tuple[Case, Verdict]]) -> Diagnosis | None:
    """Errors that a coarser arithmetic would explain: half-precision scores, or half-precision sums."""
    for name, text, coarser in (
        ("half_precision_scores", "scores rounded to half precision before the softmax", _eager),
        ("half_precision_sums", "sums accumulated in half precision", _half_sums),
    ):
        told = [_within(case, verdict, coarser(case)) for case, verdict in failing]
        if False not in told and told.count(True) * 2 >= len(told):
            return Diagnosis((name,), f"the errors are as large as {text} would make them, and no larger")
    return None


def _half(case: Case) -> str:
    return "bfloat16" if case.spec.dtype == "bfloat16" else "float16"


def _eager(case: Case) -> Arithmetic:
    return replace(case.arithmetic, scores=_half(case), query=_half(case))


def _half_sums(case: Case) -> Arithmetic:
    return replace(default_arithmetic(case.spec.dtype), accumulate=_half(case))


def _within(case: Case, verdict: Verdict, arithmetic: Arithmetic) -> bool | None:
    """Whether the errors are inside the bound of a coarser arithmetic; None where that is so wide that it tells nothing."""
    if verdict.out is None or not np.isfinite(verdict.out).all():
        return False
    bound = case.expected_with(arithmetic).bound
    if exceeds(verdict.out, case.expected.out, bound).max(initial=0.0) > 1:
        return False
    return True if np.median(bound) < np.abs(case.expected.out).max(initial=0.0) else None


def _factor(outs: list[tuple[Case, np.ndarray]]) -> Diagnosis | None:
    """Every row the exact one times a number of its own: the weights are right but for their sum."""
    factors = []
    for case, out in outs:
        exact, bound = case.expected.out, case.expected.bound
        if not np.isfinite(out).all():
            return None
        size = (exact**2).sum(axis=-1, keepdims=True)
        factor = (out * exact).sum(axis=-1, keepdims=True) / np.where(size == 0, 1, size)
        if exceeds(out, factor * exact, NEAR * bound).max(initial=0.0) > 1:
            return None
        factors += factor[size > 0].tolist()
    span = f"between {min(factors):.3g} and {max(factors):.3g}"
    text = f"every row is the exact one times a number ({span}): the softmax's sum is off, as half-precision sums make it"
    return Diagnosis(("half_precision_sums",), text)


def _partly(outs: list[tuple[Case, np.ndarray]]) -> Diagnosis | None:
    """The fault that explains most of the failing cases, said as such."""
    counts = [(sum(matches(fault, case, out) is True for case, out in outs), fault) for fault in FAULTS]
    most, fault = max(counts, key=lambda each: each[0])
    if most * 2 <= len(outs):
        return None
    return Diagnosis(
        (fault.name,), f"{most} of {len(outs)} failing cases equal what you get when {fault.text}; the others do not"
    )
