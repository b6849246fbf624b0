"""Tensors in safetensors files: found by name, checked before anything is read, then read piece by piece.

The format (the safetensors project's README): 8 bytes of header length, a JSON header with each tensor's dtype, shape and
place, then the bytes. The safetensors library opens and validates a file: offsets inside it, no gaps, no overlap, nothing
after the end. The bytes are read here: NumPy has no bfloat16, and a mapped file would count as a second copy of the
weights in the process's memory. A piece is small, so nothing but the result takes memory.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from nanokv.errors import CheckpointError
from nanokv.files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
PIECE_BYTES = 1 << 22


def _from_bfloat16(raw: bytes) -> np.ndarray:
    """A bfloat16 is the upper half of a float32."""
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


# Bytes of an element, and what makes an array of them; the format is little-endian whatever the machine.
FLOATS: dict[str, tuple[int, Callable[[bytes], np.ndarray]]] = {
    "F64": (8, lambda raw: np.frombuffer(raw, "<f8")),
    "F32": (4, lambda raw: np.frombuffer(raw, "<f4")),
    "F16": (2, lambda raw: np.frombuffer(raw, "<f2")),
    "BF16": (2, _from_bfloat16),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not yet read. `dtype` is the format's code; `start` its first byte in the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name!r}"

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless it holds floats in this shape."""
        if self.shape != shape:
            raise CheckpointError(f"{self} has shape {list(self.shape)}, but config.json makes it {list(shape)}")
        if self.dtype not in FLOATS:
            raise CheckpointError(f"{self} holds {self.dtype}: weights must be one of {', '.join(FLOATS)}")

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """The rows in order, some at a time: which rows, and their values in whatever float type holds them.

        The tensor has passed check() and has at least one dimension. Raises CheckpointError if the file got shorter.
        """
        itemsize, decode = FLOATS[self.dtype]
        rows, row_shape = self.shape[0], self.shape[1:]
        row_bytes = math.prod(row_shape) * itemsize
        step = max(1, PIECE_BYTES // row_bytes)
        with open(self.path, "rb") as file:
            file.seek(self.start)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                raw = file.read((stop - start) * row_bytes)
                if len(raw) != (stop - start) * row_bytes:
                    raise CheckpointError(f"{self} ends early: the file changed while it was read")
                yield slice(start, stop), decode(raw).reshape(-1, *row_shape)

    def read(self, dtype: str, transpose: bool = False) -> np.ndarray:
        """All of it as float32 or float64, contiguous; `transpose` [a, b] -> [b, a]. NaN and infinity stay what they are.

        Raises CheckpointError as pieces() does, and for a finite value that `dtype` has no number for.
        """
        array = np.empty(self.shape[::-1] if transpose else self.shape, dtype=dtype)
        target = array.T if transpose else array
        try:
            with np.errstate(over="raise", invalid="ignore"):
                for rows, values in self.pieces():
                    target[rows] = values
        except FloatingPointError:
            raise CheckpointError(f"{self} holds a value beyond {dtype}'s range: load it with dtype float64") from None
        return array

    def equals(self, array: np.ndarray) -> bool:
        """Whether its values, in the dtype of an array of its shape, are the array's; a NaN equals a NaN."""
        with np.errstate(all="ignore"):
            return all(np.array_equal(part.astype(array.dtype), array[rows], equal_nan=True) for rows, part in self.pieces())


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name; only the header is read. Raises CheckpointError for a damaged file."""
    try:
        with safe_open(path, framework="np"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as reason:
        raise CheckpointError(f"{path} is not a readable safetensors file: {_why(path, reason)}") from None
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _why(path: Path, reason: Exception) -> str:
    try:
        with open(path, "rb") as file:
            if file.read(19) == b"version https://git":
                return "it is a Git LFS pointer, not the weights; run 'git lfs pull'"
    except OSError as error:
        return str(error.strerror)
    return f"{reason}; it may be cut or damaged, download it again"


def read_index(path: Path) -> Mapping[str, str]:
    """model.safetensors.index.json: tensor name -> file name beside it. Raises CheckpointError."""
    raw: Any = read_json(path, CheckpointError)
    places = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(places, dict):
        raise CheckpointError(f"{path} has no weight_map that says which file holds which tensor")
    for name, shard in places.items():
        if not isinstance(shard, str) or shard != Path(shard).name:
            raise CheckpointError(f"{path} places tensor {name!r} in {shard!r}, which is not the name of a file beside it")
    return places


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors or, where there is none, those that model.safetensors.index.json places in shards.

    Raises CheckpointError: neither is there, a file is damaged, the index names a shard or tensor that does not exist.
    """
    if (directory / SINGLE).exists():
        return open_safetensors(directory / SINGLE)
    index = directory / INDEX
    if not index.exists():
        raise _no_weights(directory)
    places = read_index(index)
    shards = {}
    for shard in sorted(set(places.values())):
        if not (directory / shard).exists():
            raise CheckpointError(f"{index} names {shard}, which is not there: download it too")
        shards[shard] = open_safetensors(directory / shard)
    for name, shard in places.items():
        if name not in shards[shard]:
            raise CheckpointError(f"{index} places tensor {name!r} in {shard}, which does not hold it")
    return {name: shards[shard][name] for name, shard in places.items()}


def _no_weights(directory: Path) -> CheckpointError:
    pickled = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLED)
    if pickled:
        return refuse_pickle(directory / pickled[0])
    return CheckpointError(f"{directory} has no {SINGLE}")


def refuse_pickle(path: Path) -> CheckpointError:
    """Why a pickled checkpoint is not read, and the way to one that is."""
    return CheckpointError(
        f"{path} is a pickled checkpoint, and unpickling can run any code that its author put in; where you trust it, "
        "transformers' from_pretrained(...).save_pretrained(...) turns it into safetensors"
    )
