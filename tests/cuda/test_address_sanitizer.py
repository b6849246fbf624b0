"""The kernels of every source built with AddressSanitizer, each in a process of its own: NumPy's arrays, the fibers' stacks,
the header itself."""

import os
import subprocess
import sys

import pytest

from tests.cuda.machine import compiler
from tests.support import ROOT

pytest.importorskip("numba", exc_type=ImportError)
from tests.cuda.small_examples import EXAMPLES

SCRIPT = """
import sys
from tests.cuda.machine import build, opened
from tests.cuda.small_examples import EXAMPLES, KERNELS

file = sys.argv[1]
flags = ("-O1", "-fsanitize=address", "-fno-omit-frame-pointer")
assert EXAMPLES[file]({file: opened(build(file, kernels=KERNELS[file], flags=flags))})
print("clean")
"""


@pytest.mark.parametrize("file", list(EXAMPLES))
def test_kernels_run_clean_under_address_sanitizer(file):
    found = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = found.stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("not run: the C++ compiler has no AddressSanitizer")
    environment = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, file], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "clean"
