"""Parameter counts against the published files' totals. test_peer_transformers.py counts tiny models of each family."""

import json
from typing import Any

import pytest

from nanokv.errors import ConfigError
from sim.planner.geometry import geometry_from_config
from sim.planner.parameters import count_parameters
from tests.support import ROOT

PUBLISHED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "planner_configs.json").read_text())


def count(raw: dict[str, Any]) -> int:
    return count_parameters(raw, geometry_from_config(raw))


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # the tensors of the published safetensors files, as their hub pages total them
        ("openai-community/gpt2", 124_439_808),
        ("openai-community/gpt2-medium", 354_823_168),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("mistralai/Mistral-Nemo-Instruct-2407", 12_247_782_400),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("google/gemma-2b", 2_506_172_416),
        ("google/gemma-2-9b-it", 9_241_705_984),
        ("microsoft/Phi-3.5-mini-instruct", 3_821_079_552),
    ],
)
def test_published_counts(name: str, expected: int) -> None:
    assert count(PUBLISHED[name]["config"]) == expected


@pytest.mark.parametrize("name", ["openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V2-Lite", "bigscience/bloom-560m"])
def test_a_family_whose_layers_are_not_written_down_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="are not counted from its config.json"):
        count(PUBLISHED[name]["config"])


def test_a_multimodal_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="a multimodal file"):
        count({"model_type": "llava", "text_config": PUBLISHED["meta-llama/Llama-2-7b-hf"]["config"]})


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 0), ("intermediate_size", -1), ("tie_word_embeddings", 1)])
def test_absurd_values_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        count({**PUBLISHED["meta-llama/Llama-3.1-8B"]["config"], key: value})
