import numpy as np
import pytest

from nanokv.errors import UsageError
from nanokv.kernels.choice import PackedMemory
from nanokv.models.convert import pool_kv_heads
from nanokv.models.gpt2 import forward, random_params
from tests.support import nan_cache, small_config


def test_heads_become_the_mean_of_their_group():
    """Heads 0, 1 -> 0 and 2, 3 -> 1, keys and values, weights and biases; queries stay."""
    params = random_params(small_config(heads=4, kv_heads=4, dim=8))
    pooled = pool_kv_heads(params, 2)
    assert pooled.config.num_kv_heads == 2
    for old, new in zip(params.blocks, pooled.blocks, strict=True):
        assert np.array_equal(new.qkv_weight[:32], old.qkv_weight[:32])
        for start, at in ((32, 32), (64, 48)):
            heads = old.qkv_weight[start : start + 32].reshape(4, 8, 32)
            expected = np.stack([heads[:2].mean(0), heads[2:].mean(0)]).reshape(16, 32)
            assert np.array_equal(new.qkv_weight[at : at + 16], expected)
            heads = old.qkv_bias[start : start + 32].reshape(4, 8)
            assert np.array_equal(new.qkv_bias[at : at + 16], np.stack([heads[:2].mean(0), heads[2:].mean(0)]).ravel())


def test_equal_heads_are_pooled_without_a_difference():
    """Where the heads of a group are the same, grouping changes nothing but rounding of a mean of equals: none."""
    params = pool_kv_heads(random_params(small_config(heads=4, kv_heads=4, dim=8)), 2)
    config = params.config
    grouped = forward(params, np.arange(50), nan_cache(config, 50))
    blocks = []
    for block in params.blocks:
        kv = block.qkv_weight[32:].reshape(2, 2, 8, 32).repeat(2, axis=1).reshape(64, 32)
        bias = block.qkv_bias[32:].reshape(2, 2, 8).repeat(2, axis=1).ravel()
        both = np.concatenate([block.qkv_weight[:32], kv]), np.concatenate([block.qkv_bias[:32], bias])
        blocks.append(type(block)(**{**vars(block), "qkv_weight": both[0], "qkv_bias": both[1]}))
    full = type(params)(**{**vars(params), "config": small_config(heads=4, kv_heads=4, dim=8), "blocks": tuple(blocks)})
    again = pool_kv_heads(full, 2)
    assert np.array_equal(forward(again, np.arange(50), nan_cache(config, 50)), grouped)


def test_quantised_weights_are_not_quantised_again():
    """The mean is that of the decoded weights, in float32; what is not averaged stays the very same matrix."""
    params = random_params(small_config(heads=4, kv_heads=4, dim=8)).to(PackedMemory("numpy", np, "int4"))
    assert pool_kv_heads(params, 4) is params
    for old, new in zip(params.blocks, pool_kv_heads(params, 2).blocks, strict=True):
        weights = old.qkv_weight.to_array()
        heads = weights[32:].reshape(2, 2, 2, 8, 32).mean(axis=2).reshape(32, 32)
        assert np.array_equal(new.qkv_weight.to_array(), np.concatenate([weights[:32], heads]))
        assert new.fc_weight is old.fc_weight


@pytest.mark.parametrize("count", [0, -1, 3, 8])
def test_numbers_that_do_not_divide_are_refused(count):
    with pytest.raises(UsageError, match=f"{count} key-value heads cannot be made of 4"):
        pool_kv_heads(random_params(small_config(heads=4, kv_heads=4)), count)
