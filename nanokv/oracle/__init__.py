"""Other people's attention kernels and KV caches on trial. docs/oracle.md leads from nothing to a verdict.

    from nanokv import oracle
    report = oracle.check(my_kernel, layout="flashinfer-nhd", dtype="bfloat16")
    print(report)

NumPy is all that is needed; bfloat16 and fp8 also want ml_dtypes, files safetensors, strategies hypothesis.
"""

from nanokv.oracle.bounds import Arithmetic, default_arithmetic
from nanokv.oracle.case import Call, Case
from nanokv.oracle.check import check
from nanokv.oracle.faults import FAULTS, Fault
from nanokv.oracle.interchange import to_numpy, to_torch
from nanokv.oracle.judge import Verdict, judge
from nanokv.oracle.report import Report
from nanokv.oracle.spec import FEATURES, LAYOUTS, Spec
from nanokv.oracle.suite import suite

__all__ = [
    "Arithmetic", "Call", "Case", "FAULTS", "FEATURES", "Fault", "LAYOUTS", "Report", "Spec", "Verdict", "check",
    "default_arithmetic", "judge", "suite", "to_numpy", "to_torch",
]  # fmt: skip
