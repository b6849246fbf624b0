"""What other calculators got wrong, one test a report: the small input, and the right value."""

import json
from typing import Any

import pytest

from nanokv.errors import ConfigError
from sim.planner.capacity import first_token_bytes, max_tokens, need, pool_tokens
from sim.planner.geometry import config_dtype, geometry_from_config
from sim.planner.gguf_file import geometry_from_gguf
from sim.planner.kv_formats import kv_format
from sim.planner.layers import Geometry, Kind
from sim.planner.plan import Question, plan
from tests.support import ROOT

GIB = 1 << 30
PUBLISHED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "planner_configs.json").read_text())


def geometry(name: str, **changes: Any) -> Geometry:
    return geometry_from_config({**PUBLISHED[name]["config"], **changes})


def per_token(found: Geometry, form: str = "bfloat16") -> int:
    return first_token_bytes(found, kv_format(form))


def test_m04_a_declared_head_dim_wins_over_width_by_heads() -> None:
    """ai-dynamo/dynamo 14431: Qwen3-0.6B is 1024 wide with 16 heads, of 128 and not of 64."""
    assert per_token(geometry("Qwen/Qwen3-0.6B")) == 114_688


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"])
def test_m04_zero_heads_are_an_error_not_a_division(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} 0"):
        geometry("Qwen/Qwen3-0.6B", **{key: 0})


def test_m05_grouped_queries_are_not_counted_as_many_heads() -> None:
    """jranaraki/vllm-fit 2, and three more: 8 of 32 heads hold keys."""
    assert per_token(geometry("meta-llama/Llama-3.1-8B")) == 131_072
    assert per_token(geometry("meta-llama/Llama-2-7b-hf"), "float16") == 524_288


