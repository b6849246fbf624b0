"""Caches on the card hold the host's bits, in every format: what the kernels write, share, copy, drop and clear."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

pytest.importorskip("numba", exc_type=ImportError)
from nanokv.backend import NUMPY, get_backend, to_numpy
from nanokv.errors import UsageError
from nanokv.kv.codec import CODECS, get_codec
from nanokv.kv.spec import CacheSpec
from nanokv.kv.storage import Storage
from nanokv.kv.tile import CAUSAL, TILE
from tests.cuda.stand_in import kv_memory
from tests.support import examples

HEADS, DIM, LAYERS = 2, 6, 2
OPERATIONS = ("write", "write", "write", "fail", "fork", "truncate", "reset")


@st.composite
def specs(draw):
    kind, kv_dtype = draw(st.sampled_from(["contiguous", "paged"])), draw(st.sampled_from(CODECS))
    window = draw(st.none() | st.integers(1, 150))
    sinks = None if window is None else draw(st.none() | st.integers(0, 40))
    scale = draw(st.none() | st.sampled_from([0.01, 3.0])) if kv_dtype == "fp8" else None
    return CacheSpec(
        kind, draw(st.sampled_from([32, 128] if kv_dtype == "int4" else [1, 16, 128])), window, sinks, kv_dtype, scale
    )


def filled(planes):
    """Memory that nobody wrote is of one pattern."""
    for plane in planes:
        held = plane if isinstance(plane, np.ndarray) else plane.data
        held.view(np.uint8)[...] = 0x5A
    return planes


def bits(planes):
    return [to_numpy(plane).view(np.uint8) for plane in planes]


def new_cache(spec, memory):
    shape = [CAUSAL] * LAYERS, HEADS, DIM
    if spec.kind == "contiguous":
        cache = spec.contiguous(*shape, 400, np.float32, memory)
        return cache, filled(cache.planes)
    pool = spec.pool(*shape, 2 * 400 // spec.block_size + 8, np.float32, memory)
    planes = filled(pool.storage.planes)
    pool.storage.clear(0, spec.block_size)
    return pool.new_sequence(), planes


def operate(cache, operation, count, values):
    """One operation; what a cache refuses it refuses in words."""
    try:
        if operation == "truncate":
            cache.truncate(min(count, cache.length))
        elif operation == "reset":
            cache.reset()
        elif operation in ("write", "fail"):
            count = min(count, cache.max_step or count)
            cache.extend(count)
            for layer in range(LAYERS):
                wide = values[layer][:count]
                cache.write(layer, wide[:, 1 : 1 + HEADS], wide[:, 1 + HEADS :])  # parts of a wider array, as models give them
            if operation == "write":
                cache.commit()
    except UsageError as error:
        return str(error)
    return cache.length


@examples(30, suppress_health_check=[*HealthCheck])
@given(specs(), st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 140)), max_size=6), st.integers(0, 99))
def test_the_cards_caches_hold_the_hosts_bits(meter, spec, operations, seed):
    """Steps, steps that never end, forks that both go on, truncation, resets: after each, every byte of every plane."""
    rng, xp = np.random.default_rng(seed), get_backend("cupy").xp
    (host, host_planes), (card, card_planes) = (new_cache(spec, memory) for memory in (NUMPY, kv_memory()))
    pairs = [(host, card)]
    for operation, count in operations:
        for one, other in list(pairs):
            values = rng.standard_normal((LAYERS, count, 1 + 2 * HEADS, DIM), dtype=np.float32)
            values[:, :, :, :2] *= np.float32(10) ** rng.integers(-8, 4, (LAYERS, count, 1 + 2 * HEADS, 1))
            if operation == "fork" and spec.kind == "paged" and len(pairs) < 2:
                pairs.append((one.fork(), other.fork()))
                continue
            done = [operate(cache, operation, count, v) for cache, v in ((one, values), (other, xp.asarray(values)))]
            assert done[0] == done[1]
        assert all(np.array_equal(a, b) for a, b in zip(bits(host_planes), bits(card_planes), strict=True))


@pytest.mark.parametrize(("name", "scale"), [*((name, None) for name in CODECS if name != "int4"), ("fp8", 0.37)])
def test_writing_is_one_launch_for_keys_and_one_for_values(meter, name, scale):
    """Nothing else: no array code, no copy, no memory from the driver; scattered slots are sent once for all layers."""
    memory, scattered = kv_memory(), np.array([40, 42, 41, 43, 44])
    host, storage = (Storage(3, 8, 16, HEADS, DIM, get_codec(name, np.float32, each, scale), each) for each in (NUMPY, memory))
    values = np.random.default_rng(0).standard_normal((5, HEADS, DIM), dtype=np.float32)
    k = memory.xp.asarray(values)
    for each in (host, storage):
        filled(each.planes)
    meter.read()
    storage.write(1, storage.slots(np.arange(3, 8)), k, k)
    assert meter.read() == {"launches": 2}
    slots = storage.slots(scattered)
    assert meter.read()["copies to the card"] == 1
    for layer in range(3):
        storage.write(layer, slots, k, k)
    assert meter.read() == {"launches": 6}
    storage.copy_unit(2, 5)
    assert meter.read() == {"launches": len(storage.planes)}
    host.write(1, np.arange(3, 8), values, values)
    for layer in range(3):
        host.write(layer, scattered, values, values)
    host.copy_unit(2, 5)
    assert all(np.array_equal(a, b) for a, b in zip(bits(host.planes), bits(storage.planes), strict=True))


def test_int4_is_written_in_whole_tiles_by_two_launches(meter):
    """Keys and values, in blocks that lie anywhere; places that follow each other are not even sent."""
    memory = kv_memory()
    host, storage = (Storage(2, 9, 32, HEADS, DIM, get_codec("int4", np.float32, each), each) for each in (NUMPY, memory))
    values = np.random.default_rng(0).standard_normal((TILE, HEADS, DIM), dtype=np.float32)
    values[values < -1] = -0.0
    values[:32] = np.where(values[:32] > 0, np.float32(0), np.float32(-0.0))  # groups of zeros of both signs
    k, blocks = memory.xp.asarray(values), np.array([5, 2, 8, 3])
    scattered = (blocks[:, None] * 32 + np.arange(32)).reshape(-1)
    for each in (host, storage):
        filled(each.planes)
    meter.read()
    storage.write(0, storage.slots(np.arange(TILE)), k, k)
    assert meter.read() == {"launches": 2}
    storage.write(1, storage.slots(scattered), k, k)
    counts = meter.read()
    assert (counts["launches"], counts["copies to the card"], "array writes" in counts) == (2, 1, False)
    storage.copy_unit(1, 4)
    assert meter.read() == {"launches": len(storage.planes)}
    host.write(0, np.arange(TILE), values, values)
    host.write(1, scattered, values, values)
    host.copy_unit(1, 4)
    assert all(np.array_equal(a, b) for a, b in zip(bits(host.planes), bits(storage.planes), strict=True))


@pytest.mark.parametrize("name", ["bfloat16", "fp8"])
def test_bits_that_only_the_kernels_read_are_refused_elsewhere(meter, name):
    card = get_backend("cupy")
    with pytest.raises(UsageError, match=f"{name} is not available on cupy.*--numerics exact"):
        get_codec(name, np.float32, card)
    cache, _ = new_cache(CacheSpec(kv_dtype=name), kv_memory())
    cache.extend(3)
    with pytest.raises(UsageError, match=f"{name} on a card is read by its exact kernels only"):
        cache.tiles(0, 0)
