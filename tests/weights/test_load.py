"""What a source can be: the shipped model, a directory, an id on the hub; and what is said of anything else."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanokv.errors import CheckpointError, UsageError
from tests.support import ROOT
from tests.weights.files import CONFIG, arrays_of, assert_same, params_for, write_model
from weights import load, looks_like_path

PARAMS = params_for(CONFIG)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """In place of the hub: records what it is asked for, and gives a small model."""
    asked: list[str] = []

    def fetch(repo_id: str) -> Path:
        asked.append(repo_id)
        return write_model(tmp_path / "snapshot", CONFIG, arrays_of(PARAMS))

    monkeypatch.setattr("weights.hub.fetch", fetch)
    return asked


@pytest.mark.parametrize("source", ["gpt2", "openai-community/gpt2", "distilbert/distilgpt2", "a/B_c.d-1"])
def test_hub_ids(hub: list[str], source: str) -> None:
    checkpoint = load(source)
    assert hub == [source]
    assert checkpoint.name == source
    assert_same(checkpoint.params, PARAMS)


def test_a_directory_comes_before_the_hub(hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "gpt2", CONFIG, arrays_of(PARAMS))
    monkeypatch.chdir(tmp_path)
    assert load("gpt2").name == "gpt2"
    assert load("./gpt2/").name == "gpt2"
    assert load(Path("gpt2")).name == "gpt2"
    monkeypatch.chdir(tmp_path / "gpt2")
    assert load(".").name == "gpt2"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/gpt2").name == "gpt2"
    assert hub == []


PATHS = [
    "./x",
    "../x",
    ".",
    "~/x",
    "~nobody-of-this-name/x",
    "/x",
    "a/b/c",
    "x/",
    "a\\b",
    "C:\\x",
    "x.bin",
    "a/x.safetensors",
    "x.gguf",
]


@pytest.mark.parametrize("source", [path for path in PATHS if path != "."])
def test_what_looks_like_a_path_never_goes_to_the_hub(
    hub: list[str], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(source)
    assert hub == []
    if not source.endswith(".bin"):
        assert f"{source} does not exist: name a model directory, 'default', or an id on the hub like 'gpt2'" in str(
            caught.value
        )


def test_a_path_object_is_a_path(hub: list[str]) -> None:
    for path in (Path("gpt2-not-here"), Path("default")):
        with pytest.raises(CheckpointError, match=f"{path} does not exist"):
            load(path)
    assert hub == []


@pytest.mark.parametrize(("source", "expected"), [(path, True) for path in PATHS] + [("gpt2", False), ("openai/gpt2.5", False)])
def test_looks_like_path(source: str, expected: bool) -> None:
    assert looks_like_path(source) == expected


@pytest.mark.parametrize("source", ["two words", "-rf", "gpt2:latest", "https:x", "gpt2\n", "\0", "a" * 5000 + "!", "\u00e9"])
def test_what_is_nothing_at_all(hub: list[str], source: str) -> None:
    with pytest.raises(UsageError, match="is neither 'default', nor a directory, nor an id on the hub"):
        load(source)
    assert hub == []


def test_an_empty_name() -> None:
    with pytest.raises(UsageError, match="the name of the model is empty"):
        load("")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "gpt2"])
def test_a_file_gets_advice(hub: list[str], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the name alone could be an id on the hub."""
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    for source in (str(tmp_path / name), name):
        with pytest.raises(CheckpointError, match=rf"{name} is a file: name the directory that holds it"):
            load(source)
    assert hub == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_pickled_file_is_refused_unread(hub: list[str], tmp_path: Path, name: str) -> None:
    """There or not: the answer is about what it would be."""
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"{name} is a pickled checkpoint, and unpickling can run any code"):
            load(tmp_path / name)
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert hub == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "", "F32"])
def test_unknown_dtypes(dtype: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown dtype '{dtype}': choose one of float32, float64"):
        load("default", dtype=dtype)


def test_default_is_the_shipped_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the working directory holds."""
    write_model(tmp_path / "default", CONFIG, arrays_of(PARAMS))
    monkeypatch.chdir(tmp_path)
    assert load("./default").name == "default"
    checkpoint = load("default")
    assert checkpoint.name == "default"
    assert checkpoint.config != PARAMS.config
    assert checkpoint.tokenizer.vocab_size == checkpoint.config.vocab_size
    assert checkpoint.eos_token_ids == {checkpoint.tokenizer.special_tokens["<|endoftext|>"]}


def test_a_light_import() -> None:
    """The hub's package is imported when the hub is asked, not before."""
    heavy = ["huggingface_hub", "torch", "transformers", "tokenizers"]
    code = f"import sys, weights; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
