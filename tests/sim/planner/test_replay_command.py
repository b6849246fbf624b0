"""The `replay` command, as a user calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nanokv.commands.replay import replay
from nanokv.errors import CapacityError, ConfigError, NanoKVError, UsageError
from sim.planner.paging import Paged
from sim.planner.replay import Limits, Replay
from sim.planner.replay_report import COLOURS, figure_of
from sim.planner.server import Outcome, Policy
from sim.planner.step_time import StepTime
from sim.planner.traces import Request
from tests.support import ROOT

PUBLISHED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "planner_configs.json").read_text())
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = AZURE + "".join(f"{at / 4},{100 + 37 * at % 900},{1 + 11 * at % 90}\n" for at in range(40))
SHARES = ("tokens", "reserved", "internal", "external", "cached", "free")


def config(folder: Path, name: str = "meta-llama/Llama-3.1-8B", **changes: object) -> str:
    path = folder / f"{name.split('/')[-1]}.json"
    path.write_text(json.dumps({**PUBLISHED[name]["config"], **changes}))
    return str(path)


def trace(folder: Path, text: str = ROWS, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def mooncake(folder: Path) -> str:
    """Six conversations of four turns: each turn's prompt is the last one's and 600 tokens more."""
    rows = [
        {"timestamp": 1000 * (6 * turn + who), "input_length": 600 * (turn + 1), "output_length": 20,
         "hash_ids": [100 * who + at for at in range(600 * (turn + 1) // 512)] + [9000 + 10 * who + turn]}
        for turn in range(4) for who in range(6)
    ]  # fmt: skip
    return trace(folder, "\n".join(json.dumps(each) for each in rows), "trace.jsonl")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(replay, arguments)


def run(*arguments: str) -> str:
    result = invoke(*arguments)
    if isinstance(result.exception, NanoKVError):
        assert not result.stdout  # nothing half-reported
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_json(tmp_path: Path) -> None:
    found = answer(trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100")
    assert (found["trace"], found["requests"], found["model"], found["gpu"]) == ("trace.csv", 40, "Llama-3.1-8B", "h100")
    assert found["kv_bytes_per_token"] == 131_072
    assert found["prefix_blocks"] is None
    assert [(each["policy"], each["block_size"]) for each in found["policies"]] == [
        ("max", None), ("pow2", None), ("oracle", None), ("paged", 16), ("paged", 256),
    ]  # fmt: skip
    for each in found["policies"]:
        assert each["finished"] == 40
        assert set(each["shares"]) == set(SHARES)
        assert sum(each["shares"].values()) == pytest.approx(1)
        assert {len(values) for values in each["series"].values()} == {100}
    useful = {each["policy"]: each["useful_share"] for each in found["policies"] if each["block_size"] in (None, 16)}
    assert useful["max"] < useful["pow2"] < useful["oracle"] < useful["paged"]


def test_prefixes(tmp_path: Path) -> None:
    """Each of the last three turns finds the full blocks of the turn before: 512 * (1 + 2 + 3) tokens at the most."""
    found = answer(
        mooncake(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--policy", "paged", "--block-size", "512"
    )
    without, with_reuse = found["policies"]
    assert (without["prefix_reuse"], with_reuse["prefix_reuse"]) == (False, True)
    assert without["prefix_hit_tokens"] == 0
    assert with_reuse["prefix_hit_tokens"] == with_reuse["infinite_cache_hit_tokens"] == 6 * 512 * (1 + 2 + 3)
    assert with_reuse["prefix_saved_bytes"] == with_reuse["prefix_hit_tokens"] * 131_072
    assert found["prefix_blocks"]["ids"] == 6 * (2 + 3 + 4 + 5)
    assert found["prefix_blocks"]["unique_ids"] == 6 * (4 + 4)


@pytest.mark.parametrize(("flag", "reuse"), [("--prefix", [True]), ("--no-prefix", [False])])
def test_with_and_without(tmp_path: Path, flag: str, reuse: list[bool]) -> None:
    found = answer(
        mooncake(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--policy", "paged", "--block-size", "16", flag
    )
    assert [each["prefix_reuse"] for each in found["policies"]] == reuse


def test_the_table_is_within_100_columns(tmp_path: Path) -> None:
    text = run(mooncake(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--block-size", "1024")
    assert max(map(len, text.splitlines())) <= 100
    for label in ("max", "pow2", "oracle", "paged 1024", "paged 1024 prefix"):
        assert any(line.startswith(label) for line in text.splitlines()), label
    assert "a cache that never evicts finds" in text


def test_the_same_seed_gives_the_same_answer(tmp_path: Path) -> None:
    def at(seed: str) -> str:
        return run(
            trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--poisson", "--rate", "9", "--seed", seed, "--json"
        )

    assert at("3") == at("3")
    assert at("3") != at("4")


def test_a_higher_rate_runs_more_at_once(tmp_path: Path) -> None:
    slow, fast = (
        answer(trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--policy", "paged", "--rate", rate)
        for rate in ("1", "100")
    )
    assert slow["arrival_seconds"] == pytest.approx(39)
    assert fast["policies"][0]["mean_running"] > slow["policies"][0]["mean_running"]


def test_processes_give_the_same_answer(tmp_path: Path) -> None:
    arguments = (mooncake(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--policy", "oracle", "--policy", "paged",
                 "--json")  # fmt: skip
    assert run(*arguments, "--jobs", "2") == run(*arguments, "--jobs", "1")


def test_the_rate_is_that_of_the_requests_that_are_replayed(tmp_path: Path) -> None:
    """11 requests in 10 s, whatever comes after them."""
    late = ROWS + "5000,10,10\n"
    found = answer(trace(tmp_path, late), "--config", config(tmp_path), "--gpu", "h100", "--policy", "paged",
                   "--requests", "11", "--rate", "1")  # fmt: skip
    assert found["arrival_seconds"] == pytest.approx(10)


def test_limits(tmp_path: Path) -> None:
    found = answer(trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--rate", "1000", "--max-sequences", "3",
                   "--max-batch-tokens", "200", "--max-model-len", "500", "--requests", "30")  # fmt: skip
    assert found["requests"] == 30
    for each in found["policies"]:
        assert each["peak_running"] == 3
        assert each["finished"] + each["refused_too_long"] == 30
        assert each["refused_too_long"] > 0
    assert any("longer than 500 tokens" in note for note in found["notes"])


def test_first_fit_wastes_no_rounding(tmp_path: Path) -> None:
    one, other = (
        answer(trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--policy", "oracle", "--allocator", name)
        for name in ("buddy", "first-fit")
    )
    assert one["policies"][0]["shares"]["internal"] > 0
    assert other["policies"][0]["shares"]["internal"] == 0


def test_memory_of_its_own_and_shards(tmp_path: Path) -> None:
    found = answer(
        trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--kv-memory", "1GiB", "--tensor-parallel", "2"
    )
    assert (found["kv_bytes"], found["kv_bytes_per_token"]) == (1 << 30, 65_536)
    assert found["policies"][-1]["slots"] == 16_384
    too_large = {each["policy"]: each["refused_too_large"] for each in found["policies"]}
    assert too_large == {"max": 40, "pow2": 0, "oracle": 0, "paged": 0}  # 131,072 positions do not fit in 16,384
    assert any(note.startswith("max: 40 requests could never fit") for note in found["notes"])


def test_windows_are_noted(tmp_path: Path) -> None:
    text = run(trace(tmp_path), "--config", config(tmp_path, "google/gemma-2-9b-it"), "--gpu", "h100", "--policy", "paged")
    assert "layers with a window hold every token too" in text


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (["--rate", "0"], UsageError, "rate 0.0 is out of range"),
    (["--poisson"], UsageError, "--poisson needs --rate"),
    (["--prefix"], UsageError, "names no prefixes"),
    (["--gpu", "h1000"], UsageError, "unknown GPU"),
    (["--kv-dtype", "int3"], UsageError, "unknown KV dtype"),
    (["--columns", "prompt=x"], UsageError, "has no column 'x'"),
    (["--kv-memory", "12MB", "--block-size", "16"], NanoKVError, "no request of trace.csv fits"),
    (["--kv-memory", "1kB"], CapacityError, "do not hold one token"),
    (["--kv-memory", "200kB"], CapacityError, "do not hold one block of 16 tokens"),
    (["--max-model-len", "10"], NanoKVError, "no request of trace.csv fits: 40 are longer than 10 tokens"),
])  # fmt: skip
def test_bad_values_are_named(tmp_path: Path, arguments: list[str], error: type[NanoKVError], message: str) -> None:
    with pytest.raises(error, match=message):
        run(trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", *arguments)


@pytest.mark.parametrize("arguments", [
    ["--policy", "slab"], ["--block-size", "0"], ["--requests", "0"], ["--max-sequences", "0"], ["--columns", "prompt"],
    ["--columns", "when=x"], ["--columns", "prompt=a,prompt=b"], ["--allocator", "slab"],
])  # fmt: skip
def test_bad_arguments_are_usage_errors(tmp_path: Path, arguments: list[str]) -> None:
    assert invoke(trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", *arguments).exit_code == 2


def test_a_gpu_that_cannot_hold_the_weights(tmp_path: Path) -> None:
    """81,559 MiB x 0.9 = 76.97 GB, less 141.11 GB of bfloat16 weights and 1.69 GB: 65.83 GB too much."""
    arguments = (trace(tmp_path), "--config", config(tmp_path, "meta-llama/Llama-3.1-70B"), "--gpu", "h100")
    with pytest.raises(CapacityError, match=r"does not fit on h100: .* are 65\.83 GB = 61\.31 GiB more than the 76\.97 GB"):
        run(*arguments)
    assert run(*arguments, "--tensor-parallel", "4")


@pytest.mark.parametrize(("text", "message"), [
    (AZURE + "0,5,-1\n", "line 2: GeneratedTokens -1 is negative"), (AZURE + "0,,1\n", "line 2: ContextTokens is missing"),
    (AZURE, "holds no requests"), ("ContextTokens,GeneratedTokens\n1,2\n", "has no arrivals: give --poisson and --rate"),
])  # fmt: skip
def test_a_bad_trace_reports_nothing(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(NanoKVError, match=message):
        run(trace(tmp_path, text), "--config", config(tmp_path), "--gpu", "h100")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NanoKVError, match=r"absent\.csv cannot be read"):
        run(str(tmp_path / "absent.csv"), "--config", config(tmp_path), "--gpu", "h100")
    with pytest.raises(NanoKVError, match="no such file"):
        run(trace(tmp_path), "--config", str(tmp_path / "absent.json"), "--gpu", "h100")


def test_models_that_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --params or --weights-bytes"):
        run(trace(tmp_path), "--config", config(tmp_path, "openai/gpt-oss-120b"), "--gpu", "h100")
    path = tmp_path / "bloom.json"
    path.write_text(json.dumps({"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 64}))
    with pytest.raises(UsageError, match="give --max-model-len"):
        run(trace(tmp_path), "--config", str(path), "--gpu", "h100", "--params", "1000")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_files(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"replay.{suffix}"
    run(mooncake(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--block-size", "512", "--plot", str(path))
    assert path.stat().st_size > 10_000


def test_a_plot_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "absent" / "replay.png", tmp_path / "replay.odd"):
        with pytest.raises(UsageError, match="cannot write"):
            run(trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--plot", str(path))
        assert not path.exists()


def test_plot_has_the_series(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    requests = tuple(Request(at / 10, 200 + 30 * at, 40) for at in range(12))
    memory = Paged(400, 16)
    done = Replay(requests, memory, StepTime(10**9, 10**5, 10**8), Limits(512, 8, 4096))
    outcome = Outcome(Policy("paged", 16), memory.slots, done.run(), done.timeline)
    left, right = figure_of([outcome]).axes
    series = done.timeline.series(200)
    assert [each.get_label() for each in left.collections] == list(COLOURS)
    tokens = left.collections[0].get_paths()[0].vertices[:, 1].max()
    assert tokens == pytest.approx(100 * series.values["tokens"].max() / memory.slots)
    running, waiting, preempted = right.get_lines()
    assert running.get_ydata() == pytest.approx(series.values["running"])
    assert waiting.get_ydata() == pytest.approx(series.values["waiting"])
    assert preempted.get_ydata() == pytest.approx(series.values["preemptions"])


def test_the_progress_bar_is_no_part_of_the_answer(tmp_path: Path) -> None:
    result = invoke(trace(tmp_path), "--config", config(tmp_path), "--gpu", "h100", "--json")
    assert json.loads(result.stdout)
