"""llama.cpp on the same GGUF files in F32: logits within the rounding of two float32 programs."""

import numpy as np
import pytest

from nanokv.backend import NUMPY
from tests.llama_support import cache_for, run, smollm2_file
from tests.support import data
from weights.gguf_file import load_gguf

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("llama_cpp", reason="not run: llama.cpp's binding is not installed (pip install '.[llama-cpp]')")
pytest.importorskip("gguf")


def test_stories260k():
    """A trained model, 200 tokens one at a time and at once. In float32 each program is within 2e-5 of float64 (ours:
    tests/models/test_stories260k.py; llama.cpp's: measured here), so the two are within 4e-5 of each other."""
    from benchmarks.llama_cpp import LlamaCpp

    path = data("models/stories260K/stories260K-f32.gguf")
    with np.load(data("models/stories260K/greedy_logits_runc.npz")) as file:
        tokens = file["tokens"].tolist()
    theirs = LlamaCpp(path, threads=1, context=256)
    rows = np.array([theirs.feed([token]) for token in tokens])
    wide, narrow = (load_gguf(path, "stories", dtype, NUMPY) for dtype in ("float64", "float32"))
    exact = run(wide.params, np.array(tokens), [200], cache_for(wide.config, 200, np.float64))
    ours = run(narrow.params, np.array(tokens), [200], cache_for(narrow.config, 200))
    assert np.abs(rows - exact).max() <= 2e-5
    assert np.abs(rows - ours).max() <= 4e-5
    theirs.reset()
    assert np.abs(theirs.feed(tokens) - ours[-1]).max() <= 4e-5


@pytest.mark.slow
def test_smollm2(tmp_path):
    """The packed file dequantised by the gguf package and written as F32: the bound is the one that docs/numerics.md gives
    for two runs in float32."""
    from benchmarks.llama_cpp import LlamaCpp, write_float32
    from nanokv.models.llama import fast_bound, hidden_states

    packed = smollm2_file()
    model = load_gguf(packed, "smollm2", "float32", NUMPY)
    prompt = model.tokenizer.encode("The capital of France is")
    hidden = hidden_states(model.params, np.array(prompt), cache_for(model.config, 16))
    ours = run(model.params, np.array(prompt), [len(prompt)], cache_for(model.config, 16))[-1]
    theirs = LlamaCpp(write_float32(packed, tmp_path / "f32.gguf"), threads=1, context=64).feed(prompt)
    assert np.abs(ours - theirs).max() <= fast_bound(model.params, hidden)[-1].item()
    assert np.abs(ours - theirs).max() <= 2e-4  # what is seen is 3e-5 of logits up to 17
    assert ours.argmax() == theirs.argmax()
