"""Whether the compiled kernels can run here, and how many threads they take. Light: numba is imported when it must be."""

import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from nanokv.backend import Array, Backend
from nanokv.errors import UsageError
from nanokv.kernels.matrix import FORMATS, Matrix, pack
from nanokv.numerics import COMPILED, Numerics

KERNELS = ("auto", "numpy", "compiled")
TOPOLOGY = Path("/sys/devices/system/cpu")


def use_compiled(name: str, backend: Backend, dtype: str) -> bool:
    """Whether to compute exactly by compiled kernels: "auto" does where they can run. UsageError for "compiled" where they
    cannot, with what to do, and for an unknown name."""
    if name not in KERNELS:
        raise UsageError(f"unknown kernels {name!r}: choose one of {', '.join(KERNELS)}")
    reason = None
    if dtype != "float32":
        reason = f"they compute in float32, not {dtype}: use --dtype float32"
    elif backend.name == "numpy" and find_spec("numba") is None:
        reason = "numba is not installed: pip install 'nanokv[cpu]'"
    if name == "compiled" and reason:
        raise UsageError(f"the compiled kernels are not available: {reason}; or use --kernels numpy")
    return name != "numpy" and reason is None


def start(threads: int | None) -> None:
    """Makes the compiled kernels ready on `threads` threads, by default the physical cores; says when they have to be
    compiled, and when that cannot be kept. UsageError for a number of threads that is not possible."""
    import numba

    from nanokv.kernels.compiling import FOLDER

    most = numba.config.NUMBA_NUM_THREADS
    if threads is not None and not 1 <= threads <= most:
        raise UsageError(f"threads {threads} is out of range: 1 to {most} here")
    numba.set_num_threads(threads or min(most, physical_cores()))
    log = logging.getLogger("nanokv")
    if FOLDER is None:
        log.warning("compiled kernels cannot be kept (no folder can be written; XDG_CACHE_HOME names one): compiling each time")
    elif not any(FOLDER.glob("**/*.nbi")):
        log.warning("compiling kernels for this processor, once (about 15 s); kept in %s", FOLDER)


def physical_cores() -> int:
    """The cores among the processors that this process may use, two threads of a core counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    try:
        return len({(TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in allowed})
    except OSError:
        return len(allowed)


@dataclass(frozen=True)
class PackedMemory(Backend):
    """Host memory in which a matrix of weights comes to lie in panels, in the format `form`; None keeps a file's own format
    and stores floats as float32. What a loader reads, it passes through here, a tensor at a time."""

    form: str | None = None

    def from_numpy(self, array: Array) -> Array:
        return self.table(array) if array.ndim != 2 else self.keep(pack(array, self.form or "float32"))

    def table(self, array: Array) -> Array:
        """Not packed: in float32, in which alone the kernels compute."""
        return super().table(np.asarray(array, dtype=np.float32))

    def keep(self, matrix: Matrix) -> Array:
        """A packed matrix, as a file may hold it, in this memory."""
        return matrix


@dataclass(frozen=True)
class RoundedMemory(Backend):
    """Memory in which a matrix is rounded to the format `form` and kept as float32: for array code."""

    form: str = "float32"

    def from_numpy(self, array: Array) -> Array:
        return self.table(array if array.ndim != 2 else pack(array, self.form).to_array())


def memory_for(backend: Backend, numerics: Numerics, form: str | None, threads: int | None) -> Backend:
    """Where a model's weights go: packed, in the format `form`, for compiled kernels, which are made ready here on `threads`
    threads; else as arrays of `backend`, whose matrices are rounded to the format. UsageError for a format or number of
    threads that cannot be."""
    if form is not None and form not in FORMATS:
        raise UsageError(f"unknown weight format {form!r}: choose one of {', '.join(FORMATS)}")
    if numerics is COMPILED and backend.name == "cupy":
        from nanokv.kernels.cuda.arrays import CardMemory

        if threads is not None:
            raise UsageError("--threads is for the compiled kernels of the processor: leave it out with --backend cupy")
        return CardMemory(backend.name, backend.xp, form)
    if numerics is COMPILED:
        start(threads)
        return PackedMemory(backend.name, backend.xp, form)
    if threads is not None:
        raise UsageError("--threads is for the compiled kernels: BLAS reads OPENBLAS_NUM_THREADS")
    if form in (None, "float32"):
        return backend
    return RoundedMemory(backend.name, backend.xp, form)
