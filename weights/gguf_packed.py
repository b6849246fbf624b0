"""Matrices of a GGUF file in the compiled kernels' panels, the stored numbers kept as they are: no float32 copy is made.

A block of ggml's is 32 weights of one row: Q8_0 a float16 scale and 32 int8; Q4_0 a scale and 16 bytes, whose low halves
are the first sixteen weights; Q4_1 a scale, a lowest value and the same bytes (ggml's ggml-common.h).
"""

from collections.abc import Sequence

import numpy as np

from nanokv.backend import Array, Backend
from nanokv.errors import CheckpointError
from nanokv.kernels.choice import PackedMemory
from nanokv.kernels.matrix import GROUP, Matrix, from_int4, from_int8, to_panels
from weights.gguf_tensors import GGUFTensor, to_halves
from weights.tensors import StoredTensor

FLOATS = {"F16": "fp16", "BF16": "bf16"}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1")


def packed_as_stored(parts: Sequence[StoredTensor], backend: Backend) -> Array | None:
    """The tensors, one below the other, as one matrix in their own format in the backend's memory; None where `backend` wants
    another format, or where they have different encodings or one that the kernels do not read."""
    if not (isinstance(backend, PackedMemory) and backend.form is None):
        return None
    kinds = {part.encoding.name if isinstance(part, GGUFTensor) else None for part in parts}
    if len(kinds) > 1 or not kinds & {*FLOATS, *QUANTISED} or any(len(part.shape) != 2 for part in parts):
        return None
    rows = np.concatenate([_stored_rows(part) for part in parts if isinstance(part, GGUFTensor)])
    return backend.keep(_matrix(rows, (len(rows), parts[0].shape[1]), kinds.pop()))


def _matrix(rows: np.ndarray, shape: tuple[int, int], kind: str | None) -> Matrix:
    """Rows of stored bytes [N, bytes] of one encoding."""
    if kind in FLOATS:
        return Matrix(FLOATS[kind], shape, to_panels(rows.view("<u2")))
    blocks = rows.reshape(len(rows), shape[1] // GROUP, -1)  # [N, G, bytes]
    scales = _halves(blocks[..., :2])
    if kind == "Q8_0":
        return from_int8(blocks[..., 2:].view(np.int8), scales, shape)
    codes = blocks[..., -16:]
    codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    return from_int4(codes, scales, _halves(blocks[..., 2:4]) if kind == "Q4_1" else None, shape)


def _halves(raw: np.ndarray) -> np.ndarray:
    """[..., 2] bytes -> [...] float16"""
    return np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float16)


def _stored_rows(tensor: GGUFTensor) -> np.ndarray:
    """The bytes of each row [N, bytes], rotary rows in halves."""
    row_bytes = tensor.shape[1] // tensor.encoding.block * tensor.encoding.size
    raw = np.fromfile(tensor.path, np.uint8, tensor.shape[0] * row_bytes, offset=tensor.start)
    if len(raw) != tensor.shape[0] * row_bytes:
        raise CheckpointError(f"{tensor} ends early: the file changed while it was read")
    rows = raw.reshape(tensor.shape[0], row_bytes)
    return to_halves(rows, tensor.adjacent) if tensor.adjacent else rows
