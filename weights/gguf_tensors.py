"""The tensors of a GGUF file: read piece by piece, dequantised, with rotary rows in Hugging Face's order."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanokv.errors import CheckpointError
from nanokv.gguf_header import Encoding, TensorEntry
from weights.tensors import FLOATS, StoredTensor

PIECE_ELEMENTS = 1 << 19
DECODED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")


@dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """A tensor of a GGUF file under any name. `adjacent` D: its rows, or elements, are heads of D that llama.cpp's converter
    has brought from halves into adjacent pairs, and reading brings them back."""

    encoding: Encoding
    adjacent: int = 0

    @classmethod
    def of(cls, path: Path, entry: TensorEntry, name: str, adjacent: int = 0) -> "GGUFTensor":
        """Raises CheckpointError for an encoding that is not read."""
        if entry.encoding.name not in DECODED:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} is stored as {entry.encoding.name}, which is not supported: "
                f"{', '.join(DECODED)} are"
            )
        return cls(path, name, entry.encoding.name, entry.shape, entry.start, entry.encoding, adjacent)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless it has this shape."""
        if self.shape != shape:
            raise CheckpointError(f"{self} has shape {list(self.shape)}, but the file's metadata makes it {list(shape)}")

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """As StoredTensor's, whole heads at a time where their rows are moved. A vector is one piece."""
        width = self.shape[-1]
        count, row_bytes = math.prod(self.shape[:-1]), width // self.encoding.block * self.encoding.size
        step = max(1, PIECE_ELEMENTS // width)
        step += -step % (self.adjacent or 1)
        decode = self._decoder()
        with open(self.path, "rb") as file:
            file.seek(self.start)
            for start in range(0, count, step):
                stop = min(start + step, count)
                raw = file.read((stop - start) * row_bytes)
                if len(raw) != (stop - start) * row_bytes:
                    raise CheckpointError(f"{self} ends early: the file changed while it was read")
                values = decode(raw).reshape((stop - start, width) if len(self.shape) > 1 else (width,))
                if self.adjacent:
                    values = to_halves(values, self.adjacent)
                yield slice(start, stop) if len(self.shape) > 1 else slice(0, width), values

    def _decoder(self) -> Callable[[bytes], np.ndarray]:
        return FLOATS[self.dtype][1] if self.dtype in FLOATS else dequantizer(self.encoding, self.path)


def to_halves(rows: np.ndarray, dim: int) -> np.ndarray:
    """Rows of heads of `dim`, in each the planes of the rotation side by side -> all first coordinates, then all second."""
    return rows.reshape(-1, dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def dequantizer(encoding: Encoding, path: Path) -> Callable[[bytes], np.ndarray]:
    """What turns stored bytes of a quantised encoding into float32: the gguf package's. CheckpointError where it is not
    installed."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise CheckpointError(
            f"{path} holds {encoding.name}, which needs the gguf package: pip install 'nanokv[gguf]'"
        ) from None
    kind = GGMLQuantizationType[encoding.name]
    return lambda raw: quants.dequantize(np.frombuffer(raw, np.uint8)[None], kind)  # one row: the package works on 16 a call
