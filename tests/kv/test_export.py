"""The same keys and values in other projects' layouts."""

import numpy as np
import pytest

from nanokv.backend import NUMPY
from nanokv.errors import UsageError
from nanokv.kv.codec import get_codec
from nanokv.kv.export import flashinfer_page_table, flashinfer_pages, hf_cache, vllm_block_tables
from nanokv.kv.paged import PagedPool
from nanokv.kv.tile import Visibility

LENGTHS = [5, 8, 1, 9]


@pytest.fixture
def pool():
    return PagedPool(2, 3, 4, 20, 4)


def filled(pool, lengths=LENGTHS):
    sequences = []
    rng = np.random.default_rng(0)
    written = []
    for length in lengths:
        sequence = pool.new_sequence()
        sequence.extend(length)
        k, v = rng.standard_normal((2, 2, length, 3, 4)).astype(np.float32)
        for layer in range(2):
            sequence.write(layer, k[layer], v[layer])
        sequence.commit()
        sequences.append(sequence)
        written.append((k, v))
    return sequences, written


def test_flashinfer_csr_names_every_page_once(pool):
    sequences, written = filled(pool)
    table = flashinfer_page_table(sequences)
    assert all(array.dtype == np.int32 for array in table)
    assert table.kv_indptr.tolist() == [0, 2, 4, 5, 8]
    assert table.kv_last_page_len.tolist() == [1, 4, 1, 1]
    for layout in ("NHD", "HND"):
        pages = flashinfer_pages(pool, 1, layout)
        for b, (k, v) in enumerate(written):
            mine = pages[table.kv_indices[table.kv_indptr[b] : table.kv_indptr[b + 1]]]
            if layout == "HND":
                assert mine.shape[1:] == (2, 3, 4, 4)
                mine = mine.transpose(0, 1, 3, 2, 4)
            length = 4 * (len(mine) - 1) + table.kv_last_page_len[b]
            assert length == LENGTHS[b]
            for which, array in enumerate((k, v)):
                assert np.array_equal(mine[:, which].reshape(-1, 3, 4)[:length], array[1])


def test_transformers_layout_is_heads_before_tokens(pool):
    sequences, written = filled(pool)
    for sequence, (k, v) in zip(sequences, written, strict=True):
        for layer in range(2):
            keys, values = hf_cache(sequence, layer)
            assert keys.shape == (1, 3, sequence.length, 4)
            assert np.array_equal(keys[0].transpose(1, 0, 2), k[layer])
            assert np.array_equal(values[0].transpose(1, 0, 2), v[layer])


def test_vllm_tables_are_padded_with_the_null_block(pool):
    sequences, _ = filled(pool)
    tables, lengths = vllm_block_tables(sequences)
    assert tables.dtype == lengths.dtype == np.int32
    assert lengths.tolist() == LENGTHS
    assert tables.shape == (4, 3)
    assert tables[2].tolist() == [sequences[2].block_table[0], 0, 0]


def test_no_sequences_make_empty_tables():
    table = flashinfer_page_table([])
    assert [array.tolist() for array in table] == [[0], [], []]


def test_what_has_no_such_view_is_refused(pool):
    with pytest.raises(UsageError, match="'XYZ'.*NHD or HND"):
        flashinfer_pages(pool, 0, "XYZ")
    quantised = PagedPool(2, 3, 4, 20, 4, codec=get_codec("int8", np.float32, NUMPY))
    with pytest.raises(UsageError, match="int8"):
        flashinfer_pages(quantised, 0)
    rolled = PagedPool(2, 3, 4, 20, 4, visibility=Visibility(4))
    (sequence,), _ = filled(rolled, [12])
    with pytest.raises(UsageError, match="dropped"):
        hf_cache(sequence, 0)
