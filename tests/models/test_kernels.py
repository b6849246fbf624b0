"""The identity tests once more on another set of BLAS kernels than this run's.

OpenBLAS chooses kernels by processor, or by OPENBLAS_CORETYPE: unset where that is set, Haswell where it is not.
"""

import os
import subprocess
import sys

import pytest

from nanokv.measure import blas
from tests.support import ROOT

IDENTITY = ["tests/test_numerics.py", "tests/test_attention.py", "tests/models/test_gpt2.py", "tests/kv/test_caches.py"]


def other_environment():
    """The variables of a run on the other kernels."""
    env = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    if "OPENBLAS_CORETYPE" not in os.environ:
        env["OPENBLAS_CORETYPE"] = "Haswell"
    return env


def test_identity_holds_on_other_kernels():
    env = other_environment()
    there = "from nanokv.measure import blas; print(blas()[0])"
    probe = subprocess.run([sys.executable, "-c", there], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    name = probe.stdout.strip()
    if name == blas()[0]:
        pytest.skip(f"not run: this machine's BLAS has one set of kernels ({name})")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *IDENTITY, "-k", "not compiled"], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, f"on {name}:\n{result.stdout[-3000:]}"
