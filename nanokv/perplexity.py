"""How well a model predicts a text through a given cache: what a codec, a window or fewer heads cost."""

import math
from collections.abc import Sequence

import numpy as np

from nanokv.backend import to_numpy
from nanokv.errors import UsageError
from nanokv.kv.spec import CacheSpec
from nanokv.model import PREFILL_STEP, Model
from nanokv.sampling import log_softmax


def nats(model: Model, tokens: Sequence[int], spec: CacheSpec | None = None) -> np.ndarray:
    """[S - 1]: minus the log-probability of each token after the first, in nats, all in one cache.

    Raises UsageError for fewer than 2 tokens, CapacityError for more than the cache or the model has positions for.
    """
    if len(tokens) < 2:
        raise UsageError("a perplexity needs a text of at least 2 tokens")
    ids = np.asarray(tokens)
    cache = model.new_cache(len(ids), spec)
    step = min(PREFILL_STEP, cache.max_step or PREFILL_STEP)
    losses = []
    for start in range(0, len(ids) - 1, step):
        logits = to_numpy(model.forward(ids[start : min(start + step, len(ids) - 1)], cache))
        losses += [-log_softmax(row)[token] for row, token in zip(logits, ids[start + 1 :], strict=False)]
    return np.array(losses)


def perplexity(model: Model, texts: Sequence[Sequence[int]], spec: CacheSpec | None = None) -> float:
    """exp of the mean loss over all predicted tokens of several texts, each in a cache of its own."""
    return math.exp(float(np.concatenate([nats(model, text, spec) for text in texts]).mean()))
