"""The model that ships: transformers loads its directory and agrees, and it writes what the README shows."""

import numpy as np
import pytest

import nanokv
from nanokv.models.gpt2 import forward
from tests.support import ROOT, nan_cache

FOLDER = ROOT / "weights" / "default"


@pytest.fixture(scope="module")
def model():
    return nanokv.load("default", backend="numpy")


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_it_and_agrees(model):
    """float64 on both sides, to 1e-9; the tokenizer's ids are the same."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(FOLDER, dtype=torch.float64)
    exact = nanokv.load("default", dtype="float64", backend="numpy")
    text = 'Once upon a time, there was a little girl named Lily. "Hello, how are you?" 1234 caf\u00e9'
    tokens = exact.encode(text)
    assert (
        transformers.GPT2TokenizerFast(vocab=str(FOLDER / "vocab.json"), merges=str(FOLDER / "merges.txt")).encode(text)
        == tokens
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    got = forward(exact.params, np.array(tokens), nan_cache(exact.config, len(tokens), np.float64))
    assert np.abs(got - expected).max() <= 1e-9
    with torch.no_grad():
        out = theirs.generate(torch.tensor([exact.encode("Hello, how")]), max_new_tokens=40, do_sample=False)
    assert exact.generate("Hello, how", max_tokens=40).tokens == out[0].tolist()[len(exact.encode("Hello, how")) :]


def test_it_greets_and_tells_a_story(model):
    assert model.generate("Hello, how", max_tokens=100).finish_reason == "eos"
    greeting = model.generate("Hello, how")
    assert greeting.text.startswith(" are you")
    story = model.generate("Once upon a time", max_tokens=60).text
    assert story.startswith(", there was a little")
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("Hello, how" + greeting.text) == 1
    assert "Once upon a time" + story in (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 10_000_000
