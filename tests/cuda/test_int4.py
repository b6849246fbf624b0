"""Keys and values written in int4 on the CPU: the codec's planes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.errors import UsageError
from nanokv.kernels.cuda import launches
from nanokv.kv.codec import GROUP, get_codec
from nanokv.kv.storage import Storage
from tests.cuda.machine import ORDERS, CpuDevice
from tests.support import examples

WIDTHS = st.sampled_from([1, 2, 7, 31, 32, 33, 64, 65, 128])


def stored(units: int, heads: int, dim: int) -> Storage:
    """A storage of one layer whose planes hold a pattern."""
    storage = Storage(1, units, GROUP, heads, dim, get_codec("int4", np.float32, NUMPY), NUMPY)
    for plane in storage.planes:
        plane[...] = 7
    return storage


def some_rows(rng: np.random.Generator, groups: int, heads: int, dim: int, size: float) -> np.ndarray:
    """[G * 32, H, D]: rounded in part, so that codes lie on halves and groups hold one value; zeros of both signs."""
    x = rng.standard_normal((groups * GROUP, heads, dim), dtype=np.float32) * np.float32(3)
    x[rng.random(x.shape) < 0.5] = np.float32(1.5)
    x[:GROUP, 0, 0] = 0
    if rng.random() < 0.5:
        x = np.round(x)
    x[rng.random(x.shape) < 0.05] = -0.0
    return x * np.float32(size)


@examples(24)
@given(st.integers(1, 3), st.integers(1, 3), WIDTHS, st.sampled_from([1e-42, 1e-20, 1.0, 1e30]), st.booleans(),
       st.sampled_from(list(ORDERS)), st.integers(0, 99))  # fmt: skip
def test_what_is_written_is_what_the_codec_writes(groups, heads, dim, size, left_out, order, seed):
    rng = np.random.default_rng(seed)
    k, v = (some_rows(rng, groups, heads + 1, dim, size)[:, 1:] for _ in range(2))
    units = rng.permutation(5)[:groups]
    slots = (units[:, None] * GROUP + np.arange(GROUP)).reshape(-1).astype(np.int32)
    expected, got = stored(5, heads, dim), stored(5, heads, dim)
    written = slots
    if left_out:
        slots = slots.copy()
        slots[-GROUP:] = -1
        written = slots[:-GROUP]
    if len(written):
        expected.write(0, written, k[: len(written)], v[: len(written)])
    for x, planes, keys in ((k, got.k, True), (v, got.v, False)):
        named = {f"plane {i}": plane for i, plane in enumerate(planes)}
        device = CpuDevice(order, **named)
        launches.append_int4(device, x, slots, [plane[0] for plane in planes], keys, (heads + 1) * dim)
    for plane, other in zip(got.planes, expected.planes, strict=True):
        assert np.array_equal(plane.view(np.uint8), other.view(np.uint8))


def test_keys_come_in_whole_groups():
    planes = [plane[0] for plane in stored(2, 1, 4).k]
    with pytest.raises(UsageError, match="33 keys are no whole groups of 32"):
        launches.append_int4(CpuDevice(), np.zeros((33, 1, 4), np.float32), np.zeros(33, np.int32), planes, True)
