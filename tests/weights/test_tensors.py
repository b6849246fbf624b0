"""safetensors files: every float type to its exact values, damaged files refused, nothing read that was not asked for."""

import json
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nanokv.errors import CheckpointError
from tests.weights.files import bfloat16, stored, write_safetensors
from weights import tensors as module
from weights.tensors import StoredTensor, find_tensors, open_safetensors

F32 = ("F32", (2,), struct.pack("<2f", 1.0, -2.0))


def header_of(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def read_one(raw: tuple[str, tuple[int, ...], bytes], dtype: str = "float32", transpose: bool = False) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        write_safetensors(path, {"before": F32, "x": raw, "after": F32})
        return open_safetensors(path)["x"].read(dtype, transpose)


# values


def test_bfloat16_bits() -> None:
    """K03: 803F 49C0 in the file are 1.0 and -3.140625."""
    read = read_one(("BF16", (2,), bytes.fromhex("803F49C0")))
    assert read.dtype == np.float32
    assert read.tolist() == [1.0, -3.140625]


def test_little_endian_bytes() -> None:
    assert read_one(("F32", (1,), bytes.fromhex("0000803F"))).tolist() == [1.0]
    assert read_one(("F16", (1,), bytes.fromhex("003C"))).tolist() == [1.0]
    assert read_one(("F64", (1,), bytes.fromhex("000000000000F03F"))).tolist() == [1.0]


def test_every_bfloat16() -> None:
    """All 65,536 of them, NaN and infinities included, are the float32 whose upper half they are."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    read = read_one(("BF16", (1 << 16,), np.arange(1 << 16, dtype="<u2").tobytes()))
    assert np.array_equal(read.view(np.uint32), bits)


def test_every_float16() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        expected = halves.astype(np.float32)
    assert np.array_equal(read_one(stored(halves)), expected, equal_nan=True)


shapes = hnp.array_shapes(min_dims=1, max_dims=3, max_side=7)


@given(
    st.sampled_from([np.float16, np.float32, np.float64]).flatmap(lambda t: hnp.arrays(t, shapes)),
    st.sampled_from(["float32", "float64"]),
    st.booleans(),
    st.sampled_from([1, 24, 1 << 22]),
)
def test_read_is_a_cast(array: np.ndarray, dtype: str, transpose: bool, piece: int) -> None:
    """Any shape, transposed or not, in pieces of any size; contiguous."""
    with np.errstate(all="ignore"):
        expected = array.astype(dtype)
    if (np.isinf(expected) & ~np.isinf(array)).any():
        with pytest.raises(CheckpointError, match="beyond float32's range"):
            read_one(stored(array), dtype, transpose)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece)
        read = read_one(stored(array), dtype, transpose)
    assert read.flags.c_contiguous
    assert read.dtype == dtype
    assert np.array_equal(read, expected.T if transpose else expected, equal_nan=True)


def test_nan_and_infinity_stay() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.0])
    for array in (values, values.astype(np.float32), values.astype(np.float16)):
        assert np.array_equal(read_one(stored(array)), values.astype(np.float32), equal_nan=True)
    assert np.array_equal(read_one(bfloat16(values.astype(np.float32))), values.astype(np.float32), equal_nan=True)


def test_a_signalling_nan_is_a_nan() -> None:
    """Converting one sets the processor's invalid flag, which is no reason to refuse it."""
    for array in (np.array([0x7FA00000], "<u4").view("<f4"), np.array([0x7FF4 << 48], "<u8").view("<f8")):
        for dtype in ("float32", "float64"):
            assert np.isnan(read_one(stored(array), dtype)).all()


def test_a_value_beyond_float32_is_an_error_in_float32_only() -> None:
    huge = stored(np.array([1.0, 1e300]))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: tensor 'x' holds a value beyond float32's range"):
        read_one(huge)
    assert read_one(huge, "float64").tolist() == [1.0, 1e300]


def test_check() -> None:
    tensor = StoredTensor(Path("m"), "x", "I64", (2, 3), 0)
    with pytest.raises(CheckpointError, match=r"m: tensor 'x' has shape \[2, 3\], but config.json makes it \[3, 2\]"):
        tensor.check((3, 2))
    with pytest.raises(CheckpointError, match="m: tensor 'x' holds I64: weights must be one of F64, F32, F16, BF16"):
        tensor.check((2, 3))
    StoredTensor(Path("m"), "x", "BF16", (2, 3), 0).check((2, 3))


@given(hnp.arrays(np.float32, (4, 3)), st.integers(0, 11), st.sampled_from([1, 24, 1 << 22]))
def test_equals_sees_every_element(array: np.ndarray, at: int, piece: int) -> None:
    other = array.copy()
    other.flat[at] = 1.0 if array.flat[at] != 1.0 else 2.0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece)
        path = Path(folder, "x.safetensors")
        write_safetensors(path, {"x": stored(array)})
        tensor = open_safetensors(path)["x"]
        assert tensor.equals(array)
        assert tensor.equals(array.astype(np.float64))
        assert not tensor.equals(other)


