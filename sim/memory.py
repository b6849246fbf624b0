"""The machine: device memory (HBM), a cache in front of it (L2), and what a thread block has on chip (SRAM, registers).

Tensors live in HBM. A schedule moves tiles: `load` puts one into SRAM until its `with` block ends, `store` writes one
back, `hold` claims registers for accumulators. Every byte is counted, exactly, by kernel, tensor, direction and level,
while the same call hands out the values, so a count and an output come from one run. SRAM and registers have a capacity;
passing it is a CapacityError that names the tile.

Three ways to run (Values): ALL computes every head; ONE computes the first and NONE none at all, and both count that one
head for all, since heads differ in nothing that is counted. NONE needs no memory and its cost grows with the number of tiles.

What crosses into SRAM comes from HBM unless a cache answers. With an `l2` capacity the cache is a real one: least
recently used out first, whole tiles, written back when they leave. Without, the machine is the papers': every load is
HBM traffic, except those that a schedule marks `cached`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import TracebackType
from typing import Self

import numpy as np

from nanokv.errors import CapacityError
from sim.formats import Format

Range = tuple[int, int]  # start, stop


class Values(StrEnum):
    """What a run computes: every head, the first of them, or nothing."""

    ALL = "all"
    ONE = "one"
    NONE = "none"


@dataclass
class Moved:
    """Bytes of one tensor. Reads by the chip that HBM answered and that the cache did; writes that reached HBM and those
    that only reached the cache, because the same bytes were written again before they left it."""

    hbm_read: int = 0
    hbm_write: int = 0
    cache_read: int = 0
    cache_write: int = 0

    @property
    def sram_read(self) -> int:
        """Bytes that came on chip."""
        return self.hbm_read + self.cache_read

    @property
    def sram_write(self) -> int:
        """Bytes that left the chip."""
        return self.hbm_write + self.cache_write

    @property
    def hbm(self) -> int:
        """Bytes through HBM, both ways."""
        return self.hbm_read + self.hbm_write

    def add(self, other: "Moved") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class Kernel:
    """What one kernel launch moves and multiplies."""

    tensors: dict[str, Moved] = field(default_factory=dict)
    flops: int = 0

    def moved(self, tensor: str) -> Moved:
        return self.tensors.setdefault(tensor, Moved())

    @property
    def total(self) -> Moved:
        total = Moved()
        for each in self.tensors.values():
            total.add(each)
        return total


@dataclass
class Counts:
    """What a schedule cost: its kernels in order, and the most that one thread block had on chip at once."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    sram_peak: int = 0
    register_peak: int = 0

    def kernel(self, name: str) -> Kernel:
        return self.kernels.setdefault(name, Kernel())

    @property
    def total(self) -> Moved:
        total = Moved()
        for kernel in self.kernels.values():
            total.add(kernel.total)
        return total

    @property
    def flops(self) -> int:
        return sum(kernel.flops for kernel in self.kernels.values())

    def per_tensor(self) -> dict[str, Moved]:
        """Summed over kernels, in the order in which tensors were first touched."""
        result: dict[str, Moved] = {}
        for kernel in self.kernels.values():
            for name, moved in kernel.tensors.items():
                result.setdefault(name, Moved()).add(moved)
        return result


class Scratch:
    """On-chip memory of one thread block with a capacity in bytes; None is without limit."""

    def __init__(self, name: str, capacity: int | None):
        self.name, self.capacity = name, capacity
        self.used = self.peak = 0

    def take(self, what: str, nbytes: int) -> None:
        if self.capacity is not None and self.used + nbytes > self.capacity:
            raise CapacityError(
                f"tile {what} ({nbytes} bytes) does not fit: {self.used} of {self.capacity} bytes of {self.name} are in use"
            )
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def give(self, nbytes: int) -> None:
        self.used -= nbytes


