"""A list of operations, and all of it in one compiled call: the only place where threads are.

An operation is a line of numbers: which kernel, how many rows, and the kernel's addresses and sizes. A kernel is cut into
tasks that may be done in any order; an operation begins when all tasks of the one before are done. Threads take tasks from
a counter until none is left, then wait for those that others took: so a thread that comes late, or never, changes only
how long it takes, and no bit. A model's step is one such list, recorded once (nanokv/models/compiled_step.py); the functions
of arrays in compiled.py are lists of one operation.
"""

from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from nanokv.kernels import layout as at
from nanokv.kernels.attention import attend_rows, attend_tile, combine_run, parts_of
from nanokv.kernels.compiling import c_function, inner, jit
from nanokv.kernels.encoding import append
from nanokv.kernels.layout import FEW_RUNS, FEW_TILES, MANY_RUNS, SET_END, TILES_END
from nanokv.kernels.linear import linear, linear_tasks
from nanokv.kernels.rows import add_rows, embed, gelu_new, layer_norm, rms_norm, rotate, row_tasks, swiglu
from nanokv.kernels.simd import float32_of_bits, integers, look, rest, table, take, vector

PATIENCE = 1 << 12  # looks at a counter before the core is offered to others


@inner()
def _tasks(op: Any, sets: Any, threads: Any) -> Any:
    """Tasks of an operation; each does not depend on how many there are in more than what it leaves to the others."""
    kind, rows = op[0], op[1]
    if rows == 0:
        return 0
    if kind == at.LINEAR:
        return linear_tasks(rows, op[11], threads)
    if kind == at.ATTEND_TILES:
        tiles = sets[op[7], TILES_END] - sets[op[7], FEW_TILES]
        return tiles * parts_of(tiles, op[8])
    if kind == at.COMBINE:
        return (sets[op[2], MANY_RUNS] - sets[op[2], FEW_RUNS]) * op[3]
    if kind == at.ATTEND_ROWS:
        return (sets[op[7], SET_END] - sets[op[7], MANY_RUNS]) * op[8]
    if kind == at.RMS_NORM:
        return row_tasks(rows * op[4], op[7])
    if kind == at.ROTATE or kind == at.APPEND:
        return row_tasks(rows, op[4] * op[5])
    return row_tasks(rows, op[2])


@inner()
def _do(op: Any, real: Any, task: Any, tasks: Any, b: Any, sets: Any, scratch: Any) -> None:
    """A task of an operation; its columns are those that recording.py writes."""
    kind, rows = op[0], op[1]
    if kind == at.LINEAR:
        linear(task, tasks, rows, op[2], op[3], op[4], op[5], op[6], op[7], op[8], op[9], op[10], op[11], scratch)
    elif kind == at.ATTEND_TILES:
        attend_tile(task, op, real, b, sets, scratch)
    elif kind == at.COMBINE:
        combine_run(task, op, b, sets)
    elif kind == at.ATTEND_ROWS:
        attend_rows(task, op, real, b, sets, scratch)
    elif kind == at.RMS_NORM:
        rms_norm(task, rows, op[2], op[3], op[4], op[5], real, op[6], op[7], scratch)
    elif kind == at.LAYER_NORM:
        layer_norm(task, rows, op[3], op[4], op[5], real, op[6], op[2], scratch)
    elif kind == at.ROTATE:
        rotate(task, rows, op[2], op[3], op[4], op[5], op[6], op[7], op[8], op[9])
    elif kind == at.GELU_NEW:
        gelu_new(task, rows, op[3], op[4], op[2], scratch)
    elif kind == at.SWIGLU:
        swiglu(task, rows, op[3], op[4], op[2], scratch)
    elif kind == at.APPEND:
        sources = table(b[at.SOURCES] + op[7] * b[at.NUM_SOURCES] * 7 * 8, b[at.NUM_SOURCES], 7)
        homes, fixed = integers(b[at.HOMES], b[at.NUM_ROWS]), float32_of_bits(b[at.FIXED])
        append(task, rows, op[2], op[3], op[4], op[5], op[6], sources, homes, op[8], fixed)
    elif kind == at.ADD:
        add_rows(task, rows, op[3], op[4], op[2])
    elif kind == at.EMBED:
        embed(task, rows, op[3], op[4], op[5], op[6], op[7], op[8], op[9], op[10], op[2])


@c_function(types.void(types.intp, types.intp))
def _work(block: Any, thread: Any) -> None:
    """What one thread does."""
    b = integers(block, at.BLOCK)
    program, reals = table(b[at.PROGRAM], b[at.STEPS], at.COLUMNS), vector(b[at.REALS], b[at.STEPS])
    sets, scratch = table(b[at.SETS], b[at.NUM_SETS], at.SET_COLUMNS), b[at.SCRATCH] + thread * b[at.SCRATCH_BYTES]
    for step in range(b[at.STEPS]):
        op, counters = program[step], b[at.COUNTERS] + step * at.COUNTER_BYTES
        count, task = _tasks(op, sets, b[at.THREADS]), take(counters, 0)
        while task < count:
            _do(op, reals[step], task, count, b, sets, scratch)
            take(counters, at.DONE)
            task = take(counters, 0)
        looks = 0
        while look(counters, at.DONE) < count:
            rest(looks > PATIENCE)
            looks += 1


@intrinsic
def _call(_typing: Any, function: Any, block: Any, thread: Any) -> Any:
    """Calls the function at an address."""

    def emit(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        b.call(b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [word, word]).as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), emit


@jit(parallel=True, nogil=True)
def _run(threads: Any, function: Any, block: Any) -> None:
    for thread in prange(threads):
        _call(function, block, thread)


def run(threads: int, block: int) -> None:
    """All operations of a program; `block` is the address of its arguments, in layout.py's order."""
    _run(threads, _work.address, block)
