"""check(): run a kernel on cases, judge every output, name the fault, shrink the failing case."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanokv.errors import UsageError
from nanokv.oracle.bounds import ARITHMETICS, Arithmetic, default_arithmetic
from nanokv.oracle.case import Call, Case
from nanokv.oracle.diagnose import Diagnosis, diagnose, matches
from nanokv.oracle.faults import fault_named
from nanokv.oracle.interchange import to_numpy
from nanokv.oracle.judge import Verdict, judge
from nanokv.oracle.report import Report
from nanokv.oracle.shrink import shrink
from nanokv.oracle.spec import Spec
from nanokv.oracle.suite import PHASES, suite

Kernel = Callable[[Call], Any]


@dataclass(frozen=True)
class Running:
    """How a kernel is run and judged."""

    kernel: Kernel
    convert: Callable[[np.ndarray], Any] | None = None
    twice: bool = True
    any_dtype: bool = False

    def verdict(self, case: Case) -> Verdict:
        """One case: run (twice, to see whether it repeats itself), compare, and look whether the inputs are as they were."""
        given = case.arrays()
        try:
            first = self._run(case.spec, given)
        except Exception as error:  # whatever somebody's kernel raises is its verdict
            found = Verdict(case.spec)
            found.add("raised", f"it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return found
        bits = first[0].tobytes()  # the second run may write to the same memory
        verdict = judge(case, *first, any_dtype=self.any_dtype)
        original = case.arrays()
        changed = [name for name, array in given.items() if array.tobytes() != original[name].tobytes()]
        if changed:
            verdict.add("inputs", f"it modified its inputs: {', '.join(changed)}")
        if self.twice:
            self._again(case, bits, verdict)
        return verdict

    def _run(self, spec: Spec, given: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        handed = given if self.convert is None else {name: self.convert(array) for name, array in given.items()}
        result = self.kernel(Call(spec, handed))
        if self.convert is not None:  # a copy, such as one on a device, is compared where it is
            for name, array in handed.items():
                back = to_numpy(array)
                if back.tobytes() != given[name].tobytes():
                    given[name][...] = back
        out, lse = result if isinstance(result, tuple) else (result, None)
        return to_numpy(out), None if lse is None else to_numpy(lse)

    def _again(self, case: Case, bits: bytes, verdict: Verdict) -> None:
        try:
            second, _ = self._run(case.spec, case.arrays())
        except Exception as error:  # as above
            verdict.add("raised", f"it raised {type(error).__name__} the second time: {' '.join(str(error).split())[:200]}")
            return
        if second.tobytes() != bits:
            verdict.add("repeats", "it is not deterministic: run twice on the same inputs, it gave different bits")


def check(
    kernel: Kernel,
    layout: str = "contiguous",
    dtype: str = "float32",
    *,
    kv_dtype: str | None = None,
    features: Iterable[str] = (),
    phases: Iterable[str] = PHASES,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    block_size: int | None = None,
    scales: str = "head",
    arithmetic: Arithmetic | str | None = None,
    cases: Iterable[Spec] | None = None,
    convert: Callable[[np.ndarray], Any] | None = None,
    twice: bool = True,
    any_dtype: bool = False,
    smallest: bool = True,
) -> Report:
    """Judges `kernel(call) -> out`, or `-> (out, lse)`, on the fixed suite, or on `cases`.

    `layout`, `dtype`, `kv_dtype`, `scales`: what the kernel takes; `features`, `phases` and the shapes: what it can do (see
    suite()). `arithmetic`: what it computes in: None for the dtype's usual, "eager" where scores are stored in `dtype`, or an
    Arithmetic. `convert` turns each array into the kernel's kind, such as nanokv.oracle.to_torch. `any_dtype` takes outputs in
    another format. Every case runs twice unless `twice` is False; a failing one is shrunk unless `smallest` is. Raises
    UsageError for arguments out of range; whatever the kernel does wrong is in the report.
    """
    if cases is None:
        specs = suite(layout, dtype, kv_dtype, features, phases, num_heads, num_kv_heads, head_dim or 64, block_size, scales)
    else:
        specs = list(cases)
    if not specs:
        raise UsageError("there is no case to check: give some phases, or some cases")
    if isinstance(arithmetic, str) and arithmetic not in ARITHMETICS:
        raise UsageError(f"unknown arithmetic {arithmetic!r}: choose fused or eager, or give an Arithmetic")
    running = Running(kernel, convert, twice, any_dtype)
    judged = []
    for spec in specs:
        case = Case(spec, default_arithmetic(spec.dtype, arithmetic) if isinstance(arithmetic, str) else arithmetic)
        judged.append((case, running.verdict(case)))
    given = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    keep = frozenset(name for name, value in given.items() if value is not None)
    return conclude(judged, running if smallest else None, keep)


def conclude(
    judged: Sequence[tuple[Case, Verdict]], running: Running | None = None, keep: frozenset[str] = frozenset()
) -> Report:
    """The report over judged cases; with something to run, the smallest failing case is shrunk further."""
    diagnosis = diagnose(list(judged))
    failing = [(case, verdict) for case, verdict in judged if not verdict.passed]
    if not failing:
        return Report([verdict for _, verdict in judged])
    case, smallest = min(failing, key=lambda each: (each[1].kind in ("inputs", "repeats"), each[0].spec.size))
    if running is not None:
        smallest = _shrunk(case, smallest, running, diagnosis, keep)
    return Report([verdict for _, verdict in judged], diagnosis, smallest)


def _shrunk(case: Case, verdict: Verdict, running: Running, diagnosis: Diagnosis | None, keep: frozenset[str]) -> Verdict:
    named = fault_named(diagnosis.names[0]) if diagnosis else None
    if named is not None and (verdict.out is None or not matches(named, case, verdict.out)):
        named = None  # it shows elsewhere
    found = {case.spec: verdict}
    once = replace(running, twice=running.twice and verdict.kind == "repeats")

    def fails(spec: Spec) -> bool:
        try:
            smaller = Case(spec, case.arithmetic)
        except UsageError:
            return False
        again = once.verdict(smaller)
        if again.kind != verdict.kind:
            return False
        if named is not None and (again.out is None or not matches(named, smaller, again.out)):
            return False
        found[spec] = again
        return True

    return found[shrink(case.spec, fails, keep)]
