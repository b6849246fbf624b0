"""The hub, without a network: its cache on disk is real, what it answers is what huggingface_hub would raise."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanokv.errors import CheckpointError
from tests.weights.files import CONFIG, arrays_of, params_for, shard, write_model
from weights.hub import fetch

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")
utils = pytest.importorskip("huggingface_hub.utils")
REPO = "someone/tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a network that is not there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cached_model(cache: Path) -> Path:
    """The model in the layout of the cache."""
    folder, commit = cache / "models--someone--tiny", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    return write_model(folder / "snapshots" / commit, CONFIG, arrays_of(params_for(CONFIG)))


Answer = Callable[[bool], Path]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict[str, Any]]]:
    """Puts `answer(local_files_only)` in place of the download; gives the list of what was asked."""

    def install(answer: Answer) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def snapshot_download(repo_id: str, **options: Any) -> str:
            asked.append({"repo_id": repo_id, **options})
            return str(answer(options["local_files_only"]))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return install


def http_error(kind: type[Exception], message: str = "401") -> Exception:
    """One of the errors that carry an HTTP response, without one."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


def test_a_cached_model_needs_no_network(cache: Path) -> None:
    model = cached_model(cache)
    assert fetch(REPO) == model


def test_not_cached_and_no_network(cache: Path) -> None:
    with pytest.raises(
        CheckpointError, match="'someone/tiny' is not in the local cache and the hub cannot be reached: connect"
    ) as caught:
        fetch(REPO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "merges.txt"])
def test_half_a_cached_model_and_no_network(cache: Path, name: str) -> None:
    """What an interrupted download leaves is not taken for the model."""
    (cached_model(cache) / name).unlink()
    with pytest.raises(CheckpointError, match=r"'someone/tiny' (comes without|is not in the local cache)"):
        fetch(REPO)


def test_a_missing_shard_and_no_network(cache: Path) -> None:
    (shard(cached_model(cache), 2) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"'someone/tiny' (comes without model-00002-of-00002\.safetensors|is not in)"):
        fetch(REPO)


def test_the_cache_comes_first(tmp_path: Path, answers: Callable[[Answer], list[dict[str, Any]]]) -> None:
    model = write_model(tmp_path, CONFIG, arrays_of(params_for(CONFIG)))
    asked = answers(lambda _: model)
    assert fetch(REPO) == model
    assert [options["local_files_only"] for options in asked] == [True]


def test_then_the_network_for_the_needed_files_only(tmp_path: Path, answers: Callable[[Answer], list[dict[str, Any]]]) -> None:
    def answer(local: bool) -> Path:
        if local:
            raise errors.LocalEntryNotFoundError("not cached")
        return write_model(tmp_path, CONFIG, arrays_of(params_for(CONFIG)))

    asked = answers(answer)
    assert fetch(REPO) == tmp_path
    assert [options["local_files_only"] for options in asked] == [True, False]
    in_repository = [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "vocab.json", "merges.txt", "tokenizer.json", "README.md", "pytorch_model.bin",
        "tf_model.h5", "onnx/config.json", "onnx/model.safetensors", "flax_model.msgpack", "rust_model.ot", "64.tflite",
    ]  # fmt: skip
    for options in asked:
        assert options["repo_id"] == REPO
        chosen = utils.filter_repo_objects(
            in_repository, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        )
        assert list(chosen) == in_repository[:8]


def test_an_incomplete_cache_is_completed(tmp_path: Path, answers: Callable[[Answer], list[dict[str, Any]]]) -> None:
    def answer(local: bool) -> Path:
        write_model(tmp_path, CONFIG, arrays_of(params_for(CONFIG)))
        if local:
            (tmp_path / "model.safetensors").unlink()
        return tmp_path

    asked = answers(answer)
    assert fetch(REPO) == tmp_path
    assert len(asked) == 2


def test_a_repository_without_safetensors(tmp_path: Path, answers: Callable[[Answer], list[dict[str, Any]]]) -> None:
    write_model(tmp_path, CONFIG, {})
    (tmp_path / "model.safetensors").unlink()
    answers(lambda _: tmp_path)
    with pytest.raises(
        CheckpointError, match=r"'someone/tiny' comes without model\.safetensors: .* no model in safetensors files"
    ):
        fetch(REPO)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            http_error(errors.RepositoryNotFoundError),
            "'someone/tiny' is not here, and the hub has no repository of that name: check the spelling",
        ),
        (http_error(errors.GatedRepoError), "'someone/tiny' asks for consent: accept its terms"),
        (errors.LocalEntryNotFoundError("offline"), "'someone/tiny' is not in the local cache and the hub cannot be reached"),
        (errors.HFValidationError("bad id"), "'someone/tiny' cannot be read from the hub: bad id"),
        (http_error(errors.HfHubHTTPError, "500 Server\nError"), "'someone/tiny' cannot be read from the hub: 500 Server"),
        (OSError(28, "No space left on device"), "'someone/tiny' cannot be read from the hub: .*No space left on device"),
        (RuntimeError(), "'someone/tiny' cannot be read from the hub: RuntimeError"),
    ],
)
def test_what_the_hub_can_answer(answers: Callable[[Answer], list[dict[str, Any]]], error: Exception, message: str) -> None:
    def answer(local: bool) -> Path:
        raise errors.LocalEntryNotFoundError("not cached") if local else error

    answers(answer)
    with pytest.raises(CheckpointError, match=message) as caught:
        fetch(REPO)
    assert "\n" not in str(caught.value)


def test_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"'gpt2' is not here, .* needs huggingface_hub: pip install 'nanokv\[hub\]', or name a directory"
    ):
        fetch("gpt2")
