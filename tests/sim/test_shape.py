"""Shapes, tiles and which keys a row tile meets, against counting one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import UsageError
from sim.formats import FORMATS
from sim.shape import Shape, TileSize, hidden, key_tiles, parse_tile, row_tiles, spans
from tests.sim.cases import shapes, tiles


def seen(shape: Shape) -> np.ndarray:
    """[N, S] bool, from the definition: not later than the row's position, and within the window."""
    rows = np.arange(shape.rows)[:, None] + shape.seq - shape.rows
    keys = np.arange(shape.seq)[None]
    visible = np.ones((shape.rows, shape.seq), dtype=bool)
    if shape.causal:
        visible &= keys <= rows
    if shape.window is not None:
        visible &= keys > rows - shape.window
    return visible


@given(st.sampled_from(["prefill", "decode"]).flatmap(shapes))
def test_visible_pairs_are_those_of_the_mask(shape: Shape) -> None:
    assert shape.visible_pairs() == seen(shape).sum()


@given(st.sampled_from(["prefill", "decode"]).flatmap(shapes), st.data())
def test_the_key_range_is_exactly_what_some_row_sees(shape: Shape, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, shape.rows - 1))
    stop = data.draw(st.integers(start + 1, shape.rows))
    some = np.flatnonzero(seen(shape)[start:stop].any(axis=0))
    assert shape.key_range((start, stop)) == (some[0], some[-1] + 1)


@given(shapes(), tiles)
def test_a_skipped_tile_has_no_visible_key_and_the_hidden_ones_are_masked(shape: Shape, tile: TileSize) -> None:
    visible = seen(shape)
    for rows in row_tiles(shape, tile):
        covered = np.zeros(shape.seq, dtype=bool)
        for keys in key_tiles(shape, tile, rows):
            assert keys[0] % tile.keys == 0
            part = visible[slice(*rows), slice(*keys)]
            assert part.any()  # nothing is loaded for nothing
            mask = hidden(shape, rows, keys)
            assert np.array_equal(part, np.ones_like(part) if mask is None else ~mask)
            covered[slice(*keys)] = True
        assert not visible[slice(*rows), ~covered].any()


@given(shapes(), tiles)
def test_spans_are_the_loop(shape: Shape, tile: TileSize) -> None:
    found = [(rows[1] - rows[0], keys[1] - keys[0]) for rows in row_tiles(shape, tile) for keys in key_tiles(shape, tile, rows)]
    each = spans(shape, tile)
    assert each.keys == sum(keys for _, keys in found)
    assert each.pairs == sum(rows * keys for rows, keys in found)
    assert each.row_visits == sum(rows for rows, _ in found)
    assert each.visits == len(found)


def test_what_is_left_out_follows() -> None:
    shape = Shape(64, heads=8)
    assert (shape.rows, shape.num_kv_heads, shape.kv, shape.group) == (64, 8, shape.dtype, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq": 0}, "seq must be between 1"),
        ({"seq": 4, "q_len": 5}, "q_len 5 is more than seq 4"),
        ({"seq": 4, "q_len": 0}, "q_len must be"),
        ({"seq": 4, "heads": 6, "kv_heads": 4}, "heads 6 is not divisible by kv_heads 4"),
        ({"seq": 4, "kv_heads": 0}, "kv_heads must be"),
        ({"seq": 4, "head_dim": -1}, "head_dim must be"),
        ({"seq": 4, "batch": 0}, "batch must be"),
        ({"seq": 4, "window": 0}, "window must be"),
        ({"seq": 4, "window": 2, "causal": False}, "window needs causal"),
        ({"seq": 4, "dtype": FORMATS["int4"]}, "int4 is for stored K and V only"),
    ],
)
def test_a_bad_shape_is_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Shape(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "rows", "keys"), [("128", 128, 128), ("64x128", 64, 128), (" 64X32 ", 64, 32)])
def test_a_tile_is_rows_by_keys(text: str, rows: int, keys: int) -> None:
    assert parse_tile(text) == TileSize(rows, keys)


def test_auto_is_no_tile() -> None:
    assert parse_tile("auto") is None


@pytest.mark.parametrize("text", ["", "x", "1x", "1x2x3", "-1", "12.5", "big", "0", "0x4", "²"])
def test_a_bad_tile_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="tile"):
        parse_tile(text)
