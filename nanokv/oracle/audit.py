"""audit(): which faults would a test with this tolerance let through?"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nanokv.errors import UsageError
from nanokv.oracle.case import Case
from nanokv.oracle.faults import FAULTS
from nanokv.oracle.formats import rounded
from nanokv.oracle.judge import exceeds
from nanokv.oracle.spec import Spec
from nanokv.oracle.suite import suite
from nanokv.oracle.values import Values

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Accepts = Callable[[np.ndarray, np.ndarray], bool]


@dataclass(frozen=True)
class Audit:
    """Names of faults: `let_through` every given case, though they change some number by more than its bound; `caught` in
    some; `unseen` on these inputs, where they change nothing. `garbage` of it that passes too. `refused`: the tolerance is
    below the bound somewhere, so that right kernels may fail."""

    test: str
    let_through: tuple[str, ...]
    caught: tuple[str, ...]
    unseen: tuple[str, ...]
    garbage: tuple[str, ...]
    refused: bool

    def __str__(self) -> str:
        total = len(self.let_through) + len(self.caught) + len(self.unseen)
        lines = [f"{self.test}: {len(self.caught)} of {total} faults caught"]
        for what, names in (("let through", self.let_through), ("invisible on these inputs", self.unseen),
                            ("accepted as well", self.garbage)):  # fmt: skip
            if names:
                lines.append(f"  {what} ({len(names)}): {', '.join(names)}")
        if self.refused:
            lines.append("  a right kernel may be refused: somewhere the tolerance is below the rounding that its format makes")
        return "\n".join(lines)


def audit(
    atol: float = 0.0,
    rtol: float = 0.0,
    shapes: Iterable[Spec] | None = None,
    inputs: Draw | None = None,
    accepts: Accepts | None = None,
    seed: int = 0,
) -> Audit:
    """What a test that accepts |out - exact| <= atol + rtol |exact| (numpy.allclose) in every case of `shapes` lets through.

    `shapes`: specs, by default the fixed suite. `inputs(rng, shape)` draws q, k and v in place of the planted ones, to audit a
    test on its own inputs. `accepts(out, exact)` is another rule than a tolerance, such as "all finite". Quantised K and V need
    the planted inputs. Raises UsageError.
    """
    if atol < 0 or rtol < 0:
        raise UsageError(f"tolerances are 0 or more, not atol {atol}, rtol {rtol}")
    specs = list(suite() if shapes is None else shapes)
    if not specs:
        raise UsageError("there are no shapes to audit")
    cases = [Case(spec, values=_drawn(spec, inputs, seed + i) if inputs else None) for i, spec in enumerate(specs)]
    rule = accepts or (lambda out, exact: bool(np.all(np.abs(out - exact) <= atol + rtol * np.abs(exact))))
    groups: dict[str, list[str]] = {"let_through": [], "caught": [], "unseen": []}
    for fault in FAULTS:
        where = [case for case in cases if fault.applies(case.spec)]
        if where:
            outs = [fault.run(case) for case in where]
            groups[_outcome(where, outs, rule)].append(fault.name)
    garbage = [name for name, make in _GARBAGE if all(rule(make(case), case.expected.out) for case in cases)]
    refused = accepts is None and any((case.expected.bound > atol + rtol * np.abs(case.expected.out)).any() for case in cases)
    test = f"atol {atol:g}, rtol {rtol:g}" if accepts is None else "the given rule"
    let_through, caught, unseen = (tuple(groups[name]) for name in ("let_through", "caught", "unseen"))
    return Audit(test, let_through, caught, unseen, tuple(garbage), refused)


def _outcome(cases: Sequence[Case], outs: Sequence[np.ndarray], rule: Accepts) -> str:
    with np.errstate(invalid="ignore"):
        if not all(rule(out, case.expected.out) for case, out in zip(cases, outs, strict=True)):
            return "caught"
    changed = any(exceeds(out, case.expected.out, case.expected.bound).max(initial=0.0) > 1
                  for case, out in zip(cases, outs, strict=True))  # fmt: skip
    return "let_through" if changed else "unseen"


def _drawn(spec: Spec, inputs: Draw, seed: int) -> list[Values]:
    if spec.scaled:
        raise UsageError(f"own inputs go with floating-point K and V, not with {spec.stored}: leave `inputs` out")
    rng, found = np.random.default_rng(seed), []
    for rows, tokens in spec.lengths:
        q = inputs(rng, (rows, spec.num_heads, spec.head_dim))
        k, v = (inputs(rng, (tokens, spec.num_kv_heads, spec.head_dim)) for _ in range(2))
        found.append(Values(rounded(q, spec.dtype), rounded(k, spec.stored), rounded(v, spec.stored), None, None))
    return found


def _noise(case: Case) -> np.ndarray:
    exact = case.expected.out
    return np.random.default_rng(0).uniform(exact.min(), exact.max(), exact.shape)


_GARBAGE: tuple[tuple[str, Callable[[Case], np.ndarray]], ...] = (
    ("all zeros", lambda case: np.zeros_like(case.expected.out)),
    ("a constant", lambda case: np.full_like(case.expected.out, case.expected.out.mean() if case.expected.out.size else 0)),
    ("noise", _noise),
    ("the mean of V", lambda case: np.concatenate([np.broadcast_to(
        np.repeat(each.v.mean(axis=0) if len(each.v) else np.zeros(each.v.shape[1:]), case.spec.group, axis=0), each.q.shape)
        for each in case.problems])),
)  # fmt: skip
