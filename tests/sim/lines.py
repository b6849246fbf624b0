"""An independent cache: pycachesim (Hammer et al., AGPL, used by tests alone) as one fully associative LRU of whole lines."""

from collections.abc import Iterable

import pytest

LINE = 64


def traffic(capacity: int, trace: Iterable[tuple[str, int, int]], *, allocate: bool = True) -> tuple[int, int]:
    """Bytes (read from memory, written to it) by a trace of ("r" or "w", address, bytes) behind `capacity` bytes.

    Dirty lines are written back when they leave and at the end. `allocate`: a write that misses brings its line in, which
    counts as a read; otherwise it goes to memory.
    """
    cachesim = pytest.importorskip("cachesim", reason="not run: needs pycachesim (pip install pycachesim)")
    memory = cachesim.MainMemory()
    cache = cachesim.Cache("SRAM", 1, capacity // LINE, LINE, "LRU", write_back=True, write_allocate=allocate)
    memory.load_to(cache)
    memory.store_from(cache)
    simulator = cachesim.CacheSimulator(cache, memory)
    for kind, address, nbytes in trace:
        (simulator.load if kind == "r" else simulator.store)(address, length=nbytes)
    simulator.force_write_back()
    counted = memory.stats()
    return counted["LOAD_byte"], counted["STORE_byte"]
