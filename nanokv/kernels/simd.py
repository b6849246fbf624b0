"""Sixteen float32 lanes as a value of compiled code, and the few operations that the kernels are written in.

Nothing here depends on the width of the machine's registers: LLVM cuts the sixteen lanes into what there is. A fused
multiply-add is LLVM's, which is exact everywhere (in software where the processor has none). Nothing is left to an
optimiser's choice of order: compiled code contains the operations that are written, in the order that they are written.

Addresses are whole numbers of bytes, offsets whole numbers of elements.
"""

import os
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, models, register_model

from nanokv.kernels.compiling import inner

LANES = 16
_X86 = platform.machine() in ("x86_64", "AMD64")

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VF, _VI = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_UNDEFINED = ir.Constant(_VF, ir.Undefined)


class Lanes(types.Type):
    """Sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any):
        super().__init__(manager, kind, _VF)


def _call(b: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name=name), values)


def _integers(value: int) -> ir.Constant:
    return ir.Constant(_VI, [value] * LANES)


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VF, [value] * LANES)


def _pointer(b: Any, address: Any, element: Any, kind: Any, at: Any) -> Any:
    """A pointer to `at` at an offset of elements of `kind`."""
    return b.bitcast(b.gep(b.inttoptr(address, kind.as_pointer()), [element]), at.as_pointer())


def _read(b: Any, address: Any, element: Any, kind: Any, count: int = LANES) -> Any:
    """`count` consecutive numbers of `kind`, wherever they begin."""
    value = b.load(_pointer(b, address, element, kind, ir.VectorType(kind, count)))
    value.align = kind.width // 8 if isinstance(kind, ir.IntType) else 4
    return value


def _splat(b: Any, value: Any) -> Any:
    first = b.insert_element(_UNDEFINED, value, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, _UNDEFINED, _integers(0))


def _loading(emit: Callable) -> Any:
    """A function of (address, element) that gives lanes."""

    @intrinsic
    def load(_typing: Any, address: Any, element: Any) -> Any:
        return lanes(types.intp, types.intp), lambda _c, b, _s, args: emit(b, *args)

    return load


def _unary(emit: Callable) -> Any:
    @intrinsic
    def operation(_typing: Any, x: Any) -> Any:
        return lanes(lanes), lambda _c, b, _s, args: emit(b, *args)

    return operation


def _binary(emit: Callable) -> Any:
    @intrinsic
    def operation(_typing: Any, x: Any, y: Any) -> Any:
        return lanes(lanes, lanes), lambda _c, b, _s, args: emit(b, *args)

    return operation


def _half(b: Any, bits: Any) -> Any:
    """float16's bits in sixteen int32 -> float32, subnormals, infinities and NaN included, by integer operations alone:
    the mantissa moves up, a product with 2^112 mends the exponent exactly, and the largest exponent becomes float32's."""
    size = b.shl(b.and_(bits, _integers(0x7FFF)), _integers(13))
    value = b.fmul(b.bitcast(size, _VF), _constant(2.0**112))
    special = b.or_(size, _integers(0x7F800000))
    finite = b.icmp_signed("<", size, _integers(0x7C00 << 13))
    sign = b.shl(b.and_(bits, _integers(0x8000)), _integers(16))
    return b.bitcast(b.or_(b.select(finite, b.bitcast(value, _VI), special), sign), _VF)


def float32(b: Any, address: Any, element: Any) -> Any:
    return _read(b, address, element, _F32)


def bfloat16(b: Any, address: Any, element: Any) -> Any:
    return b.bitcast(b.shl(b.zext(_read(b, address, element, _I16), _VI), _integers(16)), _VF)


def float16(b: Any, address: Any, element: Any) -> Any:
    return _half(b, b.zext(_read(b, address, element, _I16), _VI))


load, load_bfloat16, load_float16 = _loading(float32), _loading(bfloat16), _loading(float16)
load_int8 = _loading(lambda b, address, element: b.sitofp(b.sext(_read(b, address, element, _I8), _VI), _VF))


