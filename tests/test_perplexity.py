import numpy as np
import pytest

from nanokv.errors import UsageError
from nanokv.kv.spec import CacheSpec
from nanokv.models.gpt2 import forward
from nanokv.perplexity import nats, perplexity
from nanokv.sampling import log_softmax
from tests.support import nan_cache, tiny_model

MODEL = tiny_model()
TEXT = np.random.default_rng(0).integers(0, 4096, 300)


def test_the_loss_is_that_of_one_pass():
    logits = forward(MODEL.params, TEXT, nan_cache(MODEL.config, 300))
    expected = [-log_softmax(logits[i])[TEXT[i + 1]] for i in range(299)]
    assert nats(MODEL, TEXT).tolist() == expected
    assert nats(MODEL, TEXT, CacheSpec("paged", 8)).tolist() == expected
    assert perplexity(MODEL, [TEXT[:150], TEXT]) == pytest.approx(
        np.exp(np.concatenate([nats(MODEL, TEXT[:150]), expected]).mean()), rel=1e-14
    )


def test_an_endless_text_has_a_perplexity():
    text = np.tile(TEXT, 3)
    assert len(nats(MODEL, text, CacheSpec(window=50, sinks=4))) == 899


def test_one_token_has_none():
    with pytest.raises(UsageError, match="at least 2"):
        nats(MODEL, [1])
