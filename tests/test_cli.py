"""The command line: what a shell sees. Every failure is one line and an exit code."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from nanokv.commands.generate import generate
from nanokv.engine import Engine
from tests.support import ROOT

TIMEOUT = 60


def run(*args, stdin=None, env=None, check=None):
    result = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *args],
        input=stdin, capture_output=True, text=True, timeout=TIMEOUT, env=os.environ | (env or {}), encoding="utf-8",
    )  # fmt: skip
    if check is not None:
        assert result.returncode == check, result.stderr
    return result


def refused(*args, code, words, **more):
    """The command fails with `code` and one line on standard error that has `words`; nothing on standard output."""
    result = run(*args, **more)
    assert result.returncode == code, result
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    if code == 2 and lines[0].startswith("Usage:"):  # click's own: usage, hint, error
        lines = [line for line in lines if line.startswith("Error:")]
    assert len(lines) == 1, result.stderr
    assert words in lines[0]
    assert "Traceback" not in result.stderr


def test_generate_prints_the_prompt_and_goes_on():
    out = run("generate", "Hello, how", "--max-tokens", "8", check=0).stdout
    assert out.startswith("Hello, how")
    assert len(out) > len("Hello, how\n")


def test_json_is_one_object_a_prompt_and_agrees_with_plain_text():
    plain = run("generate", "Once upon", "--max-tokens", "6", check=0).stdout
    lines = run("generate", "Once upon", "Hello", "--max-tokens", "6", "--json", "--logprobs", "2", check=0).stdout.splitlines()
    first, second = map(json.loads, lines)
    assert "Once upon" + first["text"] + "\n" == plain
    assert first["model"] == "default"
    assert first["numerics"] in ("exact", "compiled")
    assert len(first["logprobs"]) == len(first["tokens"])
    assert second["prompt_tokens"] != first["prompt_tokens"]


def test_with_and_without_a_cache_and_stream_the_text_is_the_same():
    texts = [
        run("generate", "A dog", "--max-tokens", "10", *more, check=0).stdout
        for more in ([], ["--cache", "none"], ["--no-stream"], ["--backend", "numpy"], ["--stats"])
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert texts[4].startswith(texts[0])
    for name in ("prefill", "decode", "KV cache", "recomputing", "read"):
        assert name in texts[4]


CACHES = [
    ["--cache", "paged", "--block-size", "16"], ["--cache", "paged", "--block-size", "1"], ["--cache", "paged"],
]  # fmt: skip


def test_every_lossless_cache_prints_the_same_text():
    expected = run("generate", "A dog", "--max-tokens", "12", check=0).stdout
    for more in CACHES:
        assert run("generate", "A dog", "--max-tokens", "12", *more, check=0).stdout == expected


@pytest.mark.parametrize("flags", [
    ["--window", "16"], ["--window", "16", "--sinks", "4"], ["--kv-dtype", "int8"], ["--kv-dtype", "int4"],
    ["--kv-dtype", "fp8", "--kv-scale", "0.05"], ["--kv-heads", "2"],
])  # fmt: skip
def test_paged_contiguous_and_none_agree_on_every_flag(flags):
    texts = {run("generate", "A dog", "--max-tokens", "9", *flags, "--cache", cache, check=0).stdout
             for cache in ("contiguous", "paged", "none")}  # fmt: skip
    assert len(texts) == 1


def test_prompts_that_run_together_get_what_they_get_alone():
    together = run("generate", "A dog", "Hello, how", "--max-tokens", "9", "--json", check=0).stdout.splitlines()
    for line, prompt in zip(together, ["A dog", "Hello, how"], strict=True):
        alone = json.loads(run("generate", prompt, "--max-tokens", "9", "--json", check=0).stdout)
        assert json.loads(line)["tokens"] == alone["tokens"]
        assert json.loads(line)["cache"]["kind"] == "paged"


def test_copies_and_beams():
    args = "generate", "Hello", "--n", "3", "--temperature", "1", "--seed", "1", "--max-tokens", "6", "--json"
    lines = [json.loads(line) for line in run(*args, check=0).stdout.splitlines()]
    assert len({tuple(line["tokens"]) for line in lines}) == 3
    again = [json.loads(line) for line in run(*args, check=0).stdout.splitlines()]
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in again]
    out = json.loads(run("generate", "Hello", "--beams", "3", "--max-tokens", "5", "--json", check=0).stdout)
    scores = [beam["score"] for beam in out["beams"]]
    assert scores == sorted(scores, reverse=True)
    stats = run("generate", "Hello " * 40, "--beams", "3", "--max-tokens", "5", "--stats", check=0).stdout
    assert "bytes saved" in stats


def test_an_endless_text_outgrows_the_context():
    out = run("generate", "Once", "--window", "32", "--sinks", "4", "--max-tokens", "530", "--ignore-eos", "--json", check=0)
    assert len(json.loads(out.stdout)["tokens"]) == 530


def test_prompts_from_standard_input_and_files(tmp_path):
    (tmp_path / "a.txt").write_text("Hello, how\n", encoding="utf-8")
    direct = run("generate", "Hello, how", "--max-tokens", "3", check=0).stdout
    assert run("generate", "--max-tokens", "3", stdin="Hello, how\n", check=0).stdout == direct
    assert run("generate", "--max-tokens", "3", "--file", str(tmp_path / "a.txt"), check=0).stdout == direct


def test_a_seed_repeats_and_float64_runs():
    args = "generate", "The", "--temperature", "1", "--top-k", "50", "--seed", "7", "--max-tokens", "12"
    assert run(*args, check=0).stdout == run(*args, check=0).stdout
    run("generate", "The", "--dtype", "float64", "--numerics", "fast", "--max-tokens", "2", check=0)


def test_stop_understands_escapes():
    text = json.loads(run("generate", "Hello, how are you?", "--json", "--stop", "\\n", "--ignore-eos", check=0).stdout)["text"]
    assert "\n" not in text


def test_help_is_quick_and_names_every_option():
    start = time.perf_counter()
    run("--help", check=0)
    assert time.perf_counter() - start < 5  # a safety net; what matters is the next test
    text = run("generate", "--help", check=0).stdout
    for option in ("--model", "--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty",
                   "--seed",
                   "--stop", "--cache", "--numerics", "--dtype", "--backend", "--stats", "--json", "--no-stream",
                   "--block-size", "--window", "--sinks", "--kv-dtype", "--kv-scale", "--kv-heads", "--n", "--beams",
                   "--length-penalty", "--ignore-eos", "--logprobs", "--file"):  # fmt: skip
        assert option in text


def test_help_imports_nothing_heavy():
    code = "import sys, cli; cli.main(['generate', '--help'], standalone_mode=False); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for module in ("numpy", "tiktoken", "rich", "safetensors", "matplotlib"):
        assert f"'{module}'" not in out


@pytest.mark.parametrize(("args", "code", "words"), [
    (["Hi", "--temperature", "-1"], 2, "temperature -1.0 is out of range"),
    (["Hi", "--temperature", "nan"], 2, "temperature nan"),
    (["Hi", "--top-p", "1.5"], 2, "top-p 1.5"),
    (["Hi", "--min-p", "-0.5"], 2, "min-p -0.5"),
    (["Hi", "--top-k", "-1"], 2, "top-k -1"),
    (["Hi", "--max-tokens", "0"], 2, "max-tokens 0"),
    (["Hi", "--max-tokens", "-3"], 2, "max-tokens -3"),
    (["Hi", "--max-tokens", "many"], 2, "many"),
    (["Hi", "--seed", "-1"], 2, "seed -1"),
    (["Hi", "--repetition-penalty", "0"], 2, "repetition-penalty 0.0"),
    (["Hi", "--stop", ""], 2, "empty"),
    (["Hi", "--stop", "\\u12"], 2, "escape"),
    (["Hi", "--cache", "ring"], 2, "ring"),
    (["Hi", "--cache", "paged", "--block-size", "48"], 2, "block size 48 does not divide"),
    (["Hi", "--cache", "paged", "--block-size", "0"], 2, "block size 0"),
    (["Hi", "--cache", "paged", "--block-size", "16", "--kv-dtype", "int4"], 2, "no multiple of 32"),
    (["Hi", "--window", "0"], 2, "window 0"),
    (["Hi", "--sinks", "4"], 2, "--sinks needs --window"),
    (["Hi", "--window", "500", "--sinks", "20"], 2, "519 positions, more than the model's 512"),
    (["Hi", "--kv-dtype", "int8", "--kv-scale", "1"], 2, "fp8 only"),
    (["Hi", "--kv-heads", "4"], 2, "4 key-value heads cannot be made of 6"),
    (["Hi", "--kv-heads", "12"], 2, "12 key-value heads"),
    (["Hi", "--n", "0"], 2, "n 0"),
    (["Hi", "--n", "4"], 2, "greedy continuations would be equal"),
    (["Hi", "--n", "4", "--temperature", "1", "--cache", "contiguous"], 2, "need --cache paged"),
    (["Hi", "--n", "4", "--beams", "4", "--temperature", "1"], 2, "use one of them"),
    (["Hi", "--beams", "1"], 2, "beams 1"),
    (["Hi", "--beams", "4", "--temperature", "1"], 2, "leave out temperature"),
    (["Hi", "--beams", "4", "--stop", "x"], 2, "stop strings"),
    ([""], 2, "the prompt is empty"),
    (["--file", "no/such/file"], 2, "cannot read no/such/file"),
    (["Hi", "--model", "./nowhere"], 1, "nowhere"),
    (["word " * 600], 1, "512 positions"),
])  # fmt: skip
def test_bad_input_is_one_line(args, code, words):
    refused("generate", *args, code=code, words=words)


def test_no_gpu_is_one_line():
    refused("generate", "Hi", "--backend", "cupy", code=1, words="backend cupy is not usable", env={"CUDA_VISIBLE_DEVICES": ""})


def test_an_empty_standard_input_is_refused():
    refused("generate", code=2, words="the prompt is empty", stdin="")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    refused("generate", "--file", str(tmp_path / "a.txt"), code=2, words="not UTF-8")


def test_debug_shows_the_traceback():
    result = run("generate", "Hi", "--top-p", "2", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_a_prompt_may_look_like_an_option():
    assert run("generate", "--max-tokens", "1", "--", "--debug", check=0).stdout.startswith("--debug")


def test_end_of_text_typed_by_a_user_is_text():
    tokens = json.loads(run("generate", "<|endoftext|>", "--max-tokens", "1", "--json", check=0).stdout)["prompt_tokens"]
    assert len(tokens) > 1
    assert 4095 not in tokens


def test_a_full_context_says_why_it_ended():
    result = run("generate", "word " * 500, "--max-tokens", "64", "--ignore-eos", check=0)
    assert "no position for another token" in result.stderr


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} {ROOT / 'cli.py'} generate Hello --max-tokens 200 --ignore-eos | head -c 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=TIMEOUT)
    assert result.stdout == "H"
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


def test_an_interrupt_ends_with_the_text_so_far():
    """A text without end; what was shown up to then stands, and the code is 130."""
    args = [sys.executable, "-u", str(ROOT / "cli.py"), "generate", "Once upon a time", "--ignore-eos"]
    args += ["--window", "32", "--sinks", "4", "--max-tokens", "10000000"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(30).startswith("Once upon a time")
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert rest.endswith("\n")
    assert "Traceback" not in errors
    assert "interrupted" in errors


def test_an_interrupt_of_several_prompts_prints_what_there_is(monkeypatch):
    real, calls = Engine.step, []

    def step(engine):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(engine)

    monkeypatch.setattr(Engine, "step", step)
    result = CliRunner().invoke(generate, ["Once upon a time", "Hello", "--ignore-eos", "--json"])
    assert result.exit_code == 130
    runs = [json.loads(line) for line in result.stdout.splitlines()]
    assert [run["finish_reason"] for run in runs] == ["interrupted"] * 2
    assert [len(run["tokens"]) for run in runs] == [5, 5]


def test_bench_prints_its_numbers_and_one_object(tmp_path):
    out = json.loads(run("bench", "--contexts", "8,16", "--repeat", "2", "--json", check=0).stdout)
    assert set(out) == {
        "model", "numerics", "dtype", "threads", "blas", "read_gb_per_s", "decode_ms_per_token", "decode_gb_per_s",
        "share_of_read_bandwidth", "prefill_tokens_per_s", "curve",
    }  # fmt: skip
    assert [point["context"] for point in out["curve"]] == [8, 16]
    assert set(out["curve"][0]) == {"context", "cached_ms", "uncached_ms"}


@pytest.mark.parametrize(("args", "code", "words"), [
    (["--contexts", "8,x"], 2, "'8,x'"), (["--contexts", "512"], 2, "context 512"), (["--contexts", "0"], 2, "context 0"),
    (["--shape", "gpt5"], 2, "gpt5"), (["--repeat", "0"], 2, "0"),
])  # fmt: skip
def test_bad_benchmarks_are_one_line(args, code, words):
    refused("bench", *args, code=code, words=words)


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    pytest.importorskip("matplotlib")
    refused("bench", "--plot", str(tmp_path / "no" / "a.png"), code=2, words="cannot write")
    refused("bench", "--plot", str(tmp_path), code=2, words="is a directory")


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run("bench", "--contexts", "8,16", "--repeat", "1", "--plot", str(tmp_path / "a.png"), check=0)
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
