"""The real GPT-2 124M against what was published about it (gpt2_124m.json), when its weights are here.

They are looked for in NANOKV_GPT2 (a directory) and in the hub's local cache; otherwise these tests say that they did not
run. They were written without the weights at hand.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import nanokv
from nanokv.errors import NanoKVError
from nanokv.models import gpt2
from nanokv.sampling import log_softmax
from tests.support import nan_cache, recorded

FACTS = json.loads((Path(__file__).parent / "gpt2_124m.json").read_text(encoding="utf-8"))
MISSING = "not run: the weights of GPT-2 124M are not here (set NANOKV_GPT2 to their directory)"


@pytest.fixture(scope="module")
def model():
    source = os.environ.get("NANOKV_GPT2")
    if not source:
        try:
            from huggingface_hub import snapshot_download

            source = snapshot_download("openai-community/gpt2", local_files_only=True)
        except Exception:  # not installed, not cached: either way they are not here
            pytest.skip(MISSING)
    try:
        return nanokv.load(source, backend="numpy")
    except NanoKVError as error:
        pytest.skip(f"{MISSING}: {error}")


def logits_of(model, tokens):
    return gpt2.forward(model.params, np.array(tokens), nan_cache(model.config, len(tokens)))


@pytest.mark.parametrize("fact", [fact for fact in FACTS["greedy"] if "n" in fact or "total_len" in fact])
def test_greedy_continuations(model, fact):
    prompt = model.encode(fact["prompt"])
    assert prompt == fact["prompt_ids"]
    expected = fact["ids"] if "ids" in fact else fact["all_ids"][len(prompt) :]
    run = model.generate(fact["prompt"], max_tokens=len(expected))
    assert run.tokens == expected
    assert (fact["text"] if "ids" in fact else fact["text"][len(fact["prompt"]) :]) == run.text


def test_the_well_known_demonstration(model):
    fact = next(fact for fact in FACTS["greedy"] if "stop" in fact)
    run = model.generate(fact["prompt"], stop=fact["stop"], max_tokens=100)
    assert fact["prompt"] + run.text == fact["text_with_prompt"]


@pytest.mark.parametrize("fact", FACTS["per_position_argmax"])
def test_the_best_token_at_every_position(model, fact):
    best = logits_of(model, fact["ids"]).argmax(-1).tolist()
    assert best == fact.get("argmax", fact.get("argmax_next"))


def test_llm_c_loss_and_logits(model):
    """Mean cross-entropy of 4 x 64 tokens, and the first ten logits, to the precision at which they were printed."""
    fact = FACTS["llm.c"]
    x = np.array(fact["x"]).reshape(fact["x_shape"])
    y = np.append(fact["x"][1:], fact["y_last"]).reshape(x.shape)
    logits = np.stack([logits_of(model, row) for row in x])
    # y of a row's last token is the next row's first: the batch is one run of 257 tokens
    loss = -np.mean([log_softmax(logits[i, j])[y[i, j]] for i in range(4) for j in range(64)])
    assert loss == pytest.approx(fact["loss"], abs=1e-4)  # float32 logits of size 40, 1e-5 each
    assert np.abs(logits[0, 0, :10] - fact["logits[0,0,:10]"]).max() <= 2e-4


def test_activations_of_the_first_block(model, monkeypatch):
    """To 1e-4, a tenth of what a fault in order, layout or epsilon moves; the sources print 7 digits."""
    fact = FACTS["activations_block0"]
    seen = recorded(monkeypatch)
    logits = logits_of(model, fact["prompt_ids"])
    qkv, proj, fc, out = (values[0] for values in seen["linear"][:4])
    start = model.params.wte[fact["prompt_ids"][0]] + model.params.wpe[0]
    got = {
        "ln_1 out [0,0]": seen["layer_norm"][0][0, 0], "q[0,0]": qkv[0], "k[0,0]": qkv[768], "v[0,0]": qkv[1536],
        "head0 out[0,0]": seen["cached_attention"][0][0, 0, 0], "head0 out[1,0]": seen["cached_attention"][0][1, 0, 0],
        "attn c_proj out[0,0]": proj[0], "residual after attn [0,0]": start[0] + proj[0],
        "ln_2 out[0,0]": seen["layer_norm"][1][0, 0], "c_fc out[0,0]": fc[0], "gelu(tanh) out[0,0]": seen["activate"][0][0, 0],
        "mlp out[0,0]": out[0], "block0 out[0,0]": start[0] + proj[0] + out[0],
        "block0 out[0,767]": start[767] + proj[767] + out[767],
    }  # fmt: skip
    for name, value in got.items():
        assert value == pytest.approx(fact[name], abs=1e-4), name
    assert logits[-1, 0] == pytest.approx(fact["final logits[-1,0]"], abs=2e-3)  # of size 128 in float32
    assert logits[-1].argmax() == fact["argmax last"]
