"""The `size` command, as a user calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nanokv.commands.size import size
from nanokv.errors import ConfigError, NanoKVError, UsageError
from sim.planner.capacity import need
from sim.planner.kv_formats import kv_format
from sim.planner.model import read_model
from sim.planner.plan import OVERHEAD, Question, plan
from sim.planner.report import figure_of, size_of
from tests.support import ROOT

PUBLISHED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "planner_configs.json").read_text())
CONTRACT = {
    "model_type", "layers", "kv_bytes", "allocated_bytes", "kv_bytes_first_token", "fits", "max_tokens", "max_requests",
    "state_bytes", "cross_attention_bytes", "indexer_bytes", "weights_bytes", "overhead_bytes", "notes",
}  # fmt: skip


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, str]:
    """Every published config as <short name>.json."""
    paths = {}
    for name, row in PUBLISHED.items():
        path = tmp_path / f"{name.split('/')[-1]}.json"
        path.write_text(json.dumps(row["config"]))
        paths[path.stem] = str(path)
    return paths


def run(*arguments: str) -> str:
    result = CliRunner().invoke(size, arguments)
    if isinstance(result.exception, NanoKVError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def answer(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_json_of_a_hybrid(configs: dict[str, str]) -> None:
    found = answer(configs["gpt-oss-20b"], "--context", "8192", "--batch", "32")
    assert set(found) >= CONTRACT
    assert found["model_type"] == "gpt_oss"
    assert found["layers"] == [
        {"kind": "sliding_attention", "count": 12, "kv_heads": 8, "head_dim_k": 64, "head_dim_v": 64, "window": 128},
        {"kind": "full_attention", "count": 12, "kv_heads": 8, "head_dim_k": 64, "head_dim_v": 64, "window": None},
    ]
    assert found["kv_bytes"] == int(6.09375 * (1 << 30))
    assert found["allocated_bytes"] == 12 << 30
    assert found["kv_bytes_first_token"] == 49_152
    assert (found["fits"], found["max_tokens"]) == (None, None)


def test_kv_dtypes_and_the_files_own(configs: dict[str, str]) -> None:
    bytes_of = {
        form: answer(configs["Qwen2.5-7B-Instruct"], "--kv-dtype", form)["kv_bytes_first_token"]
        for form in ("fp32", "fp16", "bf16", "fp8", "int8", "int4", "q8_0", "q4_0")
    }
    assert bytes_of == {"fp32": 114_688, "fp16": 57_344, "bf16": 57_344, "fp8": 28_672, "int8": 29_568, "int4": 21_504,
                        "q8_0": 30_464, "q4_0": 16_128}  # fmt: skip
    assert answer(configs["Llama-2-7b-hf"])["kv_dtype"] == "float16"


def test_the_log_of_an_rtx_4090(configs: dict[str, str]) -> None:
    """Llama-3.1-8B at 0.9: vLLM's log has 41,408 tokens. Of the memory that it saw, weights alone would leave 50,850."""
    found = answer(configs["Llama-3.1-8B"], "--gpu", "rtx-4090")
    assert found["overhead_bytes"] == OVERHEAD
    assert abs(found["pool_tokens"] - 41_408) <= 5_000_000 / 131_072 + 16  # the overhead is rounded to 0.005 GB
    seen = str(int((50_850 * 131_072 + 2 * 8_030_261_248) / 0.9) + 1)
    assert answer(configs["Llama-3.1-8B"], "--gpu-memory", seen, "--overhead", "0")["max_tokens"] == 50_850


def test_logs_of_other_cards_lie_above(configs: dict[str, str]) -> None:
    """Of Qwen3-4B an L4 had 83,488 slots, as vLLM's log says: the overhead of another card is on the safe side, by less than
    a twentieth."""
    found = answer(configs["Qwen3-4B"], "--gpu", "l4")
    assert 0.95 * 83_488 < found["pool_tokens"] <= 83_488


def test_a_gpu_with_room(configs: dict[str, str]) -> None:
    found = answer(configs["Llama-3.1-8B"], "--gpu", "h100", "--context", "8192", "--batch", "4")
    budget = int((81_559 << 20) * 0.9) - 2 * 8_030_261_248 - OVERHEAD
    assert found["kv_budget_bytes"] == budget
    assert found["fits"]
    assert found["spare_bytes"] == budget - 4 * 8192 * 131_072
    assert found["max_tokens"] == budget // (4 * 131_072)
    assert found["max_requests"] == budget // (8192 * 131_072)
    assert found["max_tokens_one_pool"] == found["max_tokens"] // 16 * 16


