"""The machine: bytes, capacities, and the cache against an independent one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import CapacityError
from sim.formats import FLOAT16, FORMATS, get_format
from sim.memory import Cache, Machine, Moved, Tensor, Values
from tests.sim.lines import LINE, traffic
from tests.support import examples


def test_a_load_counts_occupies_and_leaves() -> None:
    machine = Machine(sram=1000)
    machine.kernel("one")
    tensor = Tensor("K", 10, FLOAT16)
    with machine.load(tensor, 0, (0, 20)):
        assert machine.sram.used == 400
        with machine.load(tensor, 0, (20, 40), (0, 5)):
            assert machine.sram.used == 600
    assert machine.sram.used == 0
    machine.store(tensor, 0, (0, 3), None)
    counts = machine.finish()
    assert counts.per_tensor() == {"K": Moved(hbm_read=600, hbm_write=60)}
    assert counts.sram_peak == 600


def test_a_tile_over_the_capacity_names_itself_and_nothing_is_counted() -> None:
    machine = Machine(sram=100)
    machine.kernel("one")
    with pytest.raises(CapacityError, match=r"tile K 20x10 \(400 bytes\) does not fit: 0 of 100 bytes of SRAM"):
        machine.load(Tensor("K", 10, FLOAT16), 0, (0, 20))
    assert machine.finish().total == Moved()


def test_registers_have_a_capacity_of_their_own() -> None:
    machine = Machine(registers=16)
    with machine.hold("S", 4), pytest.raises(CapacityError, match="registers"), machine.hold("O", 1):
        pass


def test_values_move_with_the_bytes() -> None:
    machine = Machine(values=Values.ALL)
    machine.kernel("one")
    data = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    tensor = Tensor("K", 3, FLOAT16, data)
    with machine.load(tensor, 1, (1, 3), (0, 2)) as tile:
        assert np.array_equal(tile.values, [[15, 16], [18, 19]])
    with machine.load(tensor, 0, (0, 2), slots=np.array([3, 0])) as tile:
        assert np.array_equal(tile.values, [[9, 10, 11], [0, 1, 2]])
    machine.store(tensor, 0, (3, 4), np.array([[7, 8, 9]], dtype=np.float32))
    assert np.array_equal(data[0, 3], [7, 8, 9])


@pytest.mark.parametrize(("values", "indices"), [(Values.ALL, [0, 1, 2]), (Values.ONE, [0]), (Values.NONE, [0])])
def test_heads_that_are_not_run_are_counted(values: Values, indices: list[int]) -> None:
    machine = Machine(values=values)
    machine.kernel("one")
    seen = []
    for outer in machine.each(3):
        for _ in machine.each(5):
            machine.multiply(1)
            with machine.load(Tensor("K", 1, FORMATS["int8"]), 0, (0, 2)):
                pass
        seen.append(outer)
    machine.multiply(1)  # of no head: once
    assert seen == indices
    counts = machine.finish()
    assert counts.flops == 16
    assert counts.per_tensor() == {"K": Moved(hbm_read=30), "K scales": Moved(hbm_read=120)}


accesses = st.lists(st.tuples(st.sampled_from("rw"), st.integers(0, 5)), min_size=4, max_size=40)


@examples(200)
@given(accesses, st.integers(1, 6), st.integers(1, 3))
def test_the_cache_writes_back_what_an_independent_one_does(pattern: list[tuple[str, int]], tiles: int, lines: int) -> None:
    """Tiles of whole lines. pycachesim reads a line that is written before it was there, so reads are compared in the next
    test; and a write that hits does not make its line the most recent there, so a read follows each."""
    size, cache, moved = lines * LINE, Cache(tiles * lines * LINE), Moved()
    for kind, tile in pattern:
        (cache.read if kind == "r" else cache.write)(tile, size, moved)
    cache.flush()
    trace = [(each, tile * size, size) for kind, tile in pattern for each in ("wr" if kind == "w" else "r")]
    assert moved.hbm_write == traffic(tiles * lines * LINE, trace)[1]
    reads, writes = (sum(size for kind, _ in pattern if kind == wanted) for wanted in "rw")
    assert moved.sram_read == reads
    assert moved.sram_write == writes


@examples(200)
@given(st.lists(st.integers(0, 5), min_size=12, max_size=40), st.integers(2, 5))
def test_the_cache_reads_what_an_independent_one_does(pattern: list[int], tiles: int) -> None:
    cache, moved = Cache(tiles * LINE), Moved()
    for tile in pattern:
        cache.read(tile, LINE, moved)
    assert moved.hbm_read == traffic(tiles * LINE, [("r", tile * LINE, LINE) for tile in pattern])[0]


def test_a_tile_larger_than_the_cache_goes_past_it() -> None:
    cache, moved = Cache(100), Moved()
    for _ in range(2):
        cache.read("big", 101, moved)
        cache.write("big", 101, moved)
    assert moved == Moved(hbm_read=202, hbm_write=202)


@pytest.mark.parametrize(
    ("name", "columns", "codes", "scales"),
    [("int4", 33, 17, 16), ("int8", 33, 33, 4), ("fp16", 33, 66, 0), ("bf16", 8, 16, 0), ("int4", 128, 64, 32)],
)
def test_bytes_of_a_row(name: str, columns: int, codes: int, scales: int) -> None:
    form = get_format(name)
    assert (form.row_bytes(columns), form.scale_bytes(columns)) == (codes, scales)
