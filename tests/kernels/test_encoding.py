"""What append writes is what the codecs encode, byte for byte, whatever number comes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nanokv.backend import NUMPY
from nanokv.kv.codec import get_codec
from nanokv.kv.pages import sources_of
from nanokv.kv.storage import Storage
from tests.support import examples

pytest.importorskip("numba", reason="not run: numba is not installed (pip install 'nanokv[cpu]')")

from nanokv.kernels.recording import Program, Tables
from tests.kernels.guard import guarded

CODECS = ["float32", "float16", "bfloat16", "int8", "fp8", "fp8 fixed"]
FIXED = 0.37


def storage(name, units, heads, dim):
    """Of two layers, full of ones: bytes that nobody writes stay."""
    name, _, fixed = name.partition(" ")
    found = Storage(2, units, 16, heads, dim, get_codec(name, np.float32, NUMPY, FIXED if fixed else None), NUMPY)
    for plane in found.planes:
        plane.view(np.uint8)[...] = 0xFF
    return found


def planes(found):
    return [plane.view(f"u{plane.dtype.itemsize}") for plane in found.planes]


def appended(name, k, v, slots, units, gap=0):
    """A storage's bytes after append has written k, v [R, H, D] into layer 1, from rows that lie `gap` numbers apart."""
    heads, dim = k.shape[1:]
    found = storage(name, units, heads, dim)
    tables = Tables(
        positions=np.zeros(len(k), np.int64), homes=np.zeros(len(k), np.int64), sources=sources_of(found)[:, None].copy(),
        fixed=found.fixed,
    )  # fmt: skip
    program, stride = Program(), heads * dim + gap
    for values, x in enumerate((k, v)):
        wide = np.full((len(x), stride), np.nan, np.float32)
        wide[:, : heads * dim] = x.reshape(len(x), -1)
        program.append(wide, heads, dim, slots, 1, bool(values), stride)
    with guarded():
        program.ready().run(len(k), 2, tables)
    return planes(found)


def encoded(name, k, v, slots, units):
    """The same by the codec."""
    found = storage(name, units, *k.shape[1:])
    with np.errstate(all="ignore"):
        found.write(1, slots, k, v)
    return planes(found)


def same_bytes(name, ours, theirs):
    """Equal but for the payload of a NaN, which the codecs leave to the processor."""
    for a, b in zip(ours, theirs, strict=True):
        nan = {4: lambda x: x & 0x7FFFFFFF > 0x7F800000, 2: lambda x: x & 0x7FFF > (0x7F80 if name == "bfloat16" else 0x7C00),
               1: lambda x: (x & 0x7F == 0x7F) if name.startswith("fp8") else np.zeros(x.shape, bool)}[a.itemsize]  # fmt: skip
        assert np.array_equal(nan(a), nan(b))
        assert np.array_equal(np.where(nan(a), 0, a), np.where(nan(b), 0, b))


NUMBERS = st.one_of(
    st.floats(width=32), st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-40, 3.4e38, 448.0, 65504.0]),
)  # fmt: skip


@examples(80)
@given(st.data(), st.sampled_from(CODECS))
def test_append_writes_the_codecs_bytes(data, name):
    """Any numbers, slots in any order, several heads of any width, rows with a gap between them."""
    rows, heads, dim = (data.draw(st.integers(1, most)) for most in (20, 3, 40))
    k, v = (data.draw(arrays.arrays(np.float32, (rows, heads, dim), elements=NUMBERS, fill=NUMBERS)) for _ in range(2))
    slots = np.array(data.draw(st.permutations(range(48)))[:rows], np.int64)
    same_bytes(name, appended(name, k, v, slots, 3, data.draw(st.integers(0, 3))), encoded(name, k, v, slots, 3))


def neighbours(numbers):
    """float32 numbers, each with the two beside it, of both signs."""
    numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(np.inf)), np.nextafter(numbers, np.float32(-np.inf))])
    return np.concatenate([numbers, -numbers]).astype(np.float32)


def edges(name):
    """Every finite number of a format that is not negative, every middle of two of them, and what is beyond the last."""
    import ml_dtypes

    stored = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}[name]
    width = np.dtype(stored).itemsize
    every = np.arange(1 << (8 * width - 1), dtype=f"u{width}").view(stored).astype(np.float32)
    every = every[np.isfinite(every)]
    middles = (every[:-1].astype(np.float64) + every[1:]) / 2
    beyond = every[-1].astype(np.float64) * np.array([1 + 2.0**-12, 1 + 2.0**-5])
    with np.errstate(over="ignore"):
        return neighbours(np.concatenate([every, middles, beyond, [1e-45, 3.4e38]]).astype(np.float32))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "fp8 fixed"])
def test_every_rounding_of_a_format_is_the_codecs(name):
    """All numbers of the format, all ties between neighbours and what is next to them. fp8's are met at one fixed scale: the
    quotients are every number there is only where the scale is a power of two, so at 0.37 they are what they are."""
    x = edges(name.partition(" ")[0])
    if name == "fp8 fixed":
        x = np.concatenate([x, x * np.float32(FIXED)])
    x = np.pad(x, (0, -len(x) % 64)).reshape(-1, 1, 64)
    slots, units = np.arange(len(x)), -(-len(x) // 16)
    same_bytes(name, appended(name, x, -x, slots, units), encoded(name, x, -x, slots, units))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_every_rounding_of_a_scaled_format_is_the_codecs(name):
    """Behind a largest number that makes the codes themselves: all of them, all ties, and what is next to them."""
    top = {"int8": 127, "fp8": 448}[name]
    x = edges("fp8") if name == "fp8" else neighbours(np.arange(0, 127.5, 0.5, np.float32))
    x = x[np.abs(x) <= top]
    x = np.pad(x, (0, -len(x) % 63)).reshape(-1, 1, 63)
    x = np.concatenate([np.full((len(x), 1, 1), top, np.float32), x], axis=-1)
    for scale in (1, 2.0**-100, 3e-42, 0.37, 7e35):
        scaled = x * np.float32(scale)
        slots, units = np.arange(len(x)), -(-len(x) // 16)
        same_bytes(name, appended(name, scaled, -scaled, slots, units), encoded(name, scaled, -scaled, slots, units))


def test_rows_of_several_caches_go_to_their_own():
    """Two storages of unlike formats in one step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, 2, 8)).astype(np.float32)
    homes, slots = np.array([0, 1, 0, 0, 1, 1, 1, 0, 0]), np.arange(9)
    names = "int8", "float16"
    found, expected = ([storage(name, 1, 2, 8) for name in names] for _ in range(2))
    tables = Tables(homes=homes, positions=slots, sources=np.stack([sources_of(each) for each in found], axis=1))
    program = Program()
    program.append(x, 2, 8, slots, 0, values=False)
    program.append(x, 2, 8, slots, 0, values=True)
    with guarded():
        program.ready().run(9, 1, tables)
    for home, each in enumerate(expected):
        each.write(0, slots[homes == home], x[homes == home], x[homes == home])
    for ours, theirs in zip(found, expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(planes(ours), planes(theirs), strict=True))
