"""How kernels are compiled and where the machine code is kept.

Numba keeps machine code on disk by the file that defines a function, and does not see when a function that it calls, in
another file, has changed. So all kernels share one folder named by a digest of their sources and of the compiler's
version: another version of nanokv, or an edit, begins a new one. Inside it Numba tells processors apart by itself.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

import llvmlite
import numba


def _digest() -> str:
    """Of the kernels' sources and the compiler's version."""
    found = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _folder() -> Path | None:
    """The folder for machine code, made now; None where nothing can be written."""
    base = numba.config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "nanokv" / "kernels" / _digest()
    probe = folder / f".{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError:
        return None
    return folder


FOLDER = _folder()


_COMPILING = RLock()


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """Numba takes the folder from its configuration when a function is decorated: it is set for that moment only, by one
    thread at a time."""
    with _COMPILING:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


def jit(**options: Any) -> Callable[[Callable], Any]:
    """Decorator: compiled at the first call, from the disk if it was before; IEEE arithmetic, division by zero included."""
    return _kept(numba.njit, error_model="numpy", **options)


def inner() -> Callable[[Callable], Any]:
    """Decorator: as jit(), for functions that compiled code alone calls."""
    return jit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


class CFunction:
    """A compiled function of four integers that gives one, called by its address: its code exists once, where what compiled
    code calls by name is compiled into it again. Compiled, or read from the disk, when its address is first asked for."""

    def __init__(self, function: Callable):
        self._function = function
        self.__doc__ = function.__doc__

    @cached_property
    def _compiled(self) -> Any:
        word = numba.types.intp
        return _kept(numba.cfunc, word(word, word, word, word), nopython=True, error_model="numpy")(self._function)

    @property
    def address(self) -> int:
        return int(self._compiled.address)


def _kept(compiler: Any, *arguments: Any, **options: Any) -> Callable[[Callable], Any]:
    def decorate(function: Callable) -> Any:
        if FOLDER is None:
            return compiler(*arguments, **options)(function)
        with _kept_in(FOLDER):
            return compiler(*arguments, cache=True, **options)(function)

    return decorate
