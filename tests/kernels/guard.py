"""Programs run in memory that tells: scratch full of NaN before each run, and behind every part of it words that must stay."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from time import sleep

import numpy as np
import pytest

from nanokv.backend import address_of
from nanokv.kernels import layout, program, recording

GUARD = 4096  # words; an overrun of a row or a tile of small shapes shows
UNTOUCHED = np.uint32(0x7FC0DEAD)  # a NaN
Runner = Callable[[int, int, int], None]


@contextmanager
def guarded(runner: Runner = program.run) -> Iterator[list[int]]:
    """All programs from now on, run by `runner` (threads, block, scratch); gives the list of what they were run on."""
    make_room, ran = recording.Ready._make_room, []
    memory: list[np.ndarray] = []  # scratch and partial results of the run that comes next

    def make_guarded_room(ready: recording.Ready, tables: recording.Tables | None, threads: int) -> None:
        make_room(ready, tables, threads)
        block = ready._block
        each = int(block[layout.SCRATCH_BYTES]) // 4
        assert ready._scratch.size >= each * threads
        block[layout.SCRATCH_BYTES] = (each + GUARD) * 4
        m, l, o = (int(block[part]) for part in (layout.PART_M, layout.PART_L, layout.PART_O))  # noqa: E741
        partial = (l - o + l - m) // 4
        assert ready._partial.size >= partial
        memory[:] = _filled((each + GUARD) * threads), _filled(partial + GUARD)
        block[[layout.PART_M, layout.PART_L, layout.PART_O]] += address_of(memory[1]) - o

    def run(threads: int, block: int, scratch: int) -> None:
        runner(threads, block, address_of(memory[0]))
        for guard in (part[-GUARD:] for part in (*np.split(memory[0], threads), memory[1])):
            assert np.all(guard.view(np.uint32) == UNTOUCHED), "a kernel wrote behind its memory"
        ran.append(threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording.Ready, "_make_room", make_guarded_room)
        patch.setattr(recording, "run", run)
        yield ran


def _filled(words: int) -> np.ndarray:
    return np.full(words, UNTOUCHED, np.uint32).view(np.float32)


def work(block: int, scratch: int, thread: int) -> None:
    """What one thread of a program does, outside of Numba's: called so, it holds no lock of Python's."""
    kernel = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(program.WORK.address)
    kernel(block, scratch, 0, thread)


def one_thread_does_all(threads: int, block: int, scratch: int) -> None:
    """The last; the others never come."""
    work(block, scratch, threads - 1)


def one_after_the_other(threads: int, block: int, scratch: int) -> None:
    """Each comes when those before it have gone."""
    for thread in range(threads):
        work(block, scratch, thread)


def late(threads: int, block: int, scratch: int) -> None:
    """Each begins a little after the one before."""
    crowd = [Thread(target=work, args=(block, scratch, thread)) for thread in range(threads)]
    for thread in crowd:
        thread.start()
        sleep(0.0005)
    for thread in crowd:
        thread.join()
