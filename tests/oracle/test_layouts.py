"""Every layout holds the same tokens: read back through its own tables, they are what was planted, bit for bit."""

import numpy as np
import pytest
from hypothesis import given

from nanokv.oracle.case import Case
from nanokv.oracle.formats import STORED
from nanokv.oracle.kernels import sequences_of
from nanokv.oracle.layouts import output_shape, pack, unpack
from nanokv.oracle.spec import LAYOUTS, Spec
from nanokv.oracle.strategies import attention_cases
from tests.support import examples

CASES = attention_cases(LAYOUTS, ("float32", "bfloat16"), (None, *STORED), head_dims=(4, 8), max_tokens=70)


@examples(60)
@given(CASES)
def test_a_call_read_back_is_what_was_planted(case):
    found = sequences_of(case.call())
    assert len(found) == len(case.values)
    for one, other in zip(found, case.values, strict=True):
        assert one.q.tobytes() == other.q.tobytes()
        assert one.k.tobytes() == other.k_codes.tobytes()
        assert one.v.tobytes() == other.v_codes.tobytes()
        if case.spec.scaled:
            assert np.array_equal(one.k_scale, other.k_scale)
            assert np.array_equal(one.v_scale, other.v_scale)


@examples(40)
@given(CASES)
def test_outputs_go_into_the_layout_and_back(case):
    rows = np.random.default_rng(0).standard_normal((case.spec.rows, case.spec.num_heads, case.spec.head_dim))
    packed = pack(case.spec, rows, np.nan)
    assert packed.shape == output_shape(case.spec)
    assert np.array_equal(unpack(case.spec, packed), rows)


@examples(40)
@given(attention_cases(("vllm",), head_dims=(4,), max_tokens=70))
def test_stale_entries_behind_a_sequence_name_blocks_that_nobody_owns(case):
    tables = case.arrays()["block_tables"]
    owned = {block for table in case.memory.tables for block in table}
    for row, table in zip(tables, case.memory.tables, strict=True):
        assert row[: len(table)].tolist() == table
        assert len(row) > len(table)
        assert 0 not in row
        assert not owned & set(row[len(table) :].tolist())


@examples(30)
@given(attention_cases(("vllm",), head_dims=(4,), block_sizes=(1, 4), max_tokens=160, max_sequences=1))
def test_blocks_lie_in_another_order_than_the_tables(case):
    table = case.memory.tables[0]
    assert len(set(table)) == len(table)
    if len(table) > 20:
        assert table != sorted(table)


@examples(20)
@given(CASES)
def test_arrays_are_copies(case):
    for array in case.arrays().values():
        array.fill(0)
    assert case.arrays()["q"].any()


@pytest.mark.parametrize(("scales", "shape"), [("tensor", (1,)), ("head", (2,)), ("token", (1, 14, 2))])
def test_a_scale_is_for_what_it_says(scales, shape):
    arrays = Case(Spec(((2, 9),), kv_dtype="int8", scales=scales, head_dim=8)).arrays()
    assert arrays["k_scale"].shape == arrays["v_scale"].shape == shape


@examples(20)
@given(attention_cases(("hf",), head_dims=(4,), max_tokens=30))
def test_whatever_stands_in_padding_is_right(case):
    packed = case.packed()
    padding = np.isposinf(packed["bound"]).all(axis=(1, 3))  # [B, most rows]
    most = max(q for q, _ in case.spec.lengths)
    assert padding.sum(axis=1).tolist() == [most - q for q, _ in case.spec.lengths]
    assert np.array_equal(padding, np.sort(padding, axis=1)[:, ::-1])  # on the left


def test_every_key_has_a_channel_and_every_head_a_size():
    spec = Spec(((1, 40),), num_heads=6, num_kv_heads=3, head_dim=16, kv_dtype="int8", unused="large")
    values = Case(spec).values[0]
    token, head = np.ogrid[:40, :3]
    assert np.array_equal(np.abs(values.v).argmax(axis=-1), (token + 5 * head) % 16)
    sizes = values.v_scale[0]
    assert 1.5 < sizes[1] / sizes[0] < 2.7
    assert 1.5 < sizes[2] / sizes[1] < 2.7
