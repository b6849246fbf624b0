"""A Model of either architecture: every flag gives what recomputing with it gives, prefixes, windows that a model has."""

from dataclasses import replace

import numpy as np
import pytest

from nanokv.engine import Engine
from nanokv.errors import UsageError
from nanokv.generate import Options
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Visibility
from nanokv.models.families import module_for
from tests.llama_support import small_llama, tiny_llama
from tests.support import tiny_model

MODELS = [tiny_model(), tiny_llama(), tiny_llama(qkv_bias=True, qk_norm=True, heads=6, kv_heads=1)]
EACH = pytest.mark.parametrize("model", MODELS, ids=["gpt2", "llama", "qwen"])
FLAGS = [
    {}, {"window": 20}, {"window": 20, "sinks": 3}, {"window": 20, "sinks": 0}, {"kv_dtype": "int8"},
    {"kv_dtype": "fp8", "window": 9, "sinks": 2}, {"kv_dtype": "int4", "block_size": 32}, {"kv_dtype": "float16"},
]  # fmt: skip


@EACH
@pytest.mark.parametrize("flags", FLAGS)
def test_every_cache_writes_the_same_text(model, flags):
    prompt = "Once upon a time there was a dog that could not sleep, and nobody knew why"
    texts = [
        model.generate(prompt, cache=cache, max_tokens=20, ignore_eos=True, temperature=0.7, seed=3, **flags).tokens
        for cache in ("none", "contiguous", "paged")
    ]
    assert texts[0] == texts[1] == texts[2]
    engine = Engine(model, CacheSpec("paged", **flags), num_blocks=60)
    options = Options(20, model.stream(prompt, temperature=0.7, seed=3).options.sampling, ignore_eos=True)
    first, again = (engine.generate([prompt], options)[0].tokens for _ in range(2))
    assert first == again == texts[0]
    assert engine.stats.prefix_hit_tokens > 0 or flags.get("kv_dtype") == "int4"  # shorter than int4's tile of 128


@EACH
def test_fewer_heads_are_the_mean_of_their_group(model):
    config = model.config
    if config.num_kv_heads == 1:
        model = replace(model, params=module_for(config).random_params(replace(config, num_kv_heads=2), scale=0.3))
        config = model.config
    one, split, dim = model.with_kv_heads(1), config.num_heads * config.head_dim, config.head_dim
    for ours, theirs in zip(one.params.blocks, model.params.blocks, strict=True):
        kv = theirs.qkv_weight[split:].reshape(2, config.num_kv_heads, dim, -1)
        assert np.allclose(ours.qkv_weight[split:], kv.mean(axis=1).reshape(2 * dim, -1), atol=1e-7)
        assert np.array_equal(ours.qkv_weight[:split], theirs.qkv_weight[:split])
    assert one.generate("Hello", max_tokens=5).tokens == one.generate("Hello", max_tokens=5, cache="paged").tokens
    with pytest.raises(UsageError, match="cannot be made of"):
        model.with_kv_heads(config.num_kv_heads + 1)


def test_a_prefix_stands_before_every_text():
    model = replace(tiny_llama(), prefix=(7, 8))
    assert model.encode("Hello") == [7, 8, *model.tokenizer.encode("Hello")]
    assert model.encode("") == [7, 8]
    assert model.generate("", max_tokens=3).prompt_tokens == [7, 8]
    with pytest.raises(UsageError, match="the prompt is empty"):
        tiny_llama().generate("")


def test_a_model_with_windows_of_its_own():
    """D03: layers [window 6, full]: the cache that a user does not choose has them, and so has every one that he does."""
    model = tiny_llama(windows=(6, None))
    for spec in (CacheSpec(), CacheSpec("paged")):
        assert [model.new_cache(50, spec).visibility(layer) for layer in (0, 1)] == [Visibility(6), Visibility()]
    narrow = CacheSpec(window=4)
    assert [model.new_cache(50, narrow).visibility(layer).window for layer in (0, 1)] == [4, 4]
    assert [model.new_cache(50, CacheSpec(window=9)).visibility(layer).window for layer in (0, 1)] == [6, 9]
    texts = [model.generate("Once upon a time", max_tokens=20, cache=cache).tokens for cache in ("none", "contiguous", "paged")]
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(UsageError, match="sinks do not go with a model whose layers have windows"):
        model.generate("Once", window=4, sinks=2)


def test_blocks_are_counted_by_the_layer_that_keeps_the_most():
    spec, step = CacheSpec("paged", block_size=4), 8
    assert spec.blocks_for(1000, step, small_llama(windows=(6, None)).visibility()) == 250
    assert spec.blocks_for(1000, step, small_llama(windows=(6, 12)).visibility()) == (12 + 8 + 8) // 4
    assert CacheSpec("paged", block_size=4, window=20).blocks_for(1000, step, small_llama(windows=(6, 12)).visibility()) == 7
    pool = tiny_llama(windows=(6, 12)).new_pool(8, spec)
    cache = pool.new_sequence()
    for _ in range(30):
        cache.extend(8)
        cache.commit()
    assert pool.blocks.stats().used <= 7
