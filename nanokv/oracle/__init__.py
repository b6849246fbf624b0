"""Other people's attention kernels and KV caches on trial. docs/oracle.md leads from nothing to a verdict.

    from nanokv import oracle
    report = oracle.check(my_kernel, layout="flashinfer-nhd", dtype="bfloat16")
    print(report)

NumPy is all that is needed; bfloat16 and fp8 also want ml_dtypes, files safetensors, strategies hypothesis.
"""

from nanokv.oracle.audit import Audit, audit
from nanokv.oracle.bounds import Arithmetic, default_arithmetic
from nanokv.oracle.caches import CacheReport, check_cache, logit_bound
from nanokv.oracle.case import Call, Case
from nanokv.oracle.check import check
from nanokv.oracle.faults import FAULTS, Fault, faulty_kernel
from nanokv.oracle.interchange import to_numpy, to_torch
from nanokv.oracle.judge import Verdict, judge
from nanokv.oracle.report import Report
from nanokv.oracle.spec import FEATURES, LAYOUTS, Spec
from nanokv.oracle.strategies import attention_cases
from nanokv.oracle.suite import suite
from nanokv.oracle.vectors import read_vectors, verify, write_results, write_vectors

__all__ = [
    "Arithmetic", "Audit", "CacheReport", "Call", "Case", "FAULTS", "FEATURES", "Fault", "LAYOUTS", "Report", "Spec", "Verdict",
    "attention_cases", "audit", "check", "check_cache", "default_arithmetic", "faulty_kernel", "judge", "logit_bound",
    "read_vectors", "suite", "to_numpy", "to_torch", "verify", "write_results", "write_vectors",
]  # fmt: skip
