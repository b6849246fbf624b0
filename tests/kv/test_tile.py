import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanokv.kv.tile import Visibility


@given(st.integers(0, 300), st.integers(0, 300), st.one_of(st.none(), st.integers(1, 40)), st.integers(0, 10))
def test_what_a_query_may_see(query, key, window, sinks):
    """A window of W is W keys with the query's own; sinks are the first S positions; never the future."""
    expected = key <= query and (window is None or query - key <= window - 1 or key < sinks)
    assert Visibility(window, sinks if window else 0).sees(np.array(query), np.array(key)) == expected


def test_a_window_holds_its_count_of_keys():
    keys = np.arange(100)
    assert Visibility(window=8).sees(np.array(50), keys).sum() == 8
    assert Visibility(window=8, sinks=4).sees(np.array(50), keys).sum() == 12
    assert Visibility(window=8).sees(np.array(3), keys).sum() == 4


def test_positions_inside_a_streaming_cache():
    """Token i is told min(i, sinks + window - 1); without streaming, i."""
    positions = np.arange(40)
    assert Visibility(12, 3, streaming=True).position_ids(positions).tolist() == [*range(14), *[14] * 26]
    assert Visibility(1, 0, streaming=True).position_ids(positions).tolist() == [0] * 40
    assert (
        Visibility(12, 3).position_ids(positions).tolist() == Visibility().position_ids(positions).tolist() == list(range(40))
    )


@given(st.integers(0, 300), st.one_of(st.none(), st.integers(1, 40)), st.integers(0, 10))
def test_what_is_held_is_what_the_next_query_may_see(length, window, sinks):
    visibility = Visibility(window, sinks if window else 0)
    assert visibility.held(length) == visibility.sees(np.array(length), np.arange(length)).sum()
