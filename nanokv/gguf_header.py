"""The header of a GGUF file (ggml/docs/gguf.md): metadata and the list of tensors, checked against the file's size.

A header is a chain of lengths, and each is a number that a damaged or hostile file may set at will. So nothing is taken,
allocated or skipped before it is known to lie inside the file. The reader in the `gguf` package does not check, and reads
only alignments that are powers of two; the format allows any multiple of 8.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanokv.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # where general.alignment does not say otherwise
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
SMALLEST_ENTRY = 8 + 4 + 1  # a name's length, a type, a value: what one piece of metadata takes at least
SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class Encoding:
    """How ggml stores numbers: `block` elements of a row take `size` bytes."""

    name: str
    block: int
    size: int


# ggml's types by their codes (ggml/include/ggml.h, ggml/src/ggml-common.h).
ENCODINGS: Mapping[int, Encoding] = {
    code: Encoding(name, block, size)
    for code, name, block, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
    )
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the list: `shape` as NumPy has it, the last axis contiguous; `start` is its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements // self.encoding.block * self.encoding.size


@dataclass(frozen=True)
class Header:
    """Metadata values are int, float, bool, str, a list of str, or an array of numbers."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


def read_header(path: Path) -> Header:
    """The header of the file at `path`; none of its weights are read. Raises CheckpointError, which says what is wrong."""
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) < 24:
                raise CheckpointError(f"{path} is not a GGUF file: it is too short for a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as reason:
        raise CheckpointError(f"{path} cannot be read: {reason.strerror}") from None


class _Reader:
    """A place in the mapped file, which moves on with every value that is read."""

    def __init__(self, path: Path, data: mmap.mmap):
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        tensor_count, entry_count = self._check_start()
        self._need(entry_count * SMALLEST_ENTRY, f"{entry_count} pieces of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            if key in metadata:
                raise self._error(f"its metadata has {key!r} twice")
            metadata[key] = self._value(self._integer("<I"), key)
        self._need(tensor_count * SMALLEST_TENSOR, f"{tensor_count} tensors")
        listed = [self._tensor() for _ in range(tensor_count)]
        alignment = self._alignment(metadata)
        start = self._at + -self._at % alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, encoding, offset in listed:
            if name in tensors:
                raise self._error(f"it lists tensor {name!r} twice")
            tensors[name] = TensorEntry(name, shape, encoding, start + offset)
            self._check_place(tensors[name], offset, alignment)
        return Header(metadata, tensors)

    def _check_start(self) -> tuple[int, int]:
        """Magic and version -> (tensors, pieces of metadata)."""
        magic = self._data[:4]
        if magic != MAGIC:
            hint = "; it is a Git LFS pointer: run 'git lfs pull'" if self._data[:19] == b"version https://git" else ""
            raise self._error(f"it begins with {magic!r}, not {MAGIC!r}{hint}")
        self._at = 4
        version = self._integer("<I")
        if version & 0xFFFF == 0:
            raise self._error("it is big-endian: convert it with the gguf package's gguf_convert_endian.py")
        if version not in VERSIONS:
            raise self._error(f"its version is {version}: {' and '.join(map(str, VERSIONS))} are supported")
        return self._integer("<Q"), self._integer("<Q")

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._numbers(kind, 1, key)[0].item()
        kind, count = self._integer("<I"), self._integer("<Q")
        if kind == ARRAY:
            raise self._error(f"{key} is an array of arrays, which is not supported")
        if kind != STRING:
            return self._numbers(kind, count, key)
        self._need(count * 8, f"the {count} strings of {key}")
        return [self._string() for _ in range(count)]

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        if kind not in SCALARS:
            raise self._error(f"{key} has the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        start = self._take(count * dtype.itemsize, f"the {count} numbers of {key}")
        return np.frombuffer(self._data[start : self._at], dtype)

    def _tensor(self) -> tuple[str, tuple[int, ...], Encoding, int]:
        """Name, shape, encoding, offset in the data region."""
        name, dimensions = self._string(), self._integer("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._error(f"tensor {name!r} has {dimensions} dimensions: 1 to {MOST_DIMENSIONS} are possible")
        shape = tuple(self._integer("<Q") for _ in range(dimensions))[::-1]
        code, offset = self._integer("<I"), self._integer("<Q")
        if code not in ENCODINGS:
            raise self._error(f"tensor {name!r} is stored as ggml type {code}, whose size is not known")
        return name, shape, ENCODINGS[code], offset

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(value, int) or isinstance(value, bool) or value < 8 or value % 8:
            raise self._error(f"general.alignment {value!r} is not a multiple of 8")
        return value

    def _check_place(self, entry: TensorEntry, offset: int, alignment: int) -> None:
        """The tensor lies inside the file, in rows of whole blocks."""
        name, shape, encoding = entry.name, entry.shape, entry.encoding
        if not all(shape):
            raise self._error(f"tensor {name!r} has shape {list(shape)}, and so no elements")
        if shape[-1] % encoding.block:
            raise self._error(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {encoding.name}'s {encoding.block}")
        if offset % alignment:
            raise self._error(f"tensor {name!r} begins at offset {offset}, no multiple of the alignment {alignment}")
        if entry.start + entry.size > len(self._data):
            raise self._error(f"tensor {name!r} of {entry.size} bytes reaches past the file's end: it is cut or damaged")

    def _string(self) -> str:
        length = self._integer("<Q")
        start = self._take(length, f"a string of {length} bytes")
        try:
            return self._data[start : self._at].decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"the string at byte {start} is not UTF-8") from None

    def _integer(self, form: str) -> int:
        size = struct.calcsize(form)
        return int(struct.unpack_from(form, self._data, self._take(size, "a number"))[0])

    def _take(self, size: int, what: str) -> int:
        """Moves past the next `size` bytes, and says where they begin."""
        self._need(size, what)
        start, self._at = self._at, self._at + size
        return start

    def _need(self, size: int, what: str) -> None:
        left = len(self._data) - self._at
        if size > left:
            raise self._error(f"{what} at byte {self._at} cannot be there, with {left} bytes left: it is cut or damaged")

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a readable GGUF file: {what}")
