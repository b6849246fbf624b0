"""GGUF metadata -> what each layer caches. The files are written by the gguf package itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanokv.errors import CheckpointError, ConfigError
from sim.planner.gguf_file import geometry_from_gguf, read_gguf
from sim.planner.layers import Kind, Layer
from sim.planner.model import read_model
from tests.support import data


def metadata(arch: str, **keys: Any) -> dict[str, Any]:
    base = {
        "block_count": 6,
        "embedding_length": 64,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "context_length": 4096,
    }
    named = {key.replace("__", "."): value for key, value in keys.items()}
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in {**base, **named}.items() if value is not None},
    }


def kinds(raw: dict[str, Any]) -> str:
    return "".join(layer.kind.name[0] for layer in geometry_from_gguf(raw).layers)


def test_a_real_file() -> None:
    found = read_model(str(data("models/stories260K/stories260K-f32.gguf")))
    assert found.geometry.layers == (Layer(Kind.FULL, 4, 8, 8),) * 5
    assert found.geometry.max_positions == 512
    assert found.weights is not None
    assert found.weights.parameters is not None
    assert found.weights.total == 4 * found.weights.parameters
    # The shape of llama2.c's file: embedding and head are one, and 5 layers of 64 wide with 172 inside.
    layer = 2 * 64 + 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 172
    assert found.weights.parameters in (512 * 64 + 64 + 5 * layer, 2 * 512 * 64 + 64 + 5 * layer)


def test_a_written_file_round_trips(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("tiny")
    writer.add_block_count(3)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_head_count(8)
    writer.add_head_count_kv([2, 0, 2])
    writer.add_key_length(12)
    writer.add_value_length(10)
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for source in (path, tmp_path):  # a directory with one GGUF file stands for it
        found = read_model(str(source))
        assert (found.name, found.geometry.dtype) == ("tiny", "float16")
        assert found.geometry.layers == (Layer(Kind.FULL, 2, 12, 10), Layer(Kind.NONE), Layer(Kind.FULL, 2, 12, 10))
        assert found.weights is not None
        assert (found.weights.total, found.weights.parameters) == (1280, 640)


def write_part(path: Path, arch: str, **keys: int) -> None:
    """A file with one tensor of 20 x 256 elements in Q5_K, which the runtime does not read."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, arch)
    for name, value in metadata(arch, **keys).items():
        if name != "general.architecture":
            writer.add_uint32(name, value)
    for name in ("split.count", "split.no"):
        if name in keys:
            writer.add_uint16(name, keys[name])
    writer.add_tensor(path.stem, np.zeros((20, 176), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q5_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_encodings_that_only_have_a_size(tmp_path: Path) -> None:
    write_part(tmp_path / "model.gguf", "llama")
    found = read_model(str(tmp_path / "model.gguf"))
    assert found.weights is not None
    assert (found.weights.total, found.weights.parameters) == (20 * 176, 20 * 256)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """Named as llama.cpp's gguf-split names them: all parts count, and one of several alone does not tell."""
    parts = [tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2)]
    for number, path in enumerate(parts):
        write_part(path, "llama", **{"split.count": 2, "split.no": number})
    for source in (parts[0], tmp_path):
        found = read_model(str(source))
        assert found.weights is not None
        assert found.weights.total == 2 * 20 * 176
    parts[1].unlink()
    alone = read_model(str(parts[0]))
    assert alone.weights is None
    assert alone.why is not None
    assert "model-00002-of-00002.gguf is not there" in alone.why


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (metadata("llama"), "FFFFFF"),
        (metadata("gemma2", attention__sliding_window=64), "SFSFSF"),
        (metadata("gemma2", attention__sliding_window=None, context_length=8192), "SFSFSF"),
        (metadata("gemma3", attention__sliding_window=64), "SSSSSF"),
        (metadata("gpt-oss", attention__sliding_window=64), "SFSFSF"),
        (metadata("cohere2", attention__sliding_window=64), "SSSFSS"),
        (metadata("llama4", context_length=1 << 20), "CCCFCC"),
        (metadata("phi3", attention__sliding_window=2047), "SSSSSS"),
        (metadata("phi3", attention__sliding_window=4096), "FFFFFF"),
        (metadata("deci", attention__head_count=[8, 8, 0, 8, 0, 8], attention__head_count_kv=[2, 4, 0, 2, 0, 8]), "FFNFNF"),
    ],
)
def test_which_layers_are_windowed(raw: dict[str, Any], expected: str) -> None:
    assert kinds(raw) == expected


def test_latent_attention() -> None:
    """DeepSeek-V3: 512 + 64; newer files give the expanded widths a name of their own."""
    keys = {
        "attention__kv_lora_rank": 512,
        "rope__dimension_count": 64,
        "attention__key_length": 576,
        "attention__value_length": 512,
        "attention__key_length_mla": 192,
        "attention__value_length_mla": 128,
    }
    raw = metadata("deepseek2", **keys)
    assert set(geometry_from_gguf(raw).layers) == {Layer(Kind.MLA, 1, 576, 0)}
    assert set(geometry_from_gguf(raw, expand_latent=True).layers) == {Layer(Kind.FULL, 8, 192, 128)}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "no general.architecture"),
        (metadata("mamba"), "unknown attention family: GGUF architecture 'mamba'"),
        (metadata("llama", block_count=None), "no llama.block_count"),
        (metadata("llama", block_count=0), "llama.block_count 0"),
        (metadata("llama", attention__head_count=0), "head_count 0"),
        (metadata("llama", attention__head_count_kv=3), "head_count 8 is not divisible by head_count_kv 3"),
        (metadata("llama", attention__head_count_kv=[2]), "head_count_kv has 1 entries"),
        (metadata("llama", embedding_length=65), "embedding_length 65 is not divisible"),
        (metadata("llama", attention__sliding_window=64), "sliding_window 64 changes what a layer caches"),
        (metadata("qwen2", attention__kv_lora_rank=64), "kv_lora_rank 64 changes"),
        (metadata("gemma3"), "no gemma3.attention.sliding_window"),
        (metadata("deci", attention__head_count=[8, 4, 8, 8, 8, 8]), "different numbers of query heads"),
    ],
)
def test_what_would_be_a_guess_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        geometry_from_gguf(raw)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all, but long enough to be read as one"])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a (readable )?GGUF file"):
        read_gguf(path)
