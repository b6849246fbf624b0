"""The kernels built with AddressSanitizer, in a process of its own: NumPy's arrays, the fibers' stacks, the header itself."""

import os
import subprocess
import sys

import pytest

from tests.cuda.machine import compiler
from tests.support import ROOT

SCRIPT = """
import numpy as np
from nanokv.kernels.cuda import launches
from nanokv.kernels.matrix import pack
from tests.cuda.machine import CpuDevice, build, opened

flags = ("-O1", "-fsanitize=address", "-fno-omit-frame-pointer")
rng = np.random.default_rng(0)
rows = opened(build("rows.cu", kernels=["layer_norm"], flags=flags))
lines = opened(build("linear.cu", kernels=["linear_segments<Int4, 4>", "linear_sum"], flags=flags))
device = CpuDevice("random", {"rows.cu": rows, "linear.cu": lines})
x, out = rng.standard_normal((5, 77), dtype=np.float32), np.zeros((5, 77), np.float32)
launches.layer_norm(device, x, x[0].copy(), x[1].copy(), 1e-5, out)
matrix = pack(rng.standard_normal((70, 77), dtype=np.float32), "int4")
device.tensors = {"W": matrix.codes, "scales": matrix.scales}
y, sums = np.zeros((3, 70), np.float32), np.zeros(launches.sums_shape(3, matrix), np.float32)
launches.linear(device, x[:3].copy(), matrix, None, y, sums)
assert np.isfinite(out).all() and np.isfinite(y).all()
print("clean")
"""


def test_kernels_run_clean_under_address_sanitizer():
    found = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = found.stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("not run: the C++ compiler has no AddressSanitizer")
    environment = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "clean"
