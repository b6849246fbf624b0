"""`simulate` and `check` as a user types them."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nanokv.commands.check import check
from nanokv.commands.simulate import simulate
from nanokv.errors import ConfigError, NanoKVError, UsageError
from sim.gpus import PRESETS
from sim.plot import MARKERS
from sim.schedules import SCHEDULES
from tests.support import ROOT


def run(*arguments: str) -> Result:
    """The command's result; an error of nanokv's is re-raised, as the command line above it would get it."""
    return CliRunner().invoke(simulate, arguments, catch_exceptions=False)


def lines_of(result: Result) -> list[str]:
    assert result.exit_code == 0
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    return result.stdout.splitlines()


def test_tile_128_alone_answers() -> None:
    text = "\n".join(lines_of(run("--tile", "128")))
    for expected in (
        "a100-80",
        "naive",
        "  softmax",
        "flash1",
        "flash2",
        "least possible",
        "values: 1 of 32 heads",
        "the runtime's",
    ):
        assert expected in text
    assert "NOT the runtime's bits" not in text


def test_the_published_numbers_come_out_of_the_command() -> None:
    found = json.loads(run("--seq", "1024", "--heads", "1", "--head-dim", "64", "--tile", "128", "--json").stdout)
    assert found["algorithms"]["naive"]["hbm_bytes"] == 8912896
    assert list(found) == ["gpu", "shape", "algorithms", "ratio_naive_to_tiled", "max_abs_error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seq", "1m", "--tile", "128"),
        ("--seq", "4k", "--q-len", "1", "--kv-heads", "8", "--per-tensor"),
        ("--seq", "256", "--backward", "--mask", "--dropout", "--per-tensor", "--l2"),
        ("--seq", "256", "--gpu", "a100-paper", "--no-causal", "--no-init", "--no-stats"),
        ("--seq", "100000", "--batch", "512", "--q-len", "1", "--kv-heads", "8", "--kv-dtype", "int4", "--window", "4096"),
        ("--list-gpus",),
    ],
    ids=" ".join,
)
def test_tables_fit_100_columns(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "…" not in result.stdout


def test_every_preset_is_listed_with_its_source() -> None:
    text = " ".join(run("--list-gpus").stdout.split())
    assert all(f"{gpu.name}: {gpu.source}" in text for gpu in PRESETS.values())


def test_csv_has_a_row_an_algorithm_and_agrees_with_json() -> None:
    arguments = ("--seq", "300", "--heads", "4", "--head-dim", "32")
    rows = list(csv.DictReader(io.StringIO(run(*arguments, "--csv").stdout)))
    found = json.loads(run(*arguments, "--json").stdout)["algorithms"]
    assert [row["algorithm"] for row in rows] == list(found)
    for row in rows:
        for field in ("hbm_read_bytes", "hbm_write_bytes", "hbm_bytes", "sram_peak_bytes", "flops"):
            assert int(row[field]) == found[row["algorithm"]][field]


def test_counting_only_says_so() -> None:
    text = run("--seq", "128", "--count-only").stdout
    assert "counted only: no values were computed" in text
    assert json.loads(run("--seq", "128", "--count-only", "--json").stdout)["max_abs_error"] is None


def test_executing_computes_every_head() -> None:
    assert "values: every head computed" in run("--seq", "512", "--heads", "8", "--execute").stdout


def test_a_sweep_prints_a_table_and_machine_forms() -> None:
    arguments = ("--sweep", "tile=32..128", "seq=256,512", "--algorithm", "flash2")
    assert len(lines_of(run(*arguments))) == 2 + 6
    rows = json.loads(run(*arguments, "--json").stdout)
    assert [(row["tile"], row["seq"]) for row in rows][:2] == [("32x32", 256), ("32x32", 512)]
    assert run(*arguments, "--csv").stdout.count("\n") == 7


def test_a_model_prints_both_phases(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = "\n".join(lines_of(run("--model", str(tmp_path), "--seq", "512")))
    assert "prefill: at least" in text
    assert "decode: at least" in text
    found = json.loads(run("--model", str(tmp_path), "--seq", "512", "--algorithm", "naive", "--json").stdout)
    assert [op["name"] for op in found["phases"]["decode"]["ops"]][4:7] == ["Q K^T", "softmax", "P V"]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_plot_is_written(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="not run: needs matplotlib (pip install 'nanokv[plot]')")
    path = tmp_path / f"p.{suffix}"
    run("--seq", "256", "--plot", str(path))
    assert path.stat().st_size > 5000


def test_every_algorithm_has_a_marker_of_its_own() -> None:
    assert len(set(MARKERS)) == len(MARKERS) >= len(SCHEDULES)


def test_a_plot_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not run: needs matplotlib (pip install 'nanokv[plot]')")
    with pytest.raises(UsageError, match="cannot write"):
        run("--seq", "64", "--plot", str(tmp_path / "p.docx"))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_plot_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NanoKVError, match=r"--plot needs matplotlib: pip install 'nanokv\[plot\]'"):
        run("--plot", str(tmp_path / "p.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "gtx"), "unknown GPU"),
        (("--dtype", "fp4"), "unknown dtype"),
        (("--tile", "0"), "at least 1 row"),
        (("--tile", "4096", "--seq", "8k"), "the largest that fits"),
        (("--seq", "0"), "seq must be"),
        (("--seq", "-3"), "--seq: '-3' is not a whole number"),
        (("--seq", "4kk"), "is not a whole number"),
        (("--heads", "6", "--kv-heads", "4"), "not divisible"),
        (("--algorithm", "magic"), "unknown algorithm"),
        (("tile=3",), "add --sweep"),
        (("--sweep",), "needs axes"),
        (("--sweep", "seq=64", "--execute"), "does not go with --execute"),
        (("--workers", "2"), "--workers is for --sweep"),
        (("--execute", "--count-only"), "contradict"),
        (("--json", "--csv"), "contradict"),
        (("--model", "x", "--csv"), "--model does not go with --csv"),
        (("--model", "x", "--q-len", "4"), "--model does not go with --q-len"),
        (("--model", "x", "--no-causal"), "--model does not go with --causal"),
        (("--model", "x", "--sweep", "seq=64"), "--sweep does not go with --model"),
        (("--sweep", "seq=64", "--plot", "x.png"), "--sweep does not go with --plot"),
        (("--sweep", "seq=64", "--per-tensor"), "--sweep does not go with --per-tensor"),
        (("--weights-dtype", "int8"), "--weights-dtype is for --model"),
        (("--model", "x", "--algorithm", "flash1"), "--algorithm naive"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_model_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot read nowhere"):
        run("--model", "nowhere")


def checked(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(check, [str(path), "--gpu", "a100-80", *arguments], catch_exceptions=False)


def test_check_accuses_and_exits_1(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("gpu,q_heads,kv_heads,batch,kv_len,us\nA,64,8,64,4096,600\nA,64,8,64,4096,300\nB,64,8,1,64,3\n")
    result = checked(path)
    assert result.exit_code == 1
    assert "2 rows checked, 1 set aside" in result.stdout
    assert "1 faster than possible" in result.stdout
    assert result.stdout.splitlines()[-1].split()[0] == "3"  # the line of the file
    assert max(map(len, result.stdout.splitlines())) <= 100
    found = json.loads(checked(path, "--json").stdout)
    assert (found["rows"], found["set_aside"], [each["line"] for each in found["impossible"]]) == (2, 1, [3])
    assert checked(path, "--where", "gpu=B").exit_code == 0


def test_check_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("gpu,q_heads,kv_heads,batch,kv_len,us\nA,64,8,64,4096,nan\n")
    for arguments, kind, message in (
        ((), NanoKVError, "line 2: us 'nan'"),
        (("--where", "gpu=C"), NanoKVError, "has no row with gpu=C"),
        (("--where", "gpu"), UsageError, "is not COLUMN=VALUE"),
        (("--time-column", "t"), UsageError, "has no column 't'"),
    ):
        with pytest.raises(kind, match=message):
            checked(path, *arguments)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from nanokv.commands.simulate import simulate; "
        "from nanokv.commands.check import check; "
        "assert all(CliRunner().invoke(each, ['--help']).exit_code == 0 for each in (simulate, check)); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'matplotlib', 'joblib', 'distributed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
