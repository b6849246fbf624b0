"""A trained GPT-2-architecture model that sorts six digits: published activations, and all 729 answers.

The weights are minGPT's (stored [out, in], an untied head), published with the activations of one forward pass.
"""

import base64
import json
from itertools import product

import numpy as np
import pytest

from nanokv.kv.tile import Batch
from nanokv.models.config import GPT2Config
from nanokv.models.gpt2 import Block, GPT2Params, forward
from tests.support import data, nan_cache, recorded


def arrays(path):
    raw = json.loads(path.read_text(encoding="utf-8"))

    def decode(entry):
        return np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(entry["shape"])

    return {name: decode(entry) for name, entry in raw.items() if isinstance(entry, dict) and "data" in entry}


@pytest.fixture(scope="module")
def params():
    w = arrays(data("models/gpt_nano_sort/gpt-nano-sort-model.json"))
    config = GPT2Config(3, 11, 48, 3, 3, 3, 192, tied_head=False)

    def block(i):
        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        return Block(*(w[f"transformer.h.{i}.{name}.{part}"] for name in names for part in ("weight", "bias")))

    top = (w[f"transformer.{name}"] for name in ("wte.weight", "wpe.weight"))
    norm = (w[f"transformer.ln_f.{part}"] for part in ("weight", "bias"))
    return GPT2Params(config, *top, tuple(block(i) for i in range(3)), *norm, w["lm_head.weight"])


def test_published_activations(params, monkeypatch):
    """Every stage of the first block, every block's output, the logits, for three sequences, to 3e-6 in float32: values of
    a few units through three layers, against another library's order of summation."""
    published = arrays(data("models/gpt_nano_sort/gpt-nano-sort-t0-partials.json"))
    seen = recorded(monkeypatch)
    for row, tokens in enumerate(published["idx"].astype(int)):
        for values in seen.values():
            values.clear()
        logits = forward(params, tokens, nan_cache(params.config, 11))
        qkv, proj, fc, out = seen["linear"][:4]
        start = params.wte[tokens] + params.wpe[: len(tokens)]
        stages = {
            "x": start, "ln1": seen["layer_norm"][0], "qkv": qkv, "y": seen["cached_attention"][0].reshape(start.shape),
            "yProj": proj, "attnResid": start + proj, "ln2": seen["layer_norm"][1], "fc": fc, "gelu": seen["activate"][0],
            "mlp": out, "mlpResid": start + proj + out, "block0": start + proj + out, "ln_f": seen["layer_norm"][-1],
            "lm_head": logits,
        }  # fmt: skip
        for name, value in stages.items():
            assert np.abs(value - published[name][row]).max() <= 3e-6, name


def test_it_sorts_every_sequence_of_six_digits(params):
    """All 729 at once, one batch, six greedy steps."""
    prompts = list(product(range(3), repeat=6))
    caches = [nan_cache(params.config, 11) for _ in prompts]
    logits = forward(params, np.array(prompts).ravel(), Batch([(cache, 6) for cache in caches])).reshape(729, 6, 3)[:, -1]
    answers = [logits.argmax(-1)]
    for _ in range(5):
        logits = forward(params, answers[-1], Batch([(cache, 1) for cache in caches]))
        answers.append(logits.argmax(-1))
    assert np.array_equal(np.stack(answers, 1), np.sort(prompts, axis=1))
