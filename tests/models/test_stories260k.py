"""A trained model in three formats: what run.c answers, token by token."""

import hashlib

import numpy as np
import pytest

from nanokv.backend import NUMPY
from nanokv.models.llama import forward
from nanokv.numerics import EXACT, FAST
from nanokv.rope import Rope
from tests.llama_support import cache_for, run
from tests.support import data
from tests.weights.llama_files import assert_same_llama
from weights.gguf_file import load_gguf
from weights.llama2c import load_llama2c

FOLDER = "models/stories260K"
SHA256 = "beeb5cb46785efee81a8545300b31e396b595e5ce6f3b77db201545501981d14"


def load(kind, dtype="float32"):
    if kind == "gguf":
        return load_gguf(data(f"{FOLDER}/stories260K-f32.gguf"), kind, dtype, NUMPY)
    file = {"legacy": "stories260K.bin", "version 1": "stories260K_v1.bin"}[kind]
    return load_llama2c(data(f"{FOLDER}/{file}"), data(f"{FOLDER}/tok512.bin"), kind, dtype, NUMPY)


@pytest.fixture(scope="module")
def expected():
    with np.load(data(f"{FOLDER}/greedy_logits_runc.npz")) as file:
        return file["tokens"], file["logits"]


def float32_angles(rope, positions, like):
    """run.c's: powf, a float32 quotient and a float32 product, so at position 200 an angle is off by up to 6e-6."""
    power = np.power(np.float32(10000), np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim))
    angles = positions[:, None].astype(np.float32) * (np.float32(1) / power)
    return np.cos(angles)[:, None].astype(like.dtype), np.sin(angles)[:, None].astype(like.dtype)


KINDS = pytest.mark.parametrize("kind", ["legacy", "version 1", "gguf"])


@KINDS
def test_greedy_ids_and_text(kind, expected):
    """200 tokens from the beginning of text, one at a time."""
    model = load(kind)
    assert model.prefix == (1,)
    cache, ids = cache_for(model.config, 200), [1]
    for _ in range(200):
        ids.append(int(forward(model.params, np.array(ids[-1:]), cache)[0].argmax()))
    assert ids[:200] == expected[0].tolist()
    text = model.tokenizer.decode(ids[1:])
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256
    assert len(text.encode()) == 464


@KINDS
def test_logits(kind, expected, monkeypatch):
    """Ours are within 2e-5 of float64 at all 200 x 512; run.c, which rounds its angles, is 2.5e-5 away from it. With run.c's
    angles ours are within 2e-5 of run.c's where the rows are in its order. A GGUF has them in another, so that sums round
    differently: then each of the two may be off by its own rounding, 1.5e-5."""
    tokens, logits = expected
    for numerics, tolerance in ((EXACT, 2e-5), (FAST, 4e-5)):  # fast: whatever order the library's threads sum in
        model, wide = load(kind), load(kind, "float64")
        ours = run(model.params, tokens, [200], cache_for(model.config, 200), numerics)
        exact = run(wide.params, tokens, [200], cache_for(wide.config, 200, np.float64))
        assert np.abs(ours - exact).max() <= tolerance
    monkeypatch.setattr(Rope, "tables", float32_angles)
    like_theirs = run(model.params, tokens, [200], cache_for(model.config, 200))
    assert np.abs(like_theirs - logits).max() <= (3e-5 if kind == "gguf" else 2e-5)


def test_three_formats_are_one_model(expected):
    """The two of llama2.c hold the same numbers, the GGUF the same rows in another order: logits within 2e-5 of each other
    and, in float64, 1e-10."""
    assert_same_llama(load("legacy").params, load("version 1").params)
    tokens = np.concatenate([[1], expected[0][:60]])
    pairs, halves = (load(kind, "float64") for kind in ("legacy", "gguf"))
    assert pairs.config.rope.adjacent
    assert not halves.config.rope.adjacent
    one, other = (run(each.params, tokens, [61], cache_for(each.config, 61, np.float64)) for each in (pairs, halves))
    assert np.abs(one - other).max() <= 1e-10


def test_the_vocabularies_agree():
    """Of tok512.bin and of the GGUF, on text and on every single token."""
    ours, theirs = load("legacy").tokenizer, load("gguf").tokenizer
    for text in ("Once upon a time, there was a cat.", "Lily's 3 dogs", " ", "été ☃\n"):
        assert ours.encode(text) == theirs.encode(text)
    for token in range(3, 512):
        assert ours.token_bytes(token) == theirs.token_bytes(token)
