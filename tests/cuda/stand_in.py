"""The stand-in for CuPy (tests/stand_in.py) with the part that launches kernels: RawModule, whose kernels run on this CPU
through the header. So the host side of nanokv/kernels/cuda runs as it would on a card, and what it asks of the card is
counted: launches, copies to and from it, arrays that are written by array code, and memory that a pool would have to get
from the driver. Memory can be made to run out at any request.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nanokv.backend import NUMPY, Backend, get_backend
from nanokv.kernels.choice import PackedMemory
from nanokv.kernels.cuda.arrays import CardMemory
from nanokv.kernels.cuda.program import FILES, OPTIONS, source
from tests import stand_in
from tests.cuda.machine import bytes_of, check_limits, launch

CHUNK = 512  # what CuPy's pool rounds sizes up to; a freed piece serves the next request of its size


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError."""

    def __init__(self, size: int, total: int):
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class Meter:
    """What was asked of the card since it was last read, and its memory."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.memory: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.free: Counter[int] = Counter()
        self.captured: list[tuple[Any, ...]] | None = None  # launches of the graph that is being captured
        self.requests = 0  # arrays that came to be, in memory of their own
        self.most: int | None = None  # requests that are granted

    @contextmanager
    def refusing(self, granted: int) -> Iterator[None]:
        """Inside, only so many more requests for memory are granted."""
        self.most = self.requests + granted
        try:
            yield
        finally:
            self.most = None

    def read(self) -> dict[str, int]:
        found, self.counts = dict(self.counts), Counter()
        return found

    def count(self, what: str) -> None:
        """Something that a stream which is being captured does not allow."""
        assert self.captured is None, f"{what} while a graph is captured"
        self.counts[what] += 1

    def note(self, array: np.ndarray) -> None:
        """An array came to be: new memory, or a view of what was there."""
        whole = root(array)
        if id(whole) in self.memory:
            return
        if self.requests == self.most:
            raise OutOfMemoryError(whole.nbytes, sum(each.nbytes for each in list(self.memory.values())))
        self.requests += 1
        self.memory[id(whole)] = whole
        size = -(-whole.nbytes // CHUNK) * CHUNK
        if self.free[size]:
            self.free[size] -= 1
        else:
            self.count("allocations")
        weakref.finalize(whole, self.free.update, [size])

    def tensors(self, values: list[Any]) -> dict[str, np.ndarray]:
        """What a kernel may touch: its arguments, and what the addresses among them and in their tables point into."""
        found = {id(root(v)): root(v) for v in values if isinstance(v, np.ndarray)}
        tables = [v.reshape(-1) for v in values if isinstance(v, np.ndarray) and v.dtype == np.int64]
        addresses = {int(a) for table in tables for a in table} | {int(v) for v in values if isinstance(v, np.int64)}
        for whole in list(self.memory.values()):
            begin, size = bytes_of(whole)
            if any(begin <= a < begin + size for a in addresses):
                found[id(whole)] = whole
        return {f"memory {i}": array for i, array in enumerate(found.values())}


def root(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def both_memories(form: str | None = None) -> tuple[PackedMemory, CardMemory]:
    """Where weights go on the host and on the card."""
    card = get_backend("cupy")
    return PackedMemory(NUMPY.name, NUMPY.xp, form), CardMemory(card.name, card.xp, form)


def kv_memory() -> Backend:
    """Where caches go on the card, in exact numerics."""
    return replace(get_backend("cupy"), kernels=True)


def install(monkeypatch: pytest.MonkeyPatch, meter: Meter, capability: str = "90") -> ModuleType:
    """Puts the module in the place of cupy for one test."""
    cupy = stand_in.module()
    make, take, send = stand_in.DeviceArray.__init__, stand_in.DeviceArray.get, cupy.asarray
    write = stand_in.DeviceArray.__setitem__

    def init(self: Any, data: np.ndarray) -> None:
        make(self, data)
        meter.note(data)

    def get(self: Any) -> np.ndarray:
        meter.count("copies from the card")
        return take(self)

    def asarray(value: Any) -> Any:
        if not isinstance(value, stand_in.DeviceArray):
            meter.count("copies to the card")
        return send(value)

    def put(self: Any, values: np.ndarray) -> None:
        meter.count("copies to the card")
        self.data[...] = values

    def set_item(self: Any, key: Any, value: Any) -> None:
        meter.count("array writes")
        write(self, key, value)

    class Module:
        def __init__(self, *, code: str, options: tuple[str, ...], name_expressions: tuple[str, ...]):
            assert options == OPTIONS
            assert all(code == source(FILES[name]) for name in name_expressions)
            self.names = name_expressions

        def get_function(self, name: str) -> Any:
            assert name in self.names
            assert meter.captured is None, "a kernel is loaded while a graph is captured"

            def call(grid: tuple, block: tuple, arguments: tuple, *, shared_mem: int = 0) -> None:
                if meter.captured is not None:
                    meter.captured.append((call, grid, block, arguments, shared_mem))
                    return
                check_limits(name, grid, block, shared_mem)
                meter.counts["launches"] += 1
                values = [a.data if isinstance(a, stand_in.DeviceArray) else a for a in arguments]
                assert all(isinstance(a, np.ndarray | np.generic) for a in values)
                launch(name, grid, block, shared_mem, values, meter.tensors(values))

            return call

    monkeypatch.setattr(stand_in.DeviceArray, "__init__", init)
    monkeypatch.setattr(stand_in.DeviceArray, "get", get)
    monkeypatch.setattr(stand_in.DeviceArray, "set", put)
    monkeypatch.setattr(stand_in.DeviceArray, "__setitem__", set_item)
    cupy.asarray, cupy.RawModule = asarray, Module

    class Stream(AbstractContextManager):
        def __init__(self, non_blocking: bool):
            assert non_blocking, "a graph on the default stream"

        def begin_capture(self) -> None:
            meter.captured = []

        def end_capture(self) -> Any:
            launches, meter.captured = meter.captured, None
            return SimpleNamespace(launch=lambda: replay(launches))

        def __exit__(self, *_: Any) -> None:
            pass

    def replay(launches: list[tuple[Any, ...]]) -> None:
        """What was captured: scalars as they were, arrays by where they lie."""
        meter.counts["graphs"] += 1
        for call, grid, block, arguments, shared_mem in launches:
            call(grid, block, arguments, shared_mem=shared_mem)

    cupy.cuda = SimpleNamespace(
        Stream=Stream,
        Device=lambda: SimpleNamespace(compute_capability=capability, id=0),
        runtime=SimpleNamespace(getDeviceProperties=lambda _: {"name": b"stand-in"}, memGetInfo=lambda: (1024, 16_000)),
    )
    return cupy
