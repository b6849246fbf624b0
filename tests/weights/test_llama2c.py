"""llama2.c's files: both formats give the same model, wrong lengths and headers are refused."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.errors import CheckpointError, ConfigError, NanoKVError, TokenizerError
from nanokv.models.llama import random_params
from nanokv.rope import Rope
from tests.llama_support import small_llama
from tests.weights.llama_files import assert_same_llama, write_llama2c, write_tokenizer_bin
from weights.llama2c import load_llama2c, read_layout, read_tokenizer


def model(tied=True, heads=4, kv_heads=2):
    """llama2.c has no head width of its own: the width is heads times head width."""
    config = replace(small_llama(2, heads, kv_heads, 6, positions=20, vocab=262, tied_head=tied), width=6 * heads)
    config = replace(config, norm_epsilon=1e-5, rope=Rope(6, adjacent=True))
    return random_params(config, 1, scale=0.3)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_value_arrives(tmp_path, legacy, tied, kv_heads):
    params = model(tied, kv_heads=kv_heads)
    path = write_llama2c(tmp_path / "model.bin", params, legacy)
    tokenizer = write_tokenizer_bin(tmp_path / "tok.bin", [(" a", -1.0), ("b", -2.0), (" ab", -3.0)])
    loaded = load_llama2c(path, tokenizer, "m", "float32", NUMPY)
    assert_same_llama(loaded.params, params)
    assert (loaded.params.head is loaded.params.embedding) is tied
    assert loaded.config.rope == params.config.rope
    assert (loaded.config.norm_epsilon, loaded.config.num_positions, loaded.config.tied_head) == (1e-5, 20, tied)
    assert loaded.eos_token_ids == {1, 2}
    assert loaded.prefix == (1,)
    wide = load_llama2c(path, tokenizer, "m", "float64", NUMPY).params
    assert np.array_equal(wide.norm, params.norm.astype(np.float64))


@pytest.mark.parametrize("legacy", [True, False])
@given(cut=st.integers(-200, 200).filter(bool))
def test_a_file_of_another_length_is_refused(tmp_path_factory, legacy, cut):
    path = write_llama2c(tmp_path_factory.mktemp("m") / "model.bin", model(), legacy)
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * cut if cut > 0 else content[:cut])
    with pytest.raises(CheckpointError, match="its header makes it"):
        read_layout(path)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=7, max_size=7), st.booleans())
def test_any_header_is_an_error_and_nothing_is_allocated(tmp_path_factory, numbers, legacy):
    path = tmp_path_factory.mktemp("m") / "model.bin"
    start = struct.pack("<7i", *numbers) if legacy else struct.pack("<Ii7iB", 0x616B3432, 1, *numbers, 1)
    path.write_bytes(start.ljust(300, b"\0"))
    with pytest.raises((CheckpointError, ConfigError)):
        read_layout(path)


def test_other_versions_and_short_files(tmp_path):
    path = tmp_path / "model.bin"
    for content, words in (
        (struct.pack("<Ii", 0x616B3432, 2).ljust(300, b"\0"), "version 2"),
        (struct.pack("<Ii", 0x616B3432, 1).ljust(100, b"\0"), "ends inside its header"),
        (b"\0" * 27, "too short"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            read_layout(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_layout(tmp_path / "none.bin")


def test_tokenizer_files_that_are_refused(tmp_path):
    path = write_tokenizer_bin(tmp_path / "tok.bin", [("ab", -1.0)])
    content = path.read_bytes()
    assert read_tokenizer(path, 260).vocab_size == 260
    with pytest.raises(TokenizerError, match="ends after 260 of 261 tokens"):
        read_tokenizer(path, 261)
    with pytest.raises(TokenizerError, match="10 bytes more than 259 tokens"):
        read_tokenizer(path, 259)
    with pytest.raises(TokenizerError, match="no room"):
        read_tokenizer(path, 258)
    for changed, words in (
        (content[:-10] + struct.pack("<fi", 0, -5) + b"ab", "-5 bytes"),
        (content[:-10] + struct.pack("<fi", 0, 1 << 30) + b"ab", "1073741824 bytes"),
        (content[:-2] + b"\xff\xfe", "not UTF-8"),
        (content[:-1], "bytes"),
    ):
        path.write_bytes(changed)
        with pytest.raises(TokenizerError, match=words):
            read_tokenizer(path, 260)
    with pytest.raises(NanoKVError, match="cannot be read"):
        read_tokenizer(tmp_path / "none.bin", 260)
