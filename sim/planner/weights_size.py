"""How many bytes a model's weights take: from the headers of its files, or from its parameter count.

Only headers are read, never a tensor. The safetensors format: 8 bytes of header length (little-endian), then a JSON object
that gives each tensor's dtype, shape and place.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanokv.errors import CheckpointError, ConfigError
from nanokv.files import read_json
from sim.formats import of_weights
from sim.planner.kv_formats import kv_format
from sim.planner.layers import Geometry
from sim.planner.parameters import count_parameters

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000  # the safetensors library's own


@dataclass(frozen=True)
class Weights:
    """Bytes of all weights, their parameters where known, and where the figure comes from."""

    total: int
    parameters: int | None
    source: str


def from_parameters(parameters: int, dtype: str, source: str) -> Weights:
    """`parameters` stored in `dtype`, a packed format with its scales for groups along a row."""
    form = of_weights(kv_format(dtype))
    if not form.group and form.scale_bits:
        return Weights(parameters * form.bits // 8, parameters, f"{source} x {dtype}, scales not counted")
    whole = form.row_bytes(parameters) + (form.scale_bytes(parameters) if form.group else 0)
    return Weights(whole, parameters, f"{source} x {dtype}")


def from_config(raw: Mapping[str, Any], geometry: Geometry, dtype: str | None) -> Weights:
    """By the exact parameter count of config.json; ConfigError where the family has none, or where its weights are packed."""
    if dtype is None and raw.get("quantization_config"):
        raise ConfigError("quantization_config: the weights are not stored in the file's dtype; give --weights-bytes")
    return from_parameters(count_parameters(raw, geometry), dtype or geometry.dtype, "config.json's parameters")


def from_directory(directory: Path, dtype: str | None) -> Weights | None:
    """From the safetensors headers of a checkpoint's directory, or from its index alone; None where there is neither."""
    index = directory / INDEX
    names = _indexed_files(index) if index.exists() else sorted(path.name for path in directory.glob("*.safetensors"))
    paths = [directory / name for name in names]
    if paths and all(path.exists() for path in paths):
        return from_tensors((tensor for path in paths for tensor in read_header(path)), dtype, "safetensors headers")
    if index.exists() and dtype is None:
        metadata = _content(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
        if isinstance(total, int) and total > 0:
            return Weights(total, None, f"{INDEX}, total_size")
    return None


def from_tensors(tensors: Iterable[tuple[int, int]], dtype: str | None, source: str) -> Weights:
    """From (elements, bytes) of each tensor: the bytes as stored, or the elements in another dtype."""
    elements = total = 0
    for count, size in tensors:
        elements, total = elements + count, total + size
    if not elements:
        raise CheckpointError(f"no tensors with elements in the {source}: nothing to size")
    return Weights(total, elements, source) if dtype is None else from_parameters(elements, dtype, source)


def read_header(path: Path) -> list[tuple[int, int]]:
    """(elements, bytes) of each tensor of a safetensors file. CheckpointError where it is damaged or cut short."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= HEADER_LIMIT:
                raise CheckpointError(f"{path}: a header of {length} bytes: not a safetensors file, or a damaged one")
            text = file.read(length)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(text)
        tensors = [_tensor(entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error}") from None
    total = sum(count for _, count in tensors)
    if 8 + length + total != size:
        raise CheckpointError(f"{path} has {size} bytes, and its header promises {8 + length + total}: it is cut or damaged")
    return tensors


def _tensor(entry: Mapping[str, Any]) -> tuple[int, int]:
    start, stop = entry["data_offsets"]
    elements = math.prod(entry["shape"])
    if not 0 <= start <= stop or elements < 0:
        raise ValueError(f"offsets {start} to {stop}")
    return elements, stop - start


def _indexed_files(index: Path) -> list[str]:
    files = _content(index).get("weight_map")
    if not isinstance(files, Mapping) or not files:
        raise CheckpointError(f"{index} has no weight_map")
    return sorted({str(name) for name in files.values()})


def _content(index: Path) -> Mapping[str, Any]:
    value = read_json(index, CheckpointError)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{index} does not hold an object")
    return value
