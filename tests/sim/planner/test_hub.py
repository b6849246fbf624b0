"""Hub ids, with the package's functions replaced: no test asks the network."""

import builtins
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanokv.errors import CheckpointError
from sim.planner import hub
from sim.planner.model import read_model
from tests.support import ROOT

huggingface_hub = pytest.importorskip("huggingface_hub")
LLAMA: dict[str, Any] = json.loads((ROOT / "benchmarks" / "planner_configs.json").read_text())["meta-llama/Llama-3.1-8B"][
    "config"
]


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError("no network")


def test_config_and_headers_are_fetched_and_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    tensor = SimpleNamespace(parameter_count=10, data_offsets=(100, 140))
    metadata = SimpleNamespace(files_metadata={"a": SimpleNamespace(tensors={"x": tensor, "y": tensor})})
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *what: asked.append(what) or str(config))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda repo: metadata)
    found = read_model("meta-llama/Llama-3.1-8B")
    assert asked == [("meta-llama/Llama-3.1-8B", "config.json")]
    assert found.name == "meta-llama/Llama-3.1-8B"
    assert found.weights is not None
    assert (found.weights.total, found.weights.parameters) == (80, 20)


def test_without_headers_the_configs_own_count_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *what: str(config))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", refuse)
    found = read_model("meta-llama/Llama-3.1-8B")
    assert found.weights is not None
    assert found.weights.parameters == 8_030_261_248


def hub_error(name: str) -> Exception:
    kind = getattr(huggingface_hub.errors, name)
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "asks for consent"),
        ("RepositoryNotFoundError", "is not here, and the hub has no repository of that name"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
        ("EntryNotFoundError", "has no config.json"),
    ],
)
def test_what_the_hub_refuses_is_one_line(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any) -> Any:
        raise hub_error(error)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", raising)
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.fetch_config("some/model")
    assert "\n" not in str(caught.value)


def test_an_unforeseen_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(CheckpointError, match="cannot be read from the hub: no network"):
        hub.fetch_config("some/model")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=r"pip install 'nanokv\[hub\]'"):
        hub.fetch_config("some/model")


@pytest.mark.parametrize("source", ["absent.json", "absent.gguf", "a/b/c", "./absent", "/absent/dir"])
def test_what_cannot_be_a_hub_id_is_a_missing_file(source: str) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_model(source)