def test_a_gpu_that_cannot_hold_the_weights(configs: dict[str, str]) -> None:
    found = answer(configs["Llama-3.1-70B"], "--gpu", "h100", "--context", "1000")
    assert (found["fits"], found["max_tokens"], found["max_requests"], found["pool_tokens"]) == (False, 0, 0, 0)
    text = run(configs["Llama-3.1-70B"], "--gpu", "h100", "--context", "1000")
    assert f"the weights and the overhead alone are {size_of(-found['kv_budget_bytes'])} too much" in text


def test_tensor_parallel(configs: dict[str, str]) -> None:
    """8 key-value heads over 16 GPUs: one head on each, twice in all. A latent is on every GPU in full."""
    llama = answer(configs["Llama-3.1-70B"], "--gpu", "h100", "--tensor-parallel", "16", "--context", "1000")
    assert llama["kv_bytes"] == 1000 * 327_680
    assert llama["kv_bytes_per_gpu"] * 8 == llama["kv_bytes"]
    assert llama["weights_bytes_per_gpu"] == -(-2 * 70_553_706_496 // 16)
    latent = answer(configs["DeepSeek-V2-Lite"], "--tensor-parallel", "4", "--context", "1000")
    assert latent["kv_bytes_per_gpu"] == latent["kv_bytes"]
    with pytest.raises(ConfigError, match="32 attention heads cannot be split over 3 GPUs"):
        run(configs["Llama-3.1-8B"], "--tensor-parallel", "3", "--context", "1000")


def test_a_windowed_model_runs_out_of_requests_but_not_of_context(configs: dict[str, str]) -> None:
    found = answer(configs["Mistral-7B-v0.1"], "--gpu", "h100")
    assert found["max_tokens"] is None
    assert found["max_tokens_one_pool"] is not None
    assert "no limit tokens" in run(configs["Mistral-7B-v0.1"], "--gpu", "h100")


def test_several_models_side_by_side(configs: dict[str, str]) -> None:
    names = ("Llama-3.1-8B", "gpt-oss-20b", "DeepSeek-V2-Lite")
    found = answer(*(configs[name] for name in names), "--context", "4096")
    assert [row["model"] for row in found] == list(names)
    lines = run(*(configs[name] for name in names), "--context", "4096").splitlines()
    assert len(lines) == 2 + len(names)
    assert len({len(line) for line in lines[1:]}) == 1  # columns line up
    with pytest.raises(UsageError, match="different numbers of positions"):
        run(configs["Llama-3.1-8B"], configs["gpt2"])


def test_mixed_dtypes_each_by_its_own(configs: dict[str, str]) -> None:
    rows = answer(configs["Llama-2-7b-hf"], configs["Llama-3.1-8B"], "--context", "10")
    assert [row["kv_dtype"] for row in rows] == ["float16", "bfloat16"]


def test_stated_weights(configs: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="give --params or --weights-bytes"):
        run(configs["gpt-oss-120b"], "--gpu", "h100")
    stated = answer(configs["gpt-oss-120b"], "--gpu", "h100", "--weights-bytes", "60.8GiB")
    assert stated["weights_bytes"] == int(60.8 * (1 << 30))
    counted = answer(configs["gpt-oss-120b"], "--gpu", "h100", "--params", "1000000", "--weights-dtype", "fp8")
    assert counted["weights_bytes"] == 1_000_000


def test_bytes_of_cache_without_a_gpu(configs: dict[str, str]) -> None:
    found = answer(configs["opt-13b"], "--kv-memory", "12GiB", "--block-size", "1")
    assert found["pool_tokens"] == found["max_tokens"] == 15_728
    with pytest.raises(UsageError, match="--kv-memory is for a plan without a GPU"):
        run(configs["opt-13b"], "--kv-memory", "12GiB", "--gpu", "h100", "--params", "1000")


@pytest.mark.parametrize("value", ["12", "12GB", "1.5GiB", "12 kib", "1_000", "1,000MB"])
def test_sizes_that_are_read(configs: dict[str, str], value: str) -> None:
    assert answer(configs["gpt2"], "--kv-memory", value)["kv_budget_bytes"] > 0


@pytest.mark.parametrize("arguments", [
    ["--kv-memory", "12 stone"], ["--kv-memory", "-1"], ["--context", "0"], ["--batch", "0"], ["--block-size", "0"],
    ["--tensor-parallel", "0"], ["--mla", "odd"], ["--params", "0"], ["--weights-bytes", "0"], ["--gpu-memory", "0GB"],
])  # fmt: skip
def test_bad_arguments_are_usage_errors(configs: dict[str, str], arguments: list[str]) -> None:
    result = CliRunner().invoke(size, [configs["gpt2"], *arguments])
    assert result.exit_code == 2


@pytest.mark.parametrize(("arguments", "message"), [
    (["--gpu", "h1000"], "unknown GPU"), (["--kv-dtype", "int3"], "unknown KV dtype"),
    (["--gpu", "h100", "--utilisation", "0"], "utilisation 0"), (["--gpu", "h100", "--utilisation", "1.1"], "utilisation 1.1"),
])  # fmt: skip
def test_bad_values_are_named(configs: dict[str, str], arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(configs["gpt2"], *arguments)


def test_block_formats_need_heads_that_they_divide(configs: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="do not divide a head of 80"):
        run(configs["phi-2"], "--kv-dtype", "q8_0")


def test_no_positions_and_no_context(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 64}))
    with pytest.raises(UsageError, match="give --context"):
        run(str(path))


