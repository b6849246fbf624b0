"""A list of operations, and all of it in one compiled call: the only place where threads are.

An operation is a line of numbers: its kernel's address, its rows, and the kernel's own addresses and sizes. A kernel is cut
into tasks that may be done in any order; an operation begins when all tasks of the one before are done. Threads take tasks
from a counter until none is left, then wait for those that others took: so a thread that comes late, or never, changes only
how long it takes, and no bit. A model's step is one such list, recorded once (nanokv/models/recorded.py); the functions of
arrays in compiled.py are lists of one operation.

A kernel is a function (line, block, scratch, task) of an operation's address, the address of the run's arguments (layout.py)
and that of the thread's scratch memory. It does one task, or, asked for task -1, says how many there are. It is compiled when
its address is first asked for.
"""

from threading import Lock
from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from nanokv.kernels import layout as at
from nanokv.kernels.compiling import CFunction, jit
from nanokv.kernels.simd import integers, look, rest, take

PATIENCE = 1 << 12  # looks at a counter before the core is offered to others
COUNT = -1  # the task that asks how many there are


@intrinsic
def _call(_typing: Any, function: Any, line: Any, block: Any, scratch: Any, task: Any) -> Any:
    """Calls the kernel at an address."""

    def emit(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return b.call(b.inttoptr(args[0], ir.FunctionType(word, [word] * 4).as_pointer()), args[1:])

    return types.intp(*[types.intp] * 5), emit


def _work(block: Any, scratch: Any, _: Any, thread: Any) -> Any:
    """What one thread does."""
    b = integers(block, at.BLOCK)
    scratch += thread * b[at.SCRATCH_BYTES]
    for step in range(b[at.STEPS]):
        line, counters = b[at.PROGRAM] + step * at.COLUMNS * 8, b[at.COUNTERS] + step * at.COUNTER_BYTES
        op = integers(line, at.COLUMNS)
        count = _call(op[at.KERNEL], line, block, scratch, COUNT) if op[at.ROWS] else 0
        task = take(counters, 0)
        while task < count:
            _call(op[at.KERNEL], line, block, scratch, task)
            take(counters, at.DONE)
            task = take(counters, 0)
        looks = 0
        while look(counters, at.DONE) < count:
            rest(looks > PATIENCE)
            looks += 1
    return 0


WORK = CFunction(_work)
_TURN = Lock()  # of the machine's cores; and one of numba's threading layers ends a process in which two ask at once


@jit(parallel=True, nogil=True)
def _run(threads: Any, function: Any, block: Any, scratch: Any) -> None:
    for thread in prange(threads):
        _call(function, block, scratch, 0, thread)


def run(threads: int, block: int, scratch: int) -> None:
    """All operations of a program, one program at a time; `block` is the address of its arguments, in layout.py's order."""
    with _TURN:
        _run(threads, WORK.address, block, scratch)
