"""What check() and verify() say."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanokv.oracle.diagnose import Diagnosis
from nanokv.oracle.judge import Verdict

SHOWN = 8


@dataclass
class Report:
    """One verdict a case; what the fault looks like; the smallest case that fails. `print(report)` shows it."""

    verdicts: list[Verdict]
    diagnosis: Diagnosis | None = None
    smallest: Verdict | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    @property
    def failing(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def fault(self) -> str | None:
        """The name in the catalogue, the first where several cannot be told apart."""
        return self.diagnosis.names[0] if self.diagnosis else None

    def __str__(self) -> str:
        worst = max((verdict.excess for verdict in self.verdicts), default=0.0)
        if self.passed:
            return "\n".join(
                [f"passed: {len(self.verdicts)} cases, the largest error is {worst:.2f} of its bound", *self.notes]
            )
        lines = [f"FAILED: {len(self.failing)} of {len(self.verdicts)} cases"]
        if self.diagnosis:
            lines.append(f"fault: {self.diagnosis.text}  [{', '.join(self.diagnosis.names)}]")
        elif any(verdict.kind in ("numbers", "nan") for verdict in self.failing):
            lines.append("fault: none of the catalogue gives these numbers")
        if self.smallest:
            lines += [f"smallest failing case: {self.smallest.spec.title()}", *(f"  {text}" for text in self.smallest.faults)]
        lines.append("failing cases:")
        for verdict in self.failing[:SHOWN]:
            lines += [f"  {verdict.spec.title()}", *(f"    {text}" for text in verdict.faults)]
        if len(self.failing) > SHOWN:
            kinds = Counter(verdict.kind for verdict in self.failing[SHOWN:])
            rest = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines.append(f"  and {len(self.failing) - SHOWN} more ({rest})")
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        """For programs; JSON can hold it."""

        def case(verdict: Verdict) -> dict[str, Any]:
            excess = verdict.excess if verdict.excess < float("inf") else None
            return {"case": verdict.spec.as_dict(), "passed": verdict.passed, "kind": verdict.kind, "excess": excess,
                    "faults": verdict.faults, "heads": verdict.heads}  # fmt: skip

        return {
            "passed": self.passed,
            "cases": [case(verdict) for verdict in self.verdicts],
            "diagnosis": {"names": list(self.diagnosis.names), "text": self.diagnosis.text} if self.diagnosis else None,
            "smallest": case(self.smallest) if self.smallest else None,
            "notes": self.notes,
        }