@intrinsic
def load_nibbles(_typing: Any, address: Any, element: Any, shift: Any) -> Any:
    """The four bits from `shift` up of sixteen 32-bit words -> 0 .. 15."""

    def emit(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        words = _read(b, args[0], args[1], _I32)
        shifts = b.insert_element(ir.Constant(_VI, ir.Undefined), b.trunc(args[2], _I32), ir.Constant(_I32, 0))
        shifts = b.shuffle_vector(shifts, ir.Constant(_VI, ir.Undefined), _integers(0))
        return b.sitofp(b.and_(b.lshr(words, shifts), _integers(15)), _VF)

    return lanes(types.intp, types.intp, types.intp), emit


@intrinsic
def store(_typing: Any, address: Any, element: Any, value: Any) -> Any:
    def emit(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        b.store(args[2], _pointer(b, args[0], args[1], _F32, _VF)).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, lanes), emit


@intrinsic
def splat(_typing: Any, value: Any) -> Any:
    """One number in every lane."""
    return lanes(types.float32), lambda _c, b, _s, args: _splat(b, args[0])


@intrinsic
def first(_typing: Any, value: Any) -> Any:
    """Lane 0."""
    return types.float32(lanes), lambda _c, b, _s, args: b.extract_element(args[0], ir.Constant(_I32, 0))


@intrinsic
def fma(_typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z in each lane, rounded once."""
    return lanes(lanes, lanes, lanes), lambda _c, b, _s, args: _call(b, "llvm.fma.v16f32", _VF, *args)


@intrinsic
def fma1(_typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z of three numbers, rounded once."""
    one = types.float32
    return one(one, one, one), lambda _c, b, _s, args: _call(b, "llvm.fma.f32", _F32, *args)


@intrinsic
def where_less(_typing: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """`yes` in the lanes where x < y, else, and where either is NaN, `no`."""

    def emit(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        x, y, yes, no = args
        return b.select(b.fcmp_ordered("<", x, y), yes, no)

    return lanes(lanes, lanes, lanes, lanes), emit


add = _binary(lambda b, x, y: b.fadd(x, y))
sub = _binary(lambda b, x, y: b.fsub(x, y))
mul = _binary(lambda b, x, y: b.fmul(x, y))
div = _binary(lambda b, x, y: b.fdiv(x, y))
absolute = _unary(lambda b, x: b.bitcast(b.and_(b.bitcast(x, _VI), _integers(0x7FFFFFFF)), _VF))
negative = _unary(lambda b, x: b.bitcast(b.xor(b.bitcast(x, _VI), _integers(-0x80000000)), _VF))
# 2^n of the n that stands in the low bits of 12582912 + n
power_of_two = _unary(lambda b, x: b.bitcast(b.add(b.shl(b.bitcast(x, _VI), _integers(23)), _integers(127 << 23)), _VF))


def _fold(b: Any, x: Any) -> Any:
    """Lanes 8, then 4, 2 and 1 apart are added: every lane holds the sum."""
    for apart in (8, 4, 2, 1):
        order = ir.Constant(_VI, [lane ^ apart for lane in range(LANES)])
        x = b.fadd(x, b.shuffle_vector(x, _UNDEFINED, order))
    return x


fold = _unary(_fold)


def _largest(b: Any, x: Any) -> Any:
    """The largest lane in every lane; there must be no NaN."""
    for apart in (8, 4, 2, 1):
        other = b.shuffle_vector(x, _UNDEFINED, ir.Constant(_VI, [lane ^ apart for lane in range(LANES)]))
        x = b.select(b.fcmp_ordered("<", x, other), other, x)
    return x


largest = _unary(_largest)


def _turned(b: Any, rows: list) -> list:
    """Sixteen rows of sixteen -> their columns: four perfect shuffles of the 256 elements exchange rows and columns."""
    low = ir.Constant(_VI, [lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
    high = ir.Constant(_VI, [8 + lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
    for _ in range(4):
        pairs = list(zip(rows[:8], rows[8:], strict=True))
        rows = [b.shuffle_vector(x, y, order) for x, y in pairs for order in (low, high)]
    return rows


@intrinsic
def transpose(_typing: Any, source: Any, source_row: Any, target: Any, target_row: Any) -> Any:
    """target[j, i] = source[i, j] for 16 x 16 float32 in memory, rows `source_row` and `target_row` elements apart."""

    def emit(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        source, source_row, target, target_row = args
        rows = [_read(b, source, b.mul(source_row, ir.Constant(_I64, i)), _F32) for i in range(LANES)]
        for i, row in enumerate(_turned(b, rows)):
            b.store(row, _pointer(b, target, b.mul(target_row, ir.Constant(_I64, i)), _F32, _VF)).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), emit


def _number(kind: Any, result: Any, convert: Callable) -> Any:
    @intrinsic
    def number(_typing: Any, address: Any, element: Any) -> Any:
        def emit(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            return convert(b, b.load(_pointer(b, args[0], args[1], kind, kind)))

        return result(types.intp, types.intp), emit

    return number


# One number at an offset of an address: float32; 16 bits, 8 bits and 8 bits with a sign, widened.
number = _number(_F32, types.float32, lambda _b, value: value)
word = _number(_I16, types.int32, lambda b, value: b.zext(value, _I32))
byte = _number(_I8, types.int32, lambda b, value: b.zext(value, _I32))
signed_byte = _number(_I8, types.int32, lambda b, value: b.sext(value, _I32))


def _putting(kind: Any, given: Any, convert: Callable) -> Any:
    @intrinsic
    def place(_typing: Any, address: Any, element: Any, value: Any) -> Any:
        def emit(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            b.store(convert(b, args[2]), _pointer(b, args[0], args[1], kind, kind))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, given), emit

    return place


# One number to an offset of an address: float32, the low 16 bits, the low 8.
put = _putting(_F32, types.float32, lambda _b, value: value)
put_word = _putting(_I16, types.int32, lambda b, value: b.trunc(value, _I16))
put_byte = _putting(_I8, types.int32, lambda b, value: b.trunc(value, _I8))


# The float32 whose bits are the low half of an int64 at an offset of an address.
float_of = _number(_I64, types.float32, lambda b, value: b.bitcast(b.trunc(value, _I32), _F32))


@intrinsic
def bits_of_float(_typing: Any, value: Any) -> Any:
    return types.int32(types.float32), lambda _c, b, _s, args: b.bitcast(args[0], _I32)


@intrinsic
def float_of_bits(_typing: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda _c, b, _s, args: b.bitcast(args[0], _F32)


def _by_rows(sizes: tuple[int, ...], write: Callable[[Any, int, list], None]) -> Any:
    """A compiled function (left, x, x_row, w, w_row, count, out, out_row) of addresses and numbers: it does as many rows of the
    `left` ones as the largest of `sizes` that is no more, and gives their number. `write` (b, rows, arguments from x on) emits
    the code for one size, whose sums stay in registers; the last size is 1."""

    @intrinsic
    def segment(_typing: Any, left: Any, x: Any, x_row: Any, w: Any, w_row: Any, count: Any, out: Any, out_row: Any) -> Any:
        def emit(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            done, ways = b.append_basic_block("done"), []
            for rows in sizes:
                if rows > 1:
                    here, other = b.append_basic_block("here"), b.append_basic_block("other")
                    b.cbranch(b.icmp_signed(">=", args[0], ir.Constant(_I64, rows)), here, other)
                    b.position_at_end(here)
                write(b, rows, list(args[1:]))
                ways.append((rows, b.block))
                b.branch(done)
                if rows > 1:
                    b.position_at_end(other)
            b.position_at_end(done)
            taken = b.phi(_I64)
            for rows, block in ways:
                taken.add_incoming(ir.Constant(_I64, rows), block)
            return taken

        return types.intp(*[types.intp] * 8), emit

    return segment


def product(sizes: tuple[int, ...], vectors: int, unroll: int = 4, continues: bool = False, read: Callable = float32) -> Any:
    """A function of _by_rows(): one segment of the product rule,

        out[r, n] += chain over k < count of fma(x[r, k], w[k, n], chain)     for r < rows, n < 16 * vectors

    with arrays at these addresses, whose rows are x_row, w_row and out_row elements apart; all are float32 but w, which is as
    `read` reads it. One that `continues` takes the chain's beginning from out and leaves its end there: a segment whose
    weights lie in several places.
    """

    def write(b: Any, rows: int, args: list) -> None:
        x, x_row, w, w_row, count, out, out_row = args

        def steps(state: list, k: Any, many: int) -> list:
            for u in range(many):
                at = b.add(k, ir.Constant(_I64, u))
                base = b.mul(at, w_row)
                weights = [read(b, w, b.add(base, ir.Constant(_I64, v * LANES))) for v in range(vectors)]
                for r in range(rows):
                    one = b.load(_pointer(b, x, b.add(b.mul(x_row, ir.Constant(_I64, r)), at), _F32, _F32))
                    one.align = 4
                    every = _splat(b, one)
                    for v in range(vectors):
                        here = r * vectors + v
                        state[here] = _call(b, "llvm.fma.v16f32", _VF, every, weights[v], state[here])
            return state

        def loop(state: list, begin: Any, end: Any, many: int) -> list:
            entry, body, after = b.block, b.append_basic_block("body"), b.append_basic_block("after")
            b.cbranch(b.icmp_signed("<", begin, end), body, after)
            b.position_at_end(body)
            k, carried = b.phi(_I64), [b.phi(_VF) for _ in state]
            new = steps(list(carried), k, many)
            following = b.add(k, ir.Constant(_I64, many))
            for phi, start, value in zip([k, *carried], [begin, *state], [following, *new], strict=True):
                phi.add_incoming(start, entry)
                phi.add_incoming(value, b.block)
            end_of_body = b.block
            b.cbranch(b.icmp_signed("<", following, end), body, after)
            b.position_at_end(after)
            results = []
            for start, value in zip(state, new, strict=True):
                result = b.phi(_VF)
                result.add_incoming(start, entry)
                result.add_incoming(value, end_of_body)
                results.append(result)
            return results

        places = [
            b.add(b.mul(out_row, ir.Constant(_I64, r)), ir.Constant(_I64, v * LANES))
            for r in range(rows)
            for v in range(vectors)
        ]
        begin = [_read(b, out, place, _F32) if continues else _constant(0.0) for place in places]
        whole = b.and_(count, ir.Constant(_I64, -unroll))
        state = loop(begin, ir.Constant(_I64, 0), whole, unroll)
        state = loop(state, whole, count, 1)
        for place, chain in zip(places, state, strict=True):
            value = chain if continues else b.fadd(_read(b, out, place, _F32), chain)
            b.store(value, _pointer(b, out, place, _F32, _VF)).align = 4

    return _by_rows(sizes, write)


def dots(sizes: tuple[int, ...]) -> Any:
    """A function of _by_rows(): one segment of the product rule with the weights turned in registers,

        out[r, t] += chain over d < count of fma(x[r, d], w[t, d], chain)     for r < rows, t < 16

    with float32 arrays at these addresses, whose rows are x_row, w_row and out_row elements apart; count is a multiple of 16.
    """

    def write(b: Any, rows: int, args: list) -> None:
        x, x_row, keys, key_row, count, out, out_row = args
        entry, body, after = b.block, b.append_basic_block("body"), b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        d, chains = b.phi(_I64), [b.phi(_VF) for _ in range(rows)]
        lines = [_read(b, keys, b.add(b.mul(key_row, ir.Constant(_I64, i)), d), _F32) for i in range(LANES)]
        new = list(chains)
        for j, column in enumerate(_turned(b, lines)):
            at = b.add(d, ir.Constant(_I64, j))
            for r in range(rows):
                one = b.load(_pointer(b, x, b.add(b.mul(x_row, ir.Constant(_I64, r)), at), _F32, _F32))
                new[r] = _call(b, "llvm.fma.v16f32", _VF, _splat(b, one), column, new[r])
        following = b.add(d, ir.Constant(_I64, LANES))
        begins = [ir.Constant(_I64, 0), *[_constant(0.0)] * rows]
        for phi, start, value in zip([d, *chains], begins, [following, *new], strict=True):
            phi.add_incoming(start, entry)
            phi.add_incoming(value, b.block)
        b.cbranch(b.icmp_signed("<", following, count), body, after)
        b.position_at_end(after)
        for r, chain in enumerate(new):
            place = b.mul(out_row, ir.Constant(_I64, r))
            total = b.fadd(_read(b, out, place, _F32), chain)
            b.store(total, _pointer(b, out, place, _F32, _VF)).align = 4

    return _by_rows(sizes, write)


@intrinsic
def _as_floats(_typing: Any, address: Any) -> Any:
    kind = types.CPointer(types.float32)
    return kind(types.intp), lambda _c, b, _s, args: b.inttoptr(args[0], _F32.as_pointer())


@intrinsic
def _as_integers(_typing: Any, address: Any) -> Any:
    kind = types.CPointer(types.int64)
    return kind(types.intp), lambda _c, b, _s, args: b.inttoptr(args[0], _I64.as_pointer())


@inner()
def vector(address: Any, count: Any) -> Any:
    """The float32 array [count] at an address."""
    return carray(_as_floats(address), (count,))


@inner()
def matrix(address: Any, rows: Any, columns: Any) -> Any:
    """The float32 array [rows, columns] at an address."""
    return carray(_as_floats(address), (rows, columns))


@inner()
def integers(address: Any, count: Any) -> Any:
    """The int64 array [count] at an address."""
    return carray(_as_integers(address), (count,))


@inner()
def table(address: Any, rows: Any, columns: Any) -> Any:
    """The int64 array [rows, columns] at an address."""
    return carray(_as_integers(address), (rows, columns))


@intrinsic
def take(_typing: Any, address: Any, element: Any) -> Any:
    """Adds one to an int64 that threads share -> what it was."""

    def emit(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _pointer(b, args[0], args[1], _I64, _I64), ir.Constant(_I64, 1), "seq_cst")

    return types.intp(types.intp, types.intp), emit


@intrinsic
def look(_typing: Any, address: Any, element: Any) -> Any:
    """An int64 that threads share, and with it all that was written before it was raised."""

    def emit(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.load_atomic(_pointer(b, args[0], args[1], _I64, _I64), "acquire", 8)

    return types.intp(types.intp, types.intp), emit


@intrinsic
def rest(_typing: Any, give_way: Any) -> Any:
    """A moment of a waiting loop; with `give_way` another thread may have the core."""

    def emit(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        if _X86:
            _call(b, "llvm.x86.sse2.pause", ir.VoidType())
        if os.name == "posix":
            with b.if_then(b.trunc(args[0], ir.IntType(1))):
                _call(b, "sched_yield", _I32)
        return context.get_dummy_value()

    return types.void(types.boolean), emit
