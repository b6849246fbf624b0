"""What loading and running cost: at most 1.25 times the weights and 150 MB, whatever the file's dtype."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from nanokv.models.config import known_shapes
from tests.support import ROOT
from tests.weights.files import write_tokenizer
from weights.gpt2 import tensor_shapes

# VmHWM and not getrusage's ru_maxrss: that one keeps the peak of the process that started this one.
MEASURE = """
import sys
import nanokv
model = nanokv.load(sys.argv[1], dtype=sys.argv[2], backend="numpy")
params = model.params
assert len(model.generate([1] * 400, max_tokens=4, ignore_eos=True).tokens) == 4
loaded = params.wte.nbytes + params.wpe.nbytes + sum(a.nbytes for b in params.blocks for a in vars(b).values())
print(loaded, next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture(params=["F32", "F16", "BF16"])
def gpt2_124m(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """GPT-2 124M's files with weights of zero, which take no room on the disk: a hole after the header."""
    config = known_shapes()["gpt2"]
    itemsize, at, header = 4 if request.param == "F32" else 2, 0, {}
    for name, shape in tensor_shapes(config).items():
        if name != "lm_head.weight":
            size = itemsize * shape[0] * (shape[1] if len(shape) == 2 else 1)
            header[name] = {"dtype": request.param, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
    assert at == itemsize * config.num_parameters
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    keys = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not run: this system does not say a process's peak memory")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_peak_memory(gpt2_124m: Path, dtype: str) -> None:
    command = [sys.executable, "-c", MEASURE, str(gpt2_124m), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded, peak = map(int, done.stdout.split())
    assert loaded > 4 * 124_000_000 * (1 if dtype == "float32" else 2)
    assert loaded < peak <= 1.25 * loaded + 150e6, f"peak {peak / 1e6:.0f} MB for {loaded / 1e6:.0f} MB of weights"