@pytest.mark.parametrize("content", ["", "[1]", "{", '"x"'])
def test_not_a_config(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        run(str(path), "--context", "1")


def test_a_directory_with_weights(tmp_path: Path, configs: dict[str, str]) -> None:
    """The headers win over the count of the config."""
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(PUBLISHED["openai-community/gpt2"]["config"]))
    save_file({"w": np.zeros(1000, np.float16)}, tmp_path / "model" / "model.safetensors")
    found = answer(str(tmp_path / "model"))
    assert (found["model"], found["weights_bytes"], found["parameters"]) == ("model", 2000, 1000)
    assert found["weights_source"] == "safetensors headers"


def test_latent_and_expanded(configs: dict[str, str]) -> None:
    latent, expanded = (answer(configs["DeepSeek-V2-Lite"], "--mla", mode, "--context", "1") for mode in ("latent", "expanded"))
    assert latent["kv_bytes"] == 27 * 576 * 2
    assert expanded["kv_bytes"] == 27 * 16 * (192 + 128) * 2


def test_more_tokens_than_positions_is_noted(configs: dict[str, str]) -> None:
    assert "more than the model's 1,024 positions" in run(configs["gpt2"], "--context", "2000")
    assert "more than the model's" not in run(configs["gpt2"], "--context", "1024")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_files(tmp_path: Path, configs: dict[str, str], suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"kv.{suffix}"
    run(configs["gemma-2-9b-it"], configs["Llama-3.1-8B"], "--gpu", "h100", "--context", "8192", "--plot", str(path))
    assert path.stat().st_size > 10_000


def test_plot_has_the_function_and_the_limit(configs: dict[str, str]) -> None:
    pytest.importorskip("matplotlib")
    model, form = read_model(configs["gemma-2-9b-it"]), kv_format("bf16")
    found = plan(model.geometry, Question(8192, 16, form), available=50 << 30)
    axes = figure_of([model], [found]).axes[0]
    needed, pool, limit, _ = axes.get_lines()
    assert found.as_needed is not None
    tokens, values = needed.get_data()
    assert tokens[-1] >= (found.as_needed.max_tokens or 0)  # the line crosses the limit within the picture
    assert [round(value * (1 << 30)) for value in values] == [need(model.geometry, int(t), 16, form).total for t in tokens]
    assert all(a >= b for a, b in zip(pool.get_ydata(), values, strict=True))
    assert set(limit.get_ydata()) == {50.0}


def test_plot_of_weights_that_do_not_fit_says_how_much_is_missing(configs: dict[str, str]) -> None:
    pytest.importorskip("matplotlib")
    model = read_model(configs["gpt2"])
    axes = figure_of([model], [plan(model.geometry, Question(512, 1, kv_format("bf16")), available=-(3 << 30))]).axes[0]
    limit = axes.get_lines()[1]
    assert set(limit.get_ydata()) == {0}
    assert limit.get_label().endswith("nothing is left, 3.00 GiB are missing")
    assert axes.get_ylim()[0] == 0


def test_a_plot_that_cannot_be_written_leaves_nothing(tmp_path: Path, configs: dict[str, str]) -> None:
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "absent" / "kv.png", tmp_path / "kv.odd"):
        with pytest.raises(UsageError, match="cannot write"):
            run(configs["gpt2"], "--plot", str(path))
        assert not path.exists()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.02 kB = 1.00 KiB"),
        (10_737_418_240, "10.74 GB = 10.00 GiB"),
        (-2_000_000, "-2.00 MB = -1.91 MiB"),
    ],
)
def test_sizes_in_both_units(count: int, text: str) -> None:
    assert size_of(count) == text
