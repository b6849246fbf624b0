"""The CUDA sources compiled for this CPU and launched: what the tests use in the place of a card. Takes a C++ compiler."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanokv.kernels.cuda.program import FILES, HERE, KERNELS

HEADER = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-ffp-contract=off",
    "-march=native",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
)
ORDERS = {"forwards": 0, "backwards": 1, "random": 2}


class Fault(Exception):  # noqa: N818 - what a checker of kernels calls it
    """The header found something wrong with a kernel."""


def compiler() -> str:
    """A C++ compiler, or a skip that says that there is none."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("not run: no C++ compiler (g++ or clang++) to build the CUDA sources for this CPU")
    return found


def build(file: str, sources: Path = HERE, kernels: Sequence[str] | None = None, flags: Sequence[str] = ("-O1",)) -> Path:
    """A library with the kernels of one source, in a new folder."""
    folder = Path(tempfile.mkdtemp(prefix="nanokv-cuda-"))
    names = KERNELS[file] if kernels is None else kernels
    (folder / "registry.h").write_text("".join(f"KERNEL({name})\n" for name in names), encoding="utf-8")
    library = folder / "kernels.so"
    defines = [f'-DSOURCE="{sources / file}"', f'-DREGISTRY="{folder / "registry.h"}"']
    command = [
        compiler(),
        *FLAGS,
        *flags,
        *defines,
        f"-I{HEADER}",
        f"-I{sources}",
        str(HEADER / "host.cpp"),
        "-o",
        str(library),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[:2000]
    return library


@cache
def library(file: str) -> Any:
    """One source's library, compiled once in a session."""
    return opened(build(file))


def opened(path: Path) -> Any:
    """The launching function of a library."""
    launch = ctypes.CDLL(str(path)).cuda_launch
    launch.restype = ctypes.c_char_p
    return launch


@dataclass
class Counts:
    """Of one launch: FLOPs of products, and bytes by tensor: loaded, stored, and both with every address once a block."""

    flops: int = 0
    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    distinct_loads: dict[str, int] = field(default_factory=dict)
    distinct_stores: dict[str, int] = field(default_factory=dict)


def bytes_of(array: np.ndarray) -> tuple[int, int]:
    """Where an array lies and how many bytes from there belong to it, gaps included."""
    return array.__array_interface__["data"][0], sum(
        (n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)
    ) + array.itemsize if array.size else 0


def launch(
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    arguments: Sequence[Any],
    tensors: Mapping[str, np.ndarray],
    order: str = "forwards",
    entry: Any = None,
) -> Counts:
    """Runs a kernel. Arguments are NumPy arrays and typed NumPy scalars; every array that it may touch, those whose addresses
    stand in a table too, is in `tensors` under the name that it is counted by. Raises Fault."""
    values = [np.uint64(bytes_of(a)[0]) if isinstance(a, np.ndarray) else a for a in arguments]
    cells = [np.array([value]) for value in values]
    pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
    sizes = np.array([*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block)), shared_bytes], np.uint32)
    places = np.array([bytes_of(array) for array in tensors.values()], np.uint64).reshape(-1, 2)
    counts, flops = np.zeros((len(tensors), 4), np.int64), ctypes.c_int64()
    run = entry or library(FILES[kernel])
    message = run(
        kernel.encode(), pointers, ctypes.c_void_p(sizes.ctypes.data), ORDERS[order], 1, ctypes.c_void_p(places.ctypes.data),
        len(tensors), ctypes.c_void_p(counts.ctypes.data), ctypes.byref(flops),
    )  # fmt: skip
    if message:
        text = message.decode()
        for i, name in reversed(list(enumerate(tensors))):
            text = text.replace(f"tensor {i} ", f"{name} ").replace(f"tensor {i}:", f"{name}:")
        raise Fault(f"{kernel}: {text}")
    columns = [dict(zip(tensors, column.tolist(), strict=True)) for column in counts.T]
    return Counts(flops.value, *columns)


class CpuDevice:
    """A Device (nanokv.kernels.cuda.launches) whose kernels run on this CPU, on NumPy arrays.

    `tensors` are named for counting; arrays that a launch is given besides are its own, by their place among the arguments.
    `counts` keeps what each launch did.
    """

    def __init__(self, order: str = "forwards", entries: Mapping[str, Any] | None = None, **tensors: np.ndarray):
        self.order, self.entries, self.tensors = order, entries or {}, dict(tensors)
        self.launched: list[str] = []
        self.counts: dict[str, Counts] = {}

    def address(self, array: np.ndarray) -> int:
        return bytes_of(array)[0]

    def launch(
        self, kernel: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        check_limits(kernel, grid, block, shared_bytes)
        self.launched.append(kernel)
        if 0 in grid:
            return
        known = {bytes_of(array) for array in self.tensors.values()}
        others = {
            f"argument {i}": value
            for i, value in enumerate(arguments)
            if isinstance(value, np.ndarray) and bytes_of(value) not in known
        }
        entry = self.entries.get(FILES[kernel])
        self.counts[kernel] = launch(
            kernel, grid, block, shared_bytes, arguments, {**self.tensors, **others}, self.order, entry
        )


def check_limits(kernel: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int) -> None:
    """What every card since sm_75 allows (CUDA C++ Programming Guide, technical specifications per compute capability):
    1024 threads a block, 48 KB of shared memory without asking for more, grids of 2^31 - 1 by 65535 by 65535."""
    assert 1 <= np.prod(block) <= 1024, f"{kernel}: {block} threads"
    assert shared_bytes <= 48 << 10, f"{kernel}: {shared_bytes} bytes of shared memory"
    for size, most in zip(grid, (2**31 - 1, 65535, 65535), strict=False):
        assert 0 <= size <= most, f"{kernel}: grid {grid}"
