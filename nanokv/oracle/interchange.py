"""Arrays of other libraries in and out: NumPy, anything that speaks DLPack, torch's bfloat16 and fp8, CuPy."""

from importlib import import_module
from typing import Any

import numpy as np

from nanokv.oracle.formats import dtype_of

_BITS = {2: "int16", 1: "uint8"}


def to_torch(array: np.ndarray, device: str = "cpu") -> Any:
    """The array as a torch tensor, bit for bit; bfloat16 and fp8 too, which NumPy cannot hand over itself."""
    torch = import_module("torch")
    names = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    if array.dtype.name in names:
        bits = torch.from_numpy(np.ascontiguousarray(array).view(_BITS[array.itemsize]))
        return bits.view(names[array.dtype.name]).to(device)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def to_numpy(array: Any) -> np.ndarray:
    """What a kernel returned, in host memory. TypeError for what is no array."""
    if isinstance(array, np.ndarray):
        return array
    home = type(array).__module__.split(".")[0]
    if home == "torch":
        return _from_torch(array)
    if home == "cupy":
        return array.get()
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError):
            return np.asarray(array)  # ml_dtypes' formats, as JAX hands them over
    if hasattr(array, "__array__"):
        return np.asarray(array)
    raise TypeError(f"it returned {type(array).__name__}, not an array")


def _from_torch(tensor: Any) -> np.ndarray:
    torch = import_module("torch")
    tensor = tensor.detach().cpu().contiguous()
    names = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "fp8"}
    if tensor.dtype in names:
        bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8)
        return bits.numpy().view(dtype_of(names[tensor.dtype]))
    return tensor.numpy()
