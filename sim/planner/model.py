"""From what a user names (a file, a directory, a GGUF file, a hub id) to a model's caches and the size of its weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanokv.errors import CheckpointError, ConfigError
from nanokv.files import read_json
from sim.planner.geometry import geometry_from_config
from sim.planner.gguf_file import SPLIT_NAME, geometry_from_gguf, other_parts, read_gguf
from sim.planner.hub import fetch_config, fetch_tensors
from sim.planner.layers import Geometry
from sim.planner.weights_size import Weights, from_config, from_directory, from_parameters, from_tensors

CONFIG = "config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Model:
    """What the planner knows of one model. `weights` is None where their size is not known, and `why` says why not."""

    name: str
    geometry: Geometry
    weights: Weights | None
    why: str | None = None


def read_model(
    source: str,
    *,
    weights_dtype: str | None = None,
    weights_bytes: int | None = None,
    parameters: int | None = None,
    expand_latent: bool = False,
    cross_tokens: int | None = None,
) -> Model:
    """Reads `source`. Raises ConfigError (no decoder's config, an unknown family), CheckpointError (no such file or
    repository, a damaged one).

    The weights' size is, in this order: what the caller states, the headers of the files beside the config, the exact
    parameter count of the config; None where none of them says it.
    """
    path = Path(source)
    tensors: list[tuple[int, int]] | None = None
    directory: Path | None = None
    raw: Mapping[str, Any] = {}
    split = 1
    if path.is_dir():
        found = _only_gguf(path)
        path = found if found else path / CONFIG
    if path.suffix == ".gguf":
        metadata, tensors = read_gguf(_existing(path))
        split = metadata.get("split.count", 1)
        geometry = geometry_from_gguf(metadata, expand_latent=expand_latent)
        name = str(metadata.get("general.name") or path.stem)
    else:
        if path.exists():
            config, directory = path, path.parent
            name = path.parent.resolve().name if path.name == CONFIG else path.stem
        else:
            _existing(path, source)
            config, name = fetch_config(source), source
        raw = _object(config)
        geometry = geometry_from_config(raw, expand_latent=expand_latent, cross_tokens=cross_tokens)
        if directory is None:
            tensors = fetch_tensors(source)
    try:
        if split > 1 and weights_bytes is None and parameters is None:
            tensors = [*(tensors or ()), *(each for part in other_parts(path, split) for each in read_gguf(part)[1])]
        weights = _weights(raw, geometry, directory, tensors, weights_dtype, weights_bytes, parameters)
    except ConfigError as error:
        return Model(name, geometry, None, str(error))
    return Model(name, geometry, weights)


def _weights(
    raw: Mapping[str, Any],
    geometry: Geometry,
    directory: Path | None,
    tensors: list[tuple[int, int]] | None,
    dtype: str | None,
    stated: int | None,
    parameters: int | None,
) -> Weights:
    if stated is not None:
        return Weights(stated, parameters, "as stated")
    if parameters is not None:
        return from_parameters(parameters, dtype or geometry.dtype, "stated parameters")
    if tensors:
        return from_tensors(tensors, dtype, "safetensors headers" if raw else "GGUF tensors")
    stored = from_directory(directory, dtype) if directory else None
    if stored is not None:
        return stored
    if not raw:
        raise ConfigError("the GGUF file holds no tensors: the size of the weights is not known")
    return from_config(raw, geometry, dtype)


def _only_gguf(directory: Path) -> Path | None:
    """The one GGUF file of a directory without a config.json, or the first part of the one model there."""
    if (directory / CONFIG).exists():
        return None
    files = sorted(directory.glob("*.gguf"))
    if len({SPLIT_NAME.sub(r"\1", file.name) for file in files}) == 1:
        return files[0]
    raise CheckpointError(f"{directory} has no {CONFIG} and {len(files)} GGUF files: name one file")


def _existing(path: Path, source: str | None = None) -> Path:
    """`path` if it is there; a name that is no hub id either is a CheckpointError."""
    if not path.exists() and (source is None or path.suffix in (".json", ".gguf") or not HUB_ID.fullmatch(source)):
        raise CheckpointError(f"{path}: no such file")
    return path


def _object(path: Path) -> Mapping[str, Any]:
    value = read_json(path, ConfigError)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is not a config.json: it does not hold an object")
    return value