# damaged files


def test_metadata_only_is_a_file_of_no_tensors(tmp_path: Path) -> None:
    """K08."""
    assert open_safetensors(header_of(tmp_path / "x", {"__metadata__": {"format": "pt"}})) == {}
    assert open_safetensors(header_of(tmp_path / "x", {})) == {}


ONE = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
DAMAGED = {
    "cut by a byte": (ONE, b"\0" * 7, "not fully covered"),  # K07
    "a byte too many": (ONE, b"\0" * 9, "not fully covered"),  # K07
    "offsets past the end": ({"x": ONE["x"] | {"data_offsets": [8, 16]}}, b"\0" * 8, "."),
    "overlap": (ONE | {"y": ONE["x"]}, b"\0" * 8, "."),
    "shape and bytes differ": ({"x": ONE["x"] | {"shape": [3]}}, b"\0" * 8, "."),
    "shape overflows": ({"x": ONE["x"] | {"shape": [1 << 62, 1 << 62]}}, b"\0" * 8, "."),
    "unknown dtype": ({"x": ONE["x"] | {"dtype": "F31"}}, b"\0" * 8, "F31"),
    "not JSON": (b"{", b"", "."),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_and_named(tmp_path: Path, name: str) -> None:
    header, data, message = DAMAGED[name]
    path = header_of(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rf"x\.safetensors is not a readable safetensors file: .*{message}") as caught:
        open_safetensors(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\xff" * 4096, b"\x00" * 8, b"\x10\0\0\0\0\0\0\0{}", b"<html>no such page</html>"]
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    """K09: eight bytes of 0xFF announce a header of 16 EiB."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is not a readable safetensors file"):
        open_safetensors(path)


def test_a_git_lfs_pointer_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer, not the weights; run 'git lfs pull'"):
        open_safetensors(path)


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        open_safetensors(tmp_path / "x.safetensors")


@given(st.integers(0, 200), st.integers(0, 255))
def test_no_flipped_byte_of_the_header_gets_past_as_another_error(at: int, value: int) -> None:
    """One byte of a good file changed: it opens, and each float tensor reads, or there is a CheckpointError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        write_safetensors(path, {"x": F32, "y": stored(np.ones((2, 3), np.float16))})
        content = bytearray(path.read_bytes())
        content[at % len(content)] = value
        path.write_bytes(content)
        with suppress(CheckpointError):
            for tensor in open_safetensors(path).values():
                tensor.check(tensor.shape)
                if 0 not in tensor.shape and tensor.shape:
                    assert tensor.read("float64").shape == tensor.shape


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"x": F32})
    tensor = open_safetensors(path)["x"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"x\.safetensors: tensor 'x' ends early"):
        tensor.read("float32")


# shards


def write_index(directory: Path, places: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_the_index_decides_where_a_tensor_is(tmp_path: Path) -> None:
    """Both shards hold "x"; what the index does not name is not there."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        write_safetensors(tmp_path / f"{name}.safetensors", {"x": stored(np.array([value])), name: stored(np.array([value]))})
    write_index(tmp_path, {"x": "b.safetensors", "a": "a.safetensors"})
    found = find_tensors(tmp_path)
    assert found.keys() == {"x", "a"}
    assert found["x"].read("float32").tolist() == [2.0]
    assert found["a"].read("float32").tolist() == [1.0]


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x": F32})
    write_index(tmp_path, {"x": "nowhere.safetensors"})
    assert find_tensors(tmp_path)["x"].path == tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"x": "b.safetensors"}, "names b.safetensors, which is not there"),
        ({"x": "a.safetensors", "y": "a.safetensors"}, "places tensor 'y' in a.safetensors, which does not hold it"),
        ({"x": "../a.safetensors"}, "places tensor 'x' in '../a.safetensors', which is not the name of a file beside it"),
        ({"x": "/etc/passwd"}, "places tensor 'x' in '/etc/passwd', which is not the name of a file beside it"),
        ({"x": 3}, "places tensor 'x' in 3, which is not the name of a file beside it"),
        (None, "has no weight_map"),
        (["x"], "has no weight_map"),
    ],
)
def test_bad_indexes(tmp_path: Path, places: Any, message: str) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": F32})
    write_index(tmp_path, places)
    with pytest.raises(CheckpointError) as caught:
        find_tensors(tmp_path)
    assert message in str(caught.value)
    assert "model.safetensors.index.json" in str(caught.value)


def test_an_index_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("weights")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not JSON"):
        find_tensors(tmp_path)


# no safetensors at all


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no model.safetensors$"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused_unread(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match="is a pickled checkpoint, and unpickling can run any code") as caught:
        find_tensors(tmp_path)
    assert name in str(caught.value)
    assert "safetensors" in str(caught.value)
    write_safetensors(tmp_path / "model.safetensors", {"x": F32})
    assert find_tensors(tmp_path).keys() == {"x"}
