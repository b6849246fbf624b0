"""The machine that a trace is replayed on: what is left for K and V to the byte, and policies in their order."""

import json
from typing import Any

import pytest

from nanokv.errors import CapacityError, ConfigError
from sim.gpus import get_gpu
from sim.planner.capacity import need
from sim.planner.geometry import geometry_from_config
from sim.planner.kv_formats import kv_format
from sim.planner.model import Model
from sim.planner.plan import split_budget
from sim.planner.replay import Limits
from sim.planner.server import Policy, Server, build_server, policies, replay_all
from sim.planner.traces import Request, Trace
from sim.planner.weights_size import Weights
from tests.support import ROOT

PUBLISHED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "planner_configs.json").read_text())
GIB = 1 << 30
DEEPSEEK = {
    "model_type": "deepseek_v32", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 4, "index_topk": 16, "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
}  # fmt: skip


def server(config: dict[str, Any], kv_bytes: int | None = None, sequences: int = 8, weights: int = GIB) -> Server:
    model = Model("model", geometry_from_config(config), Weights(weights, weights // 2, "stated"))
    budget = split_budget(80 * GIB, 0.9, weights, GIB, 1)
    return build_server(model, get_gpu("h100"), kv_format("bfloat16"), budget, Limits(64, sequences, 4096), kv_bytes=kv_bytes)


def llama(kv_bytes: int) -> Server:
    return server(PUBLISHED["meta-llama/Llama-3.1-8B"]["config"], kv_bytes)


def test_what_weights_and_overhead_leave() -> None:
    """80 GiB x 0.9 - 1 - 1 GiB, in tokens of 128 KiB."""
    found = server(PUBLISHED["meta-llama/Llama-3.1-8B"]["config"])
    assert (found.kv_bytes, found.token_bytes) == (70 * GIB, 131_072)
    assert found.slots == 573_440


@pytest.mark.parametrize(("extra", "slots"), [(-1, 99), (0, 100), (131_071, 100)])
def test_slots_are_whole_tokens(extra: int, slots: int) -> None:
    assert llama(100 * 131_072 + extra).slots == slots


def test_blocks_are_whole_blocks() -> None:
    trace = Trace("t", (Request(0.0, 3, 2),))
    found = llama(100 * 131_072)
    assert Policy("paged", 16).memory(found, trace).slots == 96
    assert Policy("max").memory(found, trace).slots == 100
    with pytest.raises(CapacityError, match="do not hold one block of 128 tokens"):
        Policy("paged", 128).memory(found, trace)


def test_fixed_state_is_set_aside_for_as_many_as_may_run() -> None:
    config = {
        "model_type": "jamba", "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 8, "attn_layer_offset": 4,
        "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
    }  # fmt: skip
    state = need(geometry_from_config(config), 1, 1, kv_format("bfloat16")).state
    assert state > 7 * 128 * 16  # 7 Mamba layers, 128 wide inside, 16 states a channel, and their convolutions
    for sequences in (1, 11):
        assert server(config, GIB, sequences).kv_bytes == GIB - sequences * state
    with pytest.raises(CapacityError, match="for the fixed state of 11 sequences, do not hold one token"):
        server(config, 11 * state, 11)


def test_an_indexers_keys_take_their_part_of_a_token() -> None:
    """2 layers: 576 elements in bfloat16, and 128 in fp8 with a float32 scale."""
    assert server(DEEPSEEK, GIB).token_bytes == 2 * (576 * 2 + 128 + 4)


def test_weights_that_do_not_fit_and_models_that_keep_nothing() -> None:
    with pytest.raises(CapacityError, match=r"weights of 85\.90 GB = 80\.00 GiB .* are 9\.66 GB = 9\.00 GiB more than"):
        server(PUBLISHED["meta-llama/Llama-3.1-8B"]["config"], weights=80 * GIB)
    nothing = {"model_type": "nemotron_h", "num_hidden_layers": 1, "hybrid_override_pattern": "M", "hidden_size": 64,
               "num_attention_heads": 8, "num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
               "ssm_state_size": 16, "conv_kernel": 4, "torch_dtype": "bfloat16", "head_dim": 8}  # fmt: skip
    with pytest.raises(ConfigError, match="keeps nothing that grows"):
        server(nothing, GIB)


def test_nothing_is_replayed_where_one_policy_cannot_be() -> None:
    told: list[int] = []
    trace = Trace("t", (Request(0.0, 3, 2),))
    with pytest.raises(CapacityError):
        replay_all(trace, llama(100 * 131_072), [Policy("oracle"), Policy("paged", 128)], told.append)
    assert not told


def test_every_combination_that_means_something() -> None:
    made = policies(["paged", "max"], [16, 64], [False, True], "buddy")
    assert [policy.label for policy in made] == ["max", "paged 16", "paged 64", "paged 16 prefix", "paged 64 prefix"]
