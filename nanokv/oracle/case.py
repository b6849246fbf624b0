"""One case: what a kernel is given, and what it should give back."""

from functools import cached_property
from typing import Any

import numpy as np

from nanokv.kv.tile import CAUSAL, Visibility
from nanokv.oracle.bounds import Arithmetic, default_arithmetic
from nanokv.oracle.layouts import Memory, arrays, lay_out, pack, slopes
from nanokv.oracle.reference import Everything, Problem, Solved, solve
from nanokv.oracle.spec import Spec
from nanokv.oracle.values import Values, planted
from nanokv.rope import Rope

SETTINGS = (
    "layout", "dtype", "kv_dtype", "num_heads", "num_kv_heads", "head_dim", "block_size", "causal", "window", "sinks",
    "streaming", "softcap", "rope", "rope_theta",
)  # fmt: skip


class Call:
    """What a kernel is given: the arrays of its layout and the settings of the case, as attributes.

    `call.arrays` names the arrays; `call.scale` is what multiplies the scores, `call.spec` the whole description.
    """

    def __init__(self, spec: Spec, arrays: dict[str, Any]):
        self.spec, self.arrays = spec, arrays
        self.scale = spec.score_scale

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {list(array.shape)} {array.dtype}" for name, array in self.arrays.items())
        return f"Call({self.spec.title()}; {shown})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("spec", "arrays"):  # asked for before there is anything: copy and pickle do
            raise AttributeError(name)
        if name in self.arrays:
            return self.arrays[name]
        if name in SETTINGS:
            return getattr(self.spec, name)
        raise AttributeError(f"a call of layout {self.spec.layout} has no {name!r}; its arrays: {', '.join(self.arrays)}")


class Case:
    """The arrays of a spec and the exact answer, with bounds for a kernel of the given arithmetic (None: the dtype's usual).

    Everything is a function of the spec alone, so a case can be named in a file or a test and comes out the same.
    """

    def __init__(self, spec: Spec, arithmetic: Arithmetic | None = None, values: list[Values] | None = None):
        self.spec = spec
        self.arithmetic = arithmetic or default_arithmetic(spec.dtype)
        self.values = planted(spec) if values is None else values
        self.memory: Memory = lay_out(spec, self.values)

    def __repr__(self) -> str:
        return f"Case({self.spec!r})"

    def arrays(self) -> dict[str, np.ndarray]:
        """Fresh copies: what a kernel does to them stays with it."""
        return {name: array.copy() for name, array in arrays(self.spec, self.values, self.memory).items()}

    def call(self) -> Call:
        return Call(self.spec, self.arrays())

    @cached_property
    def problems(self) -> list[Problem]:
        """Each sequence's attention in float64."""
        spec = self.spec
        visibility = Visibility(spec.window, spec.sinks) if spec.window else CAUSAL if spec.causal else Everything()
        rope = Rope(spec.head_dim, spec.rope_theta, adjacent=spec.rope == "pairs") if spec.rope else None
        sinks_at = spec.sinks + spec.window - 1 if spec.streaming and spec.window else None
        bias = slopes(spec).astype(np.float64) if spec.alibi else None
        return [
            Problem(each.q.astype(np.float64), each.k, each.v, np.arange(kv - q, kv), spec.score_scale, visibility,
                    spec.softcap, bias, sinks_at, rope)
            for each, (q, kv) in zip(self.values, spec.lengths, strict=True)
        ]  # fmt: skip

    @cached_property
    def expected(self) -> Solved:
        """out [R, Hq, D], lse [R, Hq] and their bounds, the sequences' rows one after another."""
        return self.expected_with(self.arithmetic)

    def expected_with(self, arithmetic: Arithmetic) -> Solved:
        """The same for a kernel that computes otherwise: only the bounds differ."""
        parts = [solve(problem, self.spec.dtype, self.spec.stored, arithmetic) for problem in self.problems]
        return Solved(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def packed(self) -> dict[str, np.ndarray]:
        """`expected` in the layout of the output. Bounds of padding rows are infinite: whatever stands there is right."""
        fills = {"out": 0.0, "lse": 0.0, "bound": np.inf, "lse_bound": np.inf}
        return {name: pack(self.spec, getattr(self.expected, name), fill) for name, fill in fills.items()}

    def row_of(self, row: int) -> tuple[int, int]:
        """(sequence, query token in it) of a row of the output."""
        for i, (count, _) in enumerate(self.spec.lengths):
            if row < count:
                return i, row
            row -= count
        raise IndexError(row)
