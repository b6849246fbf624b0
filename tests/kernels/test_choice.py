"""Where the compiled kernels cannot run, cannot be kept or are asked for what they do not have: what is said, and what runs."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import nanokv
from cli import main
from nanokv.backend import NUMPY
from nanokv.errors import UsageError
from nanokv.kernels.choice import memory_for, use_compiled
from nanokv.numerics import COMPILED, EXACT
from tests.support import NO_NUMBA, ROOT

GENERATE = ["generate", "Once upon a time", "--max-tokens", "4", "--temperature", "0"]


@pytest.fixture
def without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)


def test_compiled_without_numba_says_what_to_do(without_numba):
    result = CliRunner().invoke(main, [*GENERATE, "--kernels", "compiled"])
    assert result.exit_code == 2
    assert "numba is not installed: pip install 'nanokv[cpu]'; or use --kernels numpy" in result.output


def test_auto_without_numba_is_numpy(without_numba):
    assert not use_compiled("auto", NUMPY, "float32")
    assert nanokv.load("default", kernels="auto").numerics is EXACT
    result = CliRunner().invoke(main, GENERATE)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("name", "dtype", "words"), [
    ("compiled", "float64", "float32, not float64"), ("fortran", "float32", "unknown kernels 'fortran': choose one of auto"),
])  # fmt: skip
def test_kernels_that_cannot_be(name, dtype, words):
    with pytest.raises(UsageError, match=words):
        use_compiled(name, NUMPY, dtype)
    assert not use_compiled("auto", NUMPY, "float64")


@NO_NUMBA
@pytest.mark.parametrize("threads", [0, -1, 1 << 20])
def test_threads_out_of_range(threads):
    with pytest.raises(UsageError, match=rf"threads {threads} is out of range: 1 to \d+ here"):
        memory_for(NUMPY, COMPILED, None, threads)
    result = CliRunner().invoke(main, [*GENERATE, "--kernels", "compiled", "--threads", str(threads)])
    assert result.exit_code == 2


def test_threads_are_not_for_numpys_kernels():
    with pytest.raises(UsageError, match="OPENBLAS_NUM_THREADS"):
        memory_for(NUMPY, EXACT, None, 2)


@pytest.mark.parametrize("numerics", [EXACT, COMPILED])
def test_an_unknown_weight_format(numerics):
    with pytest.raises(UsageError, match="unknown weight format 'int3': choose one of float32"):
        memory_for(NUMPY, numerics, "int3", None)


NO_FOLDER = """
import logging, sys
import numpy as np
from nanokv.kernels import choice, compiling
from nanokv.numerics import COMPILED, rms_norm
logging.basicConfig()
assert compiling.FOLDER is None
choice.start(1)
x = np.linspace(-3, 3, 300, dtype=np.float32).reshape(3, 100)
sys.stdout.buffer.write(rms_norm(x, x[0], 1e-5, COMPILED).tobytes())
"""


@NO_NUMBA
def test_kernels_run_where_nothing_can_be_written(tmp_path):
    """Below a file no folder can be made, not even by root."""
    (tmp_path / "file").touch()
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    env["XDG_CACHE_HOME"] = str(tmp_path / "file" / "cache")
    run = subprocess.run([sys.executable, "-c", NO_FOLDER], env=env, cwd=ROOT, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    assert b"compiled kernels cannot be kept (no folder can be written" in run.stderr
    from nanokv.numerics import rms_norm

    x = np.linspace(-3, 3, 300, dtype=np.float32).reshape(3, 100)
    assert run.stdout == rms_norm(x, x[0], 1e-5, COMPILED).tobytes()


LAYER = "import json; from tests.kernels import logits; from nanokv.kernels.compiled import settings; "


@NO_NUMBA
def test_without_openmp_numbas_own_queue_runs_and_the_bits_are_the_same():
    from tests.kernels import logits

    code = LAYER + "print(json.dumps([logits.digests(), settings()['layer']]))"
    env = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue"}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [json.loads(logits.FILE.read_text()), "workqueue"]