class Cache:
    """The L2: tiles, least recently used out first. A written tile reaches HBM when it leaves, or at flush()."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used = 0
        self._lines: OrderedDict[Hashable, tuple[int, Moved | None]] = OrderedDict()  # bytes, who pays when it leaves dirty

    def read(self, key: Hashable, nbytes: int, moved: Moved) -> None:
        line = self._lines.get(key)
        if line is not None:
            self._lines.move_to_end(key)
            moved.cache_read += nbytes
            return
        moved.hbm_read += nbytes
        self._insert(key, nbytes, None)

    def write(self, key: Hashable, nbytes: int, moved: Moved) -> None:
        old = self._lines.pop(key, None)
        if old is not None:
            self.used -= old[0]
            if old[1] is not None:
                old[1].cache_write += nbytes
        self._insert(key, nbytes, moved)

    def flush(self) -> None:
        while self._lines:
            self._evict()

    def _insert(self, key: Hashable, nbytes: int, dirty: Moved | None) -> None:
        if nbytes > self.capacity:
            if dirty is not None:
                dirty.hbm_write += nbytes
            return
        while self.used + nbytes > self.capacity:
            self._evict()
        self._lines[key] = nbytes, dirty
        self.used += nbytes

    def _evict(self) -> None:
        _, (nbytes, dirty) = self._lines.popitem(last=False)
        self.used -= nbytes
        if dirty is not None:
            dirty.hbm_write += nbytes


@dataclass(frozen=True)
class Tensor:
    """A tensor in HBM, `columns` wide; `data` [heads, rows, columns] of the heads whose values are computed, or None."""

    name: str
    columns: int
    format: Format
    data: np.ndarray | None = None

    def fill(self, values: np.ndarray) -> None:
        """What an earlier kernel left here; no byte is counted. Nothing happens where there are no values."""
        if self.data is not None:
            self.data[:] = values


class Tile:
    """A tile in SRAM for the length of a `with` block; `values` [rows, columns] or None when only counting."""

    def __init__(self, values: np.ndarray | None, nbytes: int, sram: Scratch):
        self._values, self._nbytes, self._sram = values, nbytes, sram

    @property
    def values(self) -> np.ndarray:
        assert self._values is not None, "a counting run has no values"
        return self._values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._sram.give(self._nbytes)


class Machine:
    """HBM, an optional L2, and one thread block's SRAM and registers; see the module. Capacities in bytes."""

    def __init__(
        self,
        sram: int | None = None,
        registers: int | None = None,
        l2: int | None = None,
        values: Values = Values.NONE,
    ):
        self.sram, self.registers = Scratch("SRAM", sram), Scratch("registers", registers)
        self.cache = Cache(l2) if l2 else None
        self.values = values
        self.counts = Counts()
        self._kernel = Kernel()
        self._times = 1

    def kernel(self, name: str) -> None:
        """What follows belongs to this kernel."""
        self._kernel = self.counts.kernel(name)

    def each(self, count: int) -> Iterator[int]:
        """0 .. count-1: the heads, equal in all that is counted. When not all are computed, only 0, counted `count` times.

        A cache is shared by all of them, so with one they all run."""
        if self.values is Values.ALL or self.cache is not None:
            yield from range(count)
            return
        self._times *= count
        yield 0
        self._times //= count

    def computes(self, head: int) -> bool:
        """Whether this key-value head's values are computed."""
        return self.values is Values.ALL or (self.values is Values.ONE and head == 0)

    def load(self, tensor: Tensor, head: int, rows: Range, columns: Range | None = None, *, cached: bool = False,
             counted: bool = True, slots: np.ndarray | None = None) -> Tile:  # fmt: skip
        """A tile into SRAM. `cached`: the model takes it that a cache still has these bytes from this kernel's first read.
        Not `counted`: a switch of the schedule leaves this tensor out. `slots`: the rows' places, where they are not a run."""
        lo, hi = columns or (0, tensor.columns)
        count, width = (rows[1] - rows[0]) * counted, hi - lo
        nbytes = count * tensor.format.row_bytes(width)
        scales = count * tensor.format.scale_bytes(width)
        self.sram.take(f"{tensor.name} {count}x{width}", nbytes + scales)
        if nbytes:
            self._read(tensor.name, (tensor.name, head, rows, lo), nbytes, cached)
        if scales:
            name = f"{tensor.name} scales"
            self._read(name, (name, head, rows, lo), scales, cached)
        values = None
        if tensor.data is not None and head < len(tensor.data):
            values = tensor.data[head, slots if slots is not None else slice(*rows), lo:hi]
        return Tile(values, nbytes + scales, self.sram)

    def store(self, tensor: Tensor, head: int, rows: Range, values: np.ndarray | None, columns: Range | None = None, *,
              counted: bool = True) -> None:  # fmt: skip
        """A tile back to HBM; values [rows, columns] or None when only counting."""
        lo, hi = columns or (0, tensor.columns)
        if counted:
            nbytes = (rows[1] - rows[0]) * tensor.format.row_bytes(hi - lo)
            moved = self._kernel.moved(tensor.name)
            if self.cache is None:
                moved.hbm_write += nbytes * self._times
            else:
                self.cache.write((tensor.name, head, rows, lo), nbytes, moved)
        if values is not None and tensor.data is not None:
            tensor.data[head, slice(*rows), lo:hi] = values

    @contextmanager
    def hold(self, name: str, elements: int) -> Iterator[None]:
        """Registers for float32 accumulators."""
        self.registers.take(name, 4 * elements)
        yield
        self.registers.give(4 * elements)

    def multiply(self, flops: int) -> None:
        self._kernel.flops += flops * self._times

    def finish(self) -> Counts:
        """The counts, after what the cache still holds has been written back."""
        if self.cache is not None:
            self.cache.flush()
        self.counts.sram_peak, self.counts.register_peak = self.sram.peak, self.registers.peak
        return self.counts

    def _read(self, name: str, key: Hashable, nbytes: int, cached: bool) -> None:
        moved = self._kernel.moved(name)
        if self.cache is not None:
            self.cache.read(key, nbytes, moved)
        elif cached:
            moved.cache_read += nbytes * self._times
        else:
            moved.hbm_read += nbytes * self._times
