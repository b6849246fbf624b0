"""Logits against transformers' GPT2LMHeadModel, position by position, on the same random weights."""

import numpy as np
import pytest

from nanokv.models.config import known_shapes
from nanokv.models.gpt2 import forward, random_params
from nanokv.numerics import EXACT, FAST
from tests.support import nan_cache, small_config

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]


def theirs(params, tokens):
    from benchmarks.peers import torch_gpt2

    with torch.no_grad():
        return torch_gpt2(params)(torch.tensor(tokens)[None]).logits[0].numpy()


@pytest.mark.parametrize("shape", ["gpt2", "gpt2-medium"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-4), (np.float64, 1e-9)])
def test_published_shapes(shape, dtype, tolerance):
    """Initialised as GPT-2 is (deviation 0.02); 40 tokens in three pieces."""
    config = known_shapes()[shape]
    params = random_params(config, dtype=dtype)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 40)
    expected = theirs(params, tokens)
    for numerics in (EXACT, FAST):
        cache = nan_cache(config, 64, dtype)
        got = [forward(params, tokens[a:b], cache, numerics=numerics) for a, b in ((0, 30), (30, 31), (31, 40))]
        assert np.abs(np.concatenate(got) - expected).max(axis=-1).max() <= tolerance


@pytest.mark.parametrize("options", [
    {}, {"activation": "gelu"}, {"tied_head": False}, {"scale_by_layer": True}, {"scale_by_head_dim": False},
    {"layer_norm_epsilon": 1e-3},
])  # fmt: skip
def test_every_setting_in_float64(options):
    """Sharp weights (deviation 0.2) and 200 tokens across two tiles: 1e-9 of logits of size 10."""
    config = small_config(layers=3, heads=4, kv_heads=4, dim=16, vocab=200, **options)
    params = random_params(config, dtype=np.float64, scale=0.2)
    tokens = np.random.default_rng(0).integers(0, 200, 200)
    got = forward(params, tokens, nan_cache(config, 200, np.float64))
    assert np.abs(got - theirs(params, tokens)).max() <= 1e-9
