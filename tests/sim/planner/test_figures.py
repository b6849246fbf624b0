"""Published figures: papers' tables, engines' logs, and the geometry of public models."""

import json
from typing import Any

import pytest

from sim.planner.capacity import first_token_bytes, max_requests, need, pool_tokens
from sim.planner.geometry import geometry_from_config
from sim.planner.kv_formats import kv_format
from sim.planner.layers import Geometry, Kind
from sim.planner.report import size_of
from tests.support import ROOT

GIB = 1 << 30
PUBLISHED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "planner_configs.json").read_text())
FACTS = ROOT.parent / "shared" / "facts" / "model_configs.json"
FORM = kv_format("bfloat16")


def geometry(name: str, **changes: Any) -> Geometry:
    return geometry_from_config({**PUBLISHED[name]["config"], **changes})


@pytest.mark.parametrize(
    ("name", "context", "batch", "expected"),
    [
        ("Qwen/Qwen2.5-72B", 32_768, 1, 10_737_418_240),
        ("GPT-3 175B", 512 + 32, 64, 164_282_499_072),  # FlexGen, arXiv 2303.06865
        ("facebook/opt-175b", 512 + 32, 512, 1_314_259_992_576),  # FlexGen: 1.2 TB
        ("PaLM-540B as MHA", 2048, 512, 3_040_836_845_568),  # Pope et al., arXiv 2211.05102: 3 TB
        ("meta-llama/Llama-2-7b-hf", 4096, 1, 2 * GIB),
        ("meta-llama/Llama-3.1-8B", 8192, 1, GIB),
        ("mistralai/Mixtral-8x7B-v0.1", 32_768, 1, 4 * GIB),
    ],
)
def test_kv_bytes(name: str, context: int, batch: int, expected: int) -> None:
    assert need(geometry(name), context, batch, FORM).kv == expected


def test_qwen_as_multi_head_attention() -> None:
    assert need(geometry("Qwen/Qwen2.5-72B", num_key_value_heads=64), 32_768, 1, FORM).kv == 85_899_345_920


def test_gpt3_is_shown_in_both_units() -> None:
    found = need(geometry("GPT-3 175B"), 544, 64, FORM).kv
    assert size_of(found) == "164.28 GB = 153.00 GiB"
    assert round(found / 350e9, 2) == 0.47  # of its 350 GB of weights


