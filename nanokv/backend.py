"""Which array library computes. The only file that imports cupy.

CuPy raises whatever its driver raises when there is no usable device (not an ImportError), at import, at the first
query or at the first array, so all three are tried before it is chosen.
"""

import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from nanokv.errors import BackendError, NanoKVError, OutOfMemory

Array = Any  # numpy.ndarray or cupy.ndarray
BACKENDS = ("auto", "numpy", "cupy")


@dataclass(frozen=True)
class Backend:
    """An array library: `xp` is the module; `name` is "numpy" or "cupy". `kernels`: what caches keep is written and read by the
    card's compiled kernels, so it need not be of a type that the library knows."""

    name: str
    xp: ModuleType
    kernels: bool = field(default=False, kw_only=True)

    def from_numpy(self, array: np.ndarray) -> Array:
        """The array in this library's memory; no copy on NumPy. Memory for compiled kernels packs a matrix here."""
        return self.table(array)

    def table(self, array: np.ndarray) -> Array:
        """The same as an array, whatever becomes of other matrices: for one that is looked up and never multiplied."""
        return array if self.xp is np else self.xp.asarray(array)


NUMPY = Backend("numpy", np)


def get_backend(name: str = "auto") -> Backend:
    """The array library called `name`; "auto" takes CuPy when a device answers and NumPy otherwise.

    Raises BackendError when "cupy" is asked for and no device answers, or when the name is unknown.
    """
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")
    if name == "numpy":
        return NUMPY
    try:
        cupy = importlib.import_module("cupy")
        if not cupy.is_available():
            raise RuntimeError("no CUDA device")
        cupy.zeros(1)
    except ModuleNotFoundError:
        reason = "CuPy is not installed (pip install 'nanokv[cuda12]' or 'nanokv[cuda13]')"
    except Exception as error:  # whatever the driver raises: CuPy promises no type here
        answer = "the card's memory is full" if is_out_of_memory(error) else "no CUDA device answers"
        reason = f"{answer} ({(str(error).strip() or type(error).__name__).splitlines()[0]})"
    else:
        return Backend("cupy", cupy)
    if name == "cupy":
        raise BackendError(f"backend cupy is not usable: {reason}; use --backend numpy")
    return NUMPY


@contextmanager
def asking_for(what: str, advice: str, xp: ModuleType) -> Iterator[None]:
    """Where the array library finds no memory for what is done inside, OutOfMemory says so: for what, how much was asked, how
    much a card has free, and what to do. Arrays that the work had got by then are let go, though the error holds its frames."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NanoKVError) or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        reason, where, free = " ".join(str(error).split()).rstrip("."), "", ""
        if xp is not np:
            available, total = xp.cuda.runtime.memGetInfo()
            where, free = " on the card", f", {available:,} of its {total:,} bytes are free"
        message = f"no memory{where} for {what} ({reason or type(error).__name__}{free}): {advice}"
        raise OutOfMemory(message) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether NumPy, CuPy's pool or, by its words, the driver or a library of the card's says that there is no memory."""
    text = str(error)
    return isinstance(error, MemoryError) or any(words in text for words in ("out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED"))


def module_of(array: Array) -> ModuleType:
    """The array library that `array` belongs to; a packed matrix (nanokv/kernels/matrix.py) is host memory."""
    on_host = isinstance(array, np.ndarray | np.generic) or getattr(array, "on_host", False)
    return np if on_host else importlib.import_module("cupy")


def address_of(array: Array) -> int:
    """Where an array's first element lies, in the memory that it is in."""
    interface = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    return int(interface["data"][0])


def to_numpy(array: Array) -> np.ndarray:
    """The array in host memory: a view on NumPy, a copy from the device on CuPy."""
    return array if isinstance(array, np.ndarray) else array.get()