@pytest.mark.parametrize("path", [["text_config"], ["llm_config"], ["language_config"], ["thinker_config", "text_config"]])
def test_m06_the_text_part_of_a_multimodal_file_wins(path: list[str]) -> None:
    """jundot/omlx 1448: the outer object holds the vision tower's sizes."""
    raw: dict[str, Any] = PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]["config"]
    for key in reversed(path):
        raw = {"model_type": "some_vlm", "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, key: raw}
    assert per_token(geometry_from_config(raw)) == 57_344


@pytest.mark.parametrize(
    "raw", [{}, {"model_type": "some_vlm", "vision_config": {"hidden_size": 1280}}, {"model_type": "llama"}]
)
def test_m06_nothing_found_is_an_error_never_defaults(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        geometry_from_config(raw)


def test_m07_windowed_layers_hold_the_first_token_too() -> None:
    """alvarobartt/hf-mem 60: gpt-oss-120b is 73,728 bytes a token, not the 36,864 of its full layers."""
    found = geometry("openai/gpt-oss-120b")
    assert per_token(found) == 73_728
    # The engine's log: 5.38 GiB and 78,384 tokens. 5.38 is rounded to 0.005, which is 73 tokens.
    assert abs(pool_tokens(found, int(5.38 * GIB), kv_format("bfloat16")) - 78_384) <= 0.005 * GIB / 73_728


def test_m08_windowed_layers_are_capped() -> None:
    """gpustack/gguf-parser-go 32: gpt-oss-20b at 131,072 tokens is 3.0029 GiB, not 6.0."""
    found = need(geometry("openai/gpt-oss-20b"), 131_072, 1, kv_format("bfloat16"))
    assert round(found.kv / GIB, 4) == 3.0029
    assert found.allocated == 6 * GIB


def test_m09_what_the_layers_need_and_what_one_pool_reserves_are_both_named() -> None:
    """alvarobartt/hf-mem 70: 6.09 and 12.00 GiB are both right, of different things."""
    found = need(geometry("openai/gpt-oss-20b"), 8192, 32, kv_format("bfloat16"))
    assert (found.kv / GIB, found.allocated / GIB) == (6.09375, 12.0)


def test_m10_the_inverse_is_of_the_function_not_of_a_rate() -> None:
    """ai-dynamo/aiconfigurator 1201: Gemma-2-9B grows half as fast once its windows are full."""
    found, form = geometry("google/gemma-2-9b-it"), kv_format("bfloat16")
    rate = 344_064
    budget = rate * 8192
    tokens = max_tokens(found, budget, 1, form)
    assert tokens is not None
    assert tokens == 4096 + 2 * (8192 - 4096)  # past 4,096 only 21 of 42 layers grow
    assert need(found, tokens, 1, form).kv <= budget < need(found, tokens + 1, 1, form).kv


def test_m11_linear_layers_do_not_grow() -> None:
    """jundot/omlx 2725: of 64 layers 16 attend, so 64 tokens are 4 MiB and not 16."""
    raw = {"model_type": "qwen3_5_text", "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
           "head_dim": 256, "hidden_size": 5120, "torch_dtype": "bfloat16"}  # fmt: skip
    found = geometry_from_config(raw)
    assert per_token(found) == 65_536
    at_64, at_128 = (need(found, tokens, 1, kv_format("bfloat16")) for tokens in (64, 128))
    assert at_64.kv == 4 << 20
    assert at_64.state == at_128.state > 0


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("nested", [False, True])
def test_m12_dtype_under_either_name_in_either_spelling(key: str, value: str, nested: bool) -> None:
    """unslothai/unsloth 3352: KeyError torch_dtype."""
    assert config_dtype({key: value} if nested else {}, () if nested else ({key: value},)) == ("bfloat16", None)


def test_m12_absent_dtype_takes_a_stated_default() -> None:
    found = geometry("openai/gpt-oss-20b")
    assert found.dtype == "bfloat16"
    assert any("no dtype" in note for note in found.notes)


def test_m13_each_model_is_counted_in_its_own_dtype() -> None:
    """huggingface/accelerate 3383: a base of float32 assumed for a float16 file."""
    base = geometry("Qwen/Qwen3-4B")
    wide = geometry("Qwen/Qwen3-4B", torch_dtype="float32")
    assert [per_token(each, each.dtype) for each in (base, wide)] == [147_456, 294_912]


def test_m14_bytes_not_bits_and_kv_heads_not_width() -> None:
    """vllm-project/vllm 22291: 1.6 MB by hand, 28 times too much."""
    found = geometry("Qwen/Qwen2.5-7B-Instruct")
    assert per_token(found, "float16") == 57_344
    int8 = 28 * 4 * 2 * 4  # a float32 scale for each layer, head, K and V
    assert per_token(found, "int8") == 28_672 + int8


def test_m15_totals_are_of_the_whole_model() -> None:
    """rohitg00/ai-engineering-from-scratch 57: 10.4 GB, 32 GB and 512 MB for one thing."""
    assert need(geometry("meta-llama/Llama-3.1-70B"), 32_768, 1, kv_format("bfloat16")).kv == 10_737_418_240


def test_m16_tokens_times_rate_is_the_pool() -> None:
    """redhat-performance/configiq 112: three numbers in one report disagree."""
    form = kv_format("bfloat16")
    for name in PUBLISHED:
        found = geometry(name)
        rate = first_token_bytes(found, form)
        assert need(found, 4096, 3, form).allocated == 3 * 4096 * rate, name
        if not any(layer.window for layer in found.layers):
            assert need(found, 4096, 3, form).kv == 3 * 4096 * rate, name


def test_m16_gemma4_full_layers_have_heads_of_their_own() -> None:
    assert per_token(geometry("google/gemma-4-31B")) == 901_120


def test_m17_an_unknown_latent_attention_is_not_taken_for_grouped_queries() -> None:
    """jundot/omlx 2626: 84 KB where 15.57 were measured."""
    raw = {"model_type": "deepseek_v4", "num_hidden_layers": 43, "hidden_size": 4096, "num_attention_heads": 64,
           "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "compress_ratios": [4, 128] * 21 + [4]}  # fmt: skip
    with pytest.raises(ConfigError, match="unknown attention family"):
        geometry_from_config(raw)
    with pytest.raises(ConfigError, match=r"(q_lora_rank|compress_ratios).*unknown attention family"):
        geometry_from_config({**raw, "model_type": "llama"})


def test_m18_a_hybrids_log_line_is_no_rate() -> None:
    """vllm-project/vllm 51041: tokens from concurrency. One context's bytes over its tokens is not the first token's."""
    found, form = geometry("openai/gpt-oss-120b"), kv_format("bfloat16")
    assert need(found, 65_536, 1, form).kv < 65_536 * first_token_bytes(found, form)
    answer = plan(found, Question(65_536, 1, form), 16 * GIB)
    assert answer.as_needed is not None
    assert answer.pool_tokens is not None
    assert answer.pool_tokens < (answer.as_needed.max_requests or 0) * 65_536  # both are reported, neither for the other


def test_m19_a_window_without_effect_is_no_window() -> None:
    """unslothai/unsloth 5225: Phi-3.5's window exceeds its positions; Qwen 2.5's is switched off."""
    for name in ("microsoft/Phi-3.5-mini-instruct", "Qwen/Qwen2.5-7B-Instruct"):
        assert {(layer.kind, layer.window) for layer in geometry(name).layers} == {(Kind.FULL, None)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", 200_704),
        ("nvidia/Nemotron-H-56B", 40_960),
        ("XiaomiMiMo/MiMo-V2-Flash", 222_720),
    ],
)
def test_m20_layers_that_differ(name: str, expected: int) -> None:
    assert per_token(geometry(name)) == expected


def test_m21_expanded_latent_attention_has_keys_wider_than_values() -> None:
    """abetlen/llama-cpp-python 1939: 24,576 elements for K and 16,384 for V in each layer, never twice one of them."""
    raw = {"model_type": "deepseek_v2", "num_hidden_layers": 60, "hidden_size": 5120, "num_attention_heads": 128,
           "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # fmt: skip
    metadata = {"general.architecture": "deepseek2", "deepseek2.block_count": 60, "deepseek2.attention.head_count": 128,
                "deepseek2.attention.kv_lora_rank": 512, "deepseek2.attention.key_length": 192,
                "deepseek2.attention.value_length": 128}  # fmt: skip
    for found in (geometry_from_config(raw, expand_latent=True), geometry_from_gguf(metadata, expand_latent=True)):
        layer = found.layers[0]
        assert (layer.kv_heads * layer.head_dim_k, layer.kv_heads * layer.head_dim_v) == (24_576, 16_384)
    latent = geometry_from_config(raw).layers[0]
    assert (latent.kv_heads * latent.head_dim_k, latent.head_dim_v) == (576, 0)