def test_flexgens_formula() -> None:
    """M = 4 B L H (S + N) for multi-head attention in two bytes: H the width, S the prompt, N the output."""
    for layers, width, batch, prompt, output in ((96, 12_288, 64, 512, 32), (40, 5120, 3, 100, 7), (12, 768, 1, 1, 0)):
        raw = {"model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": width // 64, "torch_dtype": "float16"}
        assert need(geometry_from_config(raw), prompt + output, batch, FORM).kv == 4 * batch * layers * width * (
            prompt + output
        )


@pytest.mark.parametrize(
    ("name", "gib", "slots", "printed"),
    [
        ("facebook/opt-13b", 12, 15_728, "15.7K"),
        ("facebook/opt-175b", 264, 60_074, "60.1K"),
        ("facebook/opt-66b", 21, 9557, None),
    ],
)
def test_slots_of_the_paged_attention_paper(name: str, gib: int, slots: int, printed: str | None) -> None:
    """Kwon et al. 2023, table 1: memory for KV over bytes a token. 66B's 21 GiB is rounded, and prints 9.7K."""
    found = pool_tokens(geometry(name), gib * GIB, FORM, block_size=1)
    assert found == slots
    if printed:
        assert f"{found / 1000:.1f}K" == printed


@pytest.mark.parametrize(
    ("name", "form", "gib", "tokens", "rate"),
    [
        ("Qwen/Qwen3-4B", "bfloat16", 11.47, 83_488, 147_456),
        ("Qwen/Qwen3-4B", "fp8", 11.47, 166_992, 73_728),
        ("Qwen/Qwen3-1.7B", "bfloat16", 24.20, 226_528, 114_688),
        ("openai/gpt-oss-120b", "bfloat16", 5.38, 78_384, 73_728),
    ],
)
def test_log_lines_of_vllm(name: str, form: str, gib: float, tokens: int, rate: int) -> None:
    """The printed GiB are rounded to 0.005: what the tokens take must lie within that, and one block."""
    found = kv_format(form)
    assert first_token_bytes(geometry(name), found) == rate
    assert abs(tokens * rate - gib * GIB) <= 0.005 * GIB + 16 * rate
    assert abs(pool_tokens(geometry(name), int(gib * GIB), found) - tokens) <= 0.005 * GIB / rate + 16


def test_concurrency_of_vllm() -> None:
    """Qwen3-4B on an L4: 83,488 tokens are 2.55 requests of 32,768."""
    found = geometry("Qwen/Qwen3-4B")
    assert round(83_488 / 32_768, 2) == 2.55
    assert max_requests(found, 83_488 * 147_456, 32_768, FORM) == 2


def test_blocks_of_llama_on_an_rtx_4090() -> None:
    """2,588 blocks of 16 tokens at 131,072 bytes a token are 41,408 tokens."""
    assert pool_tokens(geometry("meta-llama/Llama-3.1-8B"), 2588 * 16 * 131_072, FORM) == 41_408


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai/gpt-oss-120b", {(Kind.SLIDING, 18, 8, 64, 128), (Kind.FULL, 18, 8, 64, None)}),
        ("google/gemma-2-9b-it", {(Kind.SLIDING, 21, 8, 256, 4096), (Kind.FULL, 21, 8, 256, None)}),
        ("meta-llama/Llama-4-Scout-17B-16E", {(Kind.CHUNKED, 36, 8, 128, 8192), (Kind.FULL, 12, 8, 128, None)}),
        ("mistralai/Mistral-7B-v0.1", {(Kind.SLIDING, 32, 8, 128, 4096)}),
        ("bigcode/starcoder2-7b", {(Kind.SLIDING, 32, 4, 128, 4096)}),
        ("deepseek-ai/DeepSeek-V2-Lite", {(Kind.MLA, 27, 1, 576, None)}),
        ("microsoft/phi-2", {(Kind.FULL, 32, 32, 80, None)}),
        ("EleutherAI/gpt-j-6b", {(Kind.FULL, 28, 16, 256, None)}),
    ],
)
def test_layers(name: str, expected: set[tuple[Any, ...]]) -> None:
    groups = geometry(name).groups()
    assert {(layer.kind, count, layer.kv_heads, layer.head_dim_k, layer.window) for layer, count in groups} == expected


def test_every_model_of_the_facts() -> None:
    """Layers, heads, widths, windows and positions of 30 public config.json files."""
    if not FACTS.exists():
        pytest.skip("not run: facts/model_configs.json is not beside the project")
    for row in json.loads(FACTS.read_text())["models"]:
        name, wanted = row["model"].split(" ")[0], row["normalised"]
        found = geometry(name)
        attending = [layer for layer in found.layers if layer.kind is not Kind.NONE]
        assert len(found.layers) == wanted["layers"], name
        assert len(attending) == wanted.get("attention_layers", wanted["layers"]), name
        assert found.num_heads == wanted["q_heads"], name
        assert {(layer.kv_heads, layer.head_dim_k) for layer in attending} == {(wanted["kv_heads"], wanted["head_dim"])}, name
        assert found.max_positions == (2048 if "bloom" in name else wanted["max_positions"]), name  # bloom: seq_length
        windows = {layer.window for layer in attending} - {None}
        limit = wanted.get("attention_chunk_size") or wanted["sliding_window"]
        assert windows == ({limit} if limit and limit < wanted["max_positions"] else set()), name
        if "sliding_layers" in wanted:
            assert sum(layer.kind is Kind.SLIDING for layer in attending) == wanted["sliding_layers"], name
