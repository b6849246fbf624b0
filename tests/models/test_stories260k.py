"""A trained model in three formats: what run.c answers, token by token."""

import hashlib

import numpy as np
import pytest

import nanokv
from nanokv.backend import NUMPY
from nanokv.models.llama import forward
from nanokv.numerics import EXACT, FAST
from nanokv.rope import Rope
from nanokv.sampling import Sampler, SamplingParams
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


class XorShift:
    """run.c's random numbers, xorshift64* cut to 24 bits, in the place of NumPy's generator."""

    def __init__(self, seed):
        self._state = seed

    def random(self):
        self._state ^= self._state >> 12
        self._state = (self._state ^ self._state << 25) & (1 << 64) - 1
        self._state ^= self._state >> 27
        return (self._state * 0x2545F4914F6CDD1D >> 40 & 0xFFFFFF) / (1 << 24)


def seeded(seed, temperature, top_p):
    sampler = Sampler(SamplingParams(temperature, top_p=top_p))
    sampler._rng = XorShift(seed)
    return sampler


@KINDS
@pytest.mark.parametrize(("seed", "temperature", "top_p", "unlike_greedy", "sha256"), [
    (1, 1.0, 0.9, 57, "ed48f79a5aca0f2f9d37254ceb53003abbb58a7449b79806ff7a691607959882"),
    (42, 0.8, 0.9, 43, "3192fcd574526144f63f41a768b6efe975934daf18d01a8958d3276ea110f004"),
    (1337, 1.0, 0.5, 29, "437b01c8d43f7a6d9f226829a39426e40a15e539e37d838e646602adfe0b4a4e"),
])  # fmt: skip
def test_seeded_choices(kind, seed, temperature, top_p, unlike_greedy, sha256, expected):
    """The ids that run.c's sample_topp, compiled from C, draws from run.c's 200 rows of logits: our logits and our sampler
    with its generator draw the same."""
    model, (tokens, _) = load(kind), expected
    logits = run(model.params, tokens, [200], cache_for(model.config, 200))
    sampler = seeded(seed, temperature, top_p)
    ids = np.array([sampler.choose(row, []) for row in logits])
    assert hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest() == sha256
    assert np.count_nonzero(ids != logits.argmax(axis=1)) == unlike_greedy


def test_a_seeded_story_is_the_same_from_every_format_and_cache():
    """150 sampled tokens through generate, with run.c's generator."""
    texts = []
    for kind, cache in (("legacy", "contiguous"), ("version 1", "paged"), ("gguf", "none")):
        loaded = load(kind)
        model = nanokv.Model(kind, loaded.params, loaded.tokenizer, loaded.eos_token_ids, prefix=loaded.prefix)
        story = model.stream("", max_tokens=150, temperature=1.0, top_p=0.9, cache=cache)
        story._sampler = seeded(7, 1.0, 0.9)
        texts.append(story.run().text)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith("Once upon a time")


def test_by_name_of_the_file():
    """nanokv.load finds each format, and llama2.c's tokenizer beside its models."""
    for file in ("stories260K.bin", "stories260K_v1.bin", "stories260K-f32.gguf"):
        model = nanokv.load(str(data(f"{FOLDER}/{file}")))
        text = model.generate("", max_tokens=199).text
        assert text == model.generate("", max_tokens=199, cache="paged", block_size=8).text
        assert text.startswith("Once upon a time, there was a little girl named Lily.")
        again = model.generate("Once upon a time, there was a little", max_tokens=3)
        assert again.text.startswith(" girl")  # a continuation begins with its space, a text does not


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
