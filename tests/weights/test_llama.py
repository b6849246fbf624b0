"""Llama tensors by Hugging Face's names: every value arrives, in any file dtype, and every wrong name is refused."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.errors import CheckpointError
from nanokv.models.llama import LlamaParams, random_params
from tests.llama_support import small_llama
from tests.weights.files import bfloat16, stored, write_safetensors
from tests.weights.llama_files import assert_same_llama, hf_arrays
from weights.llama import read_llama
from weights.tensors import open_safetensors


def read(path: Path, params: LlamaParams, tensors, dtype="float32", **config) -> LlamaParams:
    raw = {name: stored(value) if isinstance(value, np.ndarray) else value for name, value in tensors.items()}
    write_safetensors(path / "model.safetensors", raw)
    return read_llama(open_safetensors(path / "model.safetensors"), replace(params.config, **config), dtype, NUMPY, path)


@st.composite
def models(draw):
    flags = {name: draw(st.booleans()) for name in ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "tied_head")}
    return random_params(
        small_llama(heads=6, kv_heads=draw(st.sampled_from([1, 2, 6])), **flags), draw(st.integers(0, 99)), scale=0.3
    )


@given(models(), st.sampled_from(["model.", ""]), st.sampled_from(["float32", "float64"]))
def test_every_value_arrives(tmp_path_factory, params, prefix, dtype):
    """K05, K06: with and without the prefix; all biases; nothing transposed where a matrix is square."""
    loaded = read(tmp_path_factory.mktemp("m"), params, hf_arrays(params, prefix), dtype)
    expected = random_params_as(params, dtype)
    assert_same_llama(loaded, expected)
    assert (loaded.head is loaded.embedding) is params.config.tied_head


def random_params_as(params: LlamaParams, dtype: str) -> LlamaParams:
    def cast(array):
        return None if array is None else array.astype(dtype)

    blocks = tuple(replace(block, **{name: cast(array) for name, array in vars(block).items()}) for block in params.blocks)
    embedding = cast(params.embedding)
    head = embedding if params.head is params.embedding else cast(params.head)
    return LlamaParams(params.config, embedding, blocks, cast(params.norm), head)


def test_bfloat16(tmp_path):
    """K03: the upper half of a float32."""
    params = random_params(small_llama())
    rounded = {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in hf_arrays(params).items()}
    loaded = read(tmp_path, params, {name: bfloat16(value) for name, value in rounded.items()})
    assert np.array_equal(loaded.embedding, rounded["model.embed_tokens.weight"])
    assert np.array_equal(loaded.blocks[1].down_weight, rounded["model.layers.1.mlp.down_proj.weight"])


@pytest.fixture
def untied():
    return random_params(small_llama(), scale=0.3)


def test_tied_or_not_and_head_stored_or_not(tmp_path, untied):
    """K02, K10: what the flag says against what the file holds."""
    arrays = hf_arrays(untied)
    headless = {name: value for name, value in arrays.items() if name != "lm_head.weight"}
    tied = read(tmp_path, untied, headless, tied_head=True)
    assert tied.head is tied.embedding
    with pytest.raises(CheckpointError, match="holds no lm_head.weight"):
        read(tmp_path, untied, headless, tied_head=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both = read(tmp_path, untied, arrays, tied_head=True)
    assert "differs from the embedding" in str(caught[0].message)
    assert np.array_equal(both.head, untied.head)
    assert not both.config.tied_head
    same = read(tmp_path, untied, headless | {"lm_head.weight": untied.embedding}, tied_head=True)
    assert same.head is same.embedding
    only_head = {name: value for name, value in arrays.items() if "embed_tokens" not in name}
    assert np.array_equal(read(tmp_path, untied, only_head, tied_head=True).embedding, untied.head)


def test_names_are_accounted_for(tmp_path, untied):
    arrays = hf_arrays(untied)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert_same_llama(read(tmp_path, untied, arrays | buffer), untied)
    with pytest.raises(CheckpointError, match="does not have: layers.0.self_attn.q_proj.bias"):
        read(tmp_path, untied, arrays | {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)})
    with pytest.raises(CheckpointError, match="does not have: layers.2.mlp"):
        read(tmp_path, untied, arrays | {"model.layers.2.mlp.up_proj.weight": np.ones((40, 24), np.float32)})
    with pytest.raises(CheckpointError, match="twice"):
        read(tmp_path, untied, arrays | {"norm.weight": untied.norm})
    arrays.pop("model.layers.1.self_attn.k_proj.weight")
    with pytest.raises(
        CheckpointError, match="lacks tensors that its configuration asks for: layers.1.self_attn.k_proj.weight"
    ):
        read(tmp_path, untied, arrays)


def test_shapes_and_dtypes_are_checked_before_anything_is_read(tmp_path, untied):
    arrays = hf_arrays(untied)
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=r"k_proj.weight.*\[24, 16\].*\[16, 24\]"):
        read(tmp_path, untied, arrays | {name: np.ascontiguousarray(arrays[name].T)})
    with pytest.raises(CheckpointError, match="I32"):
        read(tmp_path, untied, arrays | {name: np.zeros((16, 24), np.int32)})
