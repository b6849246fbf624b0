"""The models on this machine: the one that ships, those in nanokv's cache directory, those in the hub's cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nanokv.errors import NanoKVError
from nanokv.models.families import Config
from weights.gguf_file import read_licence, read_model_config
from weights.huggingface import CONFIG, read_config
from weights.llama2c import is_llama2c, read_layout
from weights.pull import PACKAGES, cache_directory

README = "README.md"
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Entry:
    """A model: what to give as --model, and what its files say. `config` is None where they cannot be read, and `problem`
    says why."""

    source: str
    where: Path
    bytes: int
    config: Config | None
    licence: str | None
    problem: str | None = None

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Of a float32 cache."""
        return None if self.config is None else self.config.kv_bytes_per_token(FLOAT32_BYTES)


def inventory() -> list[Entry]:
    """Every model here; one that cannot be read is listed with the reason."""
    default = Path(__file__).parent / "default"
    found = [_entry("default", default, read_config, lambda _: "MIT")]
    names = {package.file_name: name for name, package in PACKAGES.items()}
    directory = cache_directory()
    if directory.is_dir():
        for path in sorted(directory.iterdir()):
            if path.suffix == ".gguf" and path.is_file():
                found.append(_entry(names.get(path.name, str(path)), path, read_model_config, read_licence))
            elif is_llama2c(path):
                found.append(_entry(str(path), path, lambda path: read_layout(path)[0], lambda _: None))
            elif (path / CONFIG).is_file():
                found.append(_entry(str(path), path, read_config, readme_licence))
    return found + [_entry(name, path, read_config, readme_licence) for name, path in _hub_snapshots()]


def readme_licence(directory: Path) -> str | None:
    """`license:` in the front matter of a hub README.md."""
    try:
        lines = (directory / README).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        key, _, value = line.partition(":")
        if line.strip() == "---":
            break
        if key.strip() == "license":
            return value.strip().strip("'\"") or None
    return None


def _entry(source: str, path: Path, config: Callable[[Path], Config], licence: Callable[[Path], str | None]) -> Entry:
    size = path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    try:
        return Entry(source, path, size, config(path), licence(path))
    except NanoKVError as reason:
        return Entry(source, path, size, None, None, str(reason))


def _hub_snapshots() -> Iterator[tuple[str, Path]]:
    """Ids and directories of the models in huggingface_hub's cache; none where the package or the cache is not
    there."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if repo.repo_type == "model" and newest is not None and (newest.snapshot_path / CONFIG).is_file():
            yield repo.repo_id, newest.snapshot_path
