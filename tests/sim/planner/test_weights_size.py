"""The size of weights from headers alone, and from counts."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from nanokv.errors import CheckpointError, ConfigError
from sim.planner.geometry import geometry_from_config
from sim.planner.weights_size import INDEX, Weights, from_config, from_directory, from_parameters, read_header
from tests.support import ROOT

LLAMA: dict[str, Any] = json.loads((ROOT / "benchmarks" / "planner_configs.json").read_text())["meta-llama/Llama-3.1-8B"][
    "config"
]


def shards(directory: Path, count: int) -> int:
    """`count` files of two tensors each, with their index; returns the bytes of all tensors."""
    weight_map, total = {}, 0
    for i in range(count):
        tensors = {f"a{i}": np.zeros((3, 5), np.float32), f"b{i}": np.zeros(7, np.float16)}
        name = f"model-{i}.safetensors"
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
        total += 3 * 5 * 4 + 7 * 2
    if count > 1:
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


@pytest.mark.parametrize("count", [1, 3])
def test_bytes_as_stored(tmp_path: Path, count: int) -> None:
    assert from_directory(tmp_path, None) is None
    total = shards(tmp_path, count)
    assert from_directory(tmp_path, None) == Weights(total, 22 * count, "safetensors headers")


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    """A second export of the same weights lies beside the first in some repositories."""
    total = shards(tmp_path, 2)
    save_file({"again": np.zeros(1000, np.float32)}, tmp_path / "consolidated.safetensors")
    found = from_directory(tmp_path, None)
    assert found is not None
    assert found.total == total


def test_an_index_alone_states_the_total(tmp_path: Path) -> None:
    total = shards(tmp_path, 2)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert from_directory(tmp_path, None) == Weights(total, None, f"{INDEX}, total_size")
    assert from_directory(tmp_path, "float16") is None  # bytes alone do not tell how many elements there are


def test_another_dtype_counts_the_same_elements(tmp_path: Path) -> None:
    shards(tmp_path, 1)
    found = from_directory(tmp_path, "bfloat16")
    assert found is not None
    assert (found.total, found.parameters) == (44, 22)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 8,
        struct.pack("<Q", 50) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a":{} }',
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}      ',
    ],
)
def test_a_damaged_header_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(path)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_than_its_header_says(tmp_path: Path, change: int) -> None:
    shards(tmp_path, 1)
    path = tmp_path / "model-0.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\x00")
    with pytest.raises(CheckpointError, match="it is cut or damaged"):
        from_directory(tmp_path, None)


def test_metadata_alone_is_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = b'{"__metadata__":{"format":"pt"}}'
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    assert read_header(path) == []


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_a_damaged_index_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="index"):
        from_directory(tmp_path, None)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", 4000), ("bf16", 2000), ("fp8", 1000), ("int8", 1000), ("int4", 500 + 128), ("q8_0", 1000 + 64)],
)
def test_parameters_in_a_dtype(dtype: str, expected: int) -> None:
    """1,000 parameters; int4 has 4 bytes for each 32, q8_0 has 2; int8's scales depend on the rows and are left out."""
    assert from_parameters(1000, dtype, "stated").total == expected


def test_by_the_configs_own_count_and_dtype() -> None:
    geometry = geometry_from_config(LLAMA)
    assert from_config(LLAMA, geometry, None).total == 2 * 8_030_261_248
    assert from_config(LLAMA, geometry, "fp8").total == 8_030_261_248


def test_packed_weights_are_not_guessed_from_a_count() -> None:
    packed = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(ConfigError, match="quantization_config"):
        from_config(packed, geometry_from_config(packed), None)
