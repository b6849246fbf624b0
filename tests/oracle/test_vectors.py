"""Cases as files and results judged: what was written is judged as what was run, and damage is one line."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from click.testing import CliRunner

from cli import main
from nanokv import oracle
from nanokv.errors import UsageError
from nanokv.oracle.case import Case
from nanokv.oracle.kernels import nanokv_attend
from nanokv.oracle.spec import Spec
from nanokv.oracle.vectors import VectorsError
from tests.oracle.kernels import kernel
from tests.support import ROOT

SPECS = [
    Spec(((1, 5), (3, 20)), layout="vllm", dtype="bfloat16", num_heads=4, num_kv_heads=2, head_dim=8),
    Spec(((4, 4),), layout="vllm", dtype="bfloat16", num_heads=4, num_kv_heads=2, head_dim=8, unused="large"),
]


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def results(directory, path, run_kernel, skip=(), lse=False):
    outs = {}
    for name, call in oracle.read_vectors(directory):
        if name not in skip:
            outs[f"{name}.out"] = run_kernel(call)
        if lse:
            outs[f"{name}.lse"] = Case(call.spec).expected.lse.astype(np.float32)
    oracle.write_results(path, outs)
    return path


@pytest.fixture
def folder(tmp_path):
    oracle.write_vectors(tmp_path / "v", SPECS)
    return tmp_path / "v"


@pytest.mark.parametrize(
    ("layout", "dtype", "kv_dtype", "scales"),
    [
        ("contiguous", "float64", None, "head"),
        ("vllm", "bfloat16", "fp8", "token"),
        ("flashinfer-nhd", "float16", "int8", "head"),
        ("flashinfer-hnd", "float32", None, "head"),
        ("hf", "bfloat16", "int8", "tensor"),
    ],
)
def test_a_right_kernel_passes_through_files_in_every_layout(tmp_path, layout, dtype, kv_dtype, scales):
    specs = oracle.suite(layout, dtype, kv_dtype, head_dim=8, phases=["decode"], scales=scales)
    written = oracle.write_vectors(tmp_path / "v", specs)
    assert written == sum(path.stat().st_size for path in (tmp_path / "v").iterdir())
    report = oracle.verify(tmp_path / "v", results(tmp_path / "v", tmp_path / "r.safetensors", nanokv_attend))
    assert report.passed, str(report)
    assert len(report.verdicts) == len(specs)


def test_files_hold_what_the_case_holds(folder):
    for (_, call), spec in zip(oracle.read_vectors(folder), SPECS, strict=True):
        arrays = Case(spec).arrays()
        assert call.spec == spec
        assert all(arrays[each].tobytes() == call.arrays[each].tobytes() for each in arrays)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (folder / "000.safetensors").stat().st_mode == (folder / "manifest.json").stat().st_mode
    assert manifest["cases"][0]["output"] == {"name": "000.out", "dtype": "bfloat16", "shape": [4, 4, 8]}


def test_a_fault_is_named_from_files(folder, tmp_path):
    path = results(folder, tmp_path / "r.safetensors", kernel("kv_heads_tiled"))
    result = run("verify", folder, path)
    assert result.exit_code == 1
    assert "heads 1..2 of 4 equal what you get when kv heads are tiled" in result.stdout
    found = json.loads(run("verify", folder, path, "--json").stdout)
    assert found["diagnosis"]["names"] == ["kv_heads_tiled"]


def test_results_with_missing_cases_strangers_and_wrong_shapes(folder, tmp_path):
    path = results(folder, tmp_path / "r.safetensors", kernel(), skip={"001"})
    result = run("verify", folder, path)
    assert result.exit_code == 1
    assert "the results have no tensor 001.out" in result.stdout
    oracle.write_results(path, {"000.out": np.zeros((2, 2)), "7.out": np.zeros(1)})
    result = run("verify", folder, path)
    assert result.exit_code == 1
    assert "the output's shape is [2, 2], not [4, 4, 8]" in result.stdout
    assert "the results have a tensor '7.out' that belongs to no case" in result.stdout


def test_results_may_lie_in_several_files(folder, tmp_path):
    for name, call in oracle.read_vectors(folder):
        oracle.write_results(tmp_path / f"{name}.safetensors", {f"{name}.out": kernel()(call)})
    parts = [tmp_path / "000.safetensors", tmp_path / "001.safetensors"]
    assert run("verify", folder, *parts).exit_code == 0
    assert "the results have no tensor 001.out" in run("verify", folder, parts[0]).stdout
    result = run("verify", folder, *parts, parts[0])
    assert result.exit_code == 1
    assert "has a tensor 000.out, which another results file has too" in result.stderr
    assert run("verify", folder).exit_code == 2


def test_a_log_sum_exp_in_the_results_is_judged(folder, tmp_path):
    assert oracle.verify(folder, results(folder, tmp_path / "r.safetensors", kernel(), lse=True)).passed
    outs = {f"{name}.out": kernel()(call) for name, call in oracle.read_vectors(folder)}
    oracle.write_results(tmp_path / "r.safetensors", {**outs, "000.lse": np.zeros((4, 4), np.float32)})
    assert "log-sum-exp 0 at" in str(oracle.verify(folder, tmp_path / "r.safetensors"))


def test_the_command_writes_what_it_says(tmp_path):
    out = tmp_path / "vectors"
    result = run("vectors", "-o", out, "--layout", "vllm", "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--dtype", "bf16",
                 "--phase", "decode", "--feature", "window")  # fmt: skip
    assert result.exit_code == 0, result.output
    specs = [call.spec for _, call in oracle.read_vectors(out)]
    assert f"{len(specs)} cases, " in result.stdout
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in specs} == {(4, 2, 8, "bfloat16")}
    assert any(spec.window for spec in specs)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--heads", 4], "error: --heads and --kv-heads go together"),
        (["--heads", 4, "--kv-heads", 3], "error: no such case: 4 heads are no multiple of 3 kv heads"),
        (["--kv-dtype", "int3"], "error: unknown number format 'int3'"),
        (["--layout", "vllm", "--block-size", 7], "error: no such case: block size 7 does not divide 128"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(tmp_path, arguments, line):
    result = run("vectors", "-o", tmp_path / "v", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(line)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_not_touched(folder):
    with pytest.raises(UsageError, match="exists: name a directory that does not"):
        oracle.write_vectors(folder, SPECS)


def test_a_failure_half_way_leaves_nothing(tmp_path):
    def specs():
        yield SPECS[0]
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        oracle.write_vectors(tmp_path / "v", specs())
    assert list(tmp_path.iterdir()) == []


DAMAGE = {
    "manifest gone": (lambda d, r: (d / "manifest.json").unlink(), "cannot be read"),
    "manifest no JSON": (lambda d, r: (d / "manifest.json").write_text("{"), "is not JSON"),
    "manifest of another kind": (lambda d, r: (d / "manifest.json").write_text('{"format": 9}'), "not a manifest of format 1"),
    "no cases": (lambda d, r: (d / "manifest.json").write_text('{"format": 1, "cases": []}'), "names no cases"),
    "case without file": (lambda d, r: (d / "manifest.json").write_text('{"format": 1, "cases": [{}]}'), "a case has no name"),
    "vectors changed": (lambda d, r: flip(d / "000.safetensors"), "it was changed"),
    "vectors cut": (lambda d, r: (d / "001.safetensors").write_bytes(b"\xff" * 8), "is not a safetensors file"),
    "vectors gone": (lambda d, r: (d / "001.safetensors").unlink(), "cannot be read"),
    "results gone": (lambda d, r: r.unlink(), "cannot be read"),
    "results no safetensors": (lambda d, r: r.write_text("hello"), "is not a safetensors file"),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_one_line_and_exit_code_1(folder, tmp_path, what):
    path = results(folder, tmp_path / "r.safetensors", kernel())
    damage, line = DAMAGE[what]
    damage(folder, path)
    result = run("verify", folder, path)
    assert result.exit_code == 1
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1
    with pytest.raises(VectorsError):
        oracle.verify(folder, path)


def test_inputs_that_this_numpy_would_not_draw_are_judged_but_not_diagnosed(tmp_path, monkeypatch):
    monkeypatch.setattr("nanokv.oracle.values.SPREAD", 1.0)
    oracle.write_vectors(tmp_path / "v", SPECS)
    path = results(tmp_path / "v", tmp_path / "r.safetensors", kernel("kv_heads_tiled"))
    right = results(tmp_path / "v", tmp_path / "right.safetensors", kernel())
    monkeypatch.undo()
    report = oracle.verify(tmp_path / "v", path)
    assert not report.passed
    assert report.diagnosis is None
    assert "no fault is named: this NumPy draws other numbers" in str(report)
    assert oracle.verify(tmp_path / "v", right).passed


COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@pytest.mark.skipif(COMPILER is None, reason="not run: there is no C compiler")
def test_the_c_example_reads_computes_and_is_verified(tmp_path):
    program = tmp_path / "read_vectors"
    source = ROOT / "examples" / "oracle" / "read_vectors.c"
    subprocess.run([COMPILER, "-O2", "-Wall", "-Werror", "-o", program, source, "-lm"], check=True)
    assert run("vectors", "-o", tmp_path / "v", "--feature", "scale").exit_code == 0
    outs = []
    for case in sorted((tmp_path / "v").glob("*.safetensors")):
        outs.append(tmp_path / case.name)
        done = subprocess.run([program, case, outs[-1]], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("0 of ")
    assert run("verify", tmp_path / "v", *outs).exit_code == 0
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(case.read_bytes().replace(b'"scale":"0.3"', b'"scale":"0.4"'))
    wrong = subprocess.run([program, damaged, tmp_path / "wrong.safetensors"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert subprocess.run([program, outs[0]], capture_output=True).returncode == 2  # results are no case


@pytest.mark.skipif(shutil.which("cc") is None, reason="not run: there is no C compiler called cc")
@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("", "", None),
        ("h / (heads / kv_heads)", "h % kv_heads", "kv_heads_tiled"),
        ("starts[b + 1] + row + 1", "starts[b + 1] + row", "mask_one_early"),
        ("p[j] *= scale", "", "scale_missing"),
    ],
)
def test_the_example_of_a_kernel_in_c_is_judged_as_it_is(tmp_path, right, wrong, fault):
    from examples.oracle.c_kernel import SOURCE, built, kernel_of

    function = built(tmp_path, SOURCE.replace(right, wrong))
    report = oracle.check(kernel_of(function), "vllm", phases=["chunked"], twice=False, smallest=False)
    assert report.fault == fault
    assert report.passed == (fault is None)


def test_the_pytest_example_passes():
    from examples.oracle import test_my_kernel

    assert oracle.check(test_my_kernel.my_kernel, "vllm", phases=["decode"], head_dim=8, twice=False).passed
    test_my_kernel.test_whatever_hypothesis_finds()
