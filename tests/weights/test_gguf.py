"""GGUF files: weights as other formats give them, tokenizer and template from the file, damage refused before allocation."""

import contextlib
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.errors import CheckpointError, ConfigError, NanoKVError, TokenizerError
from nanokv.kernels.choice import PackedMemory
from nanokv.models.llama import block_shapes, random_params
from nanokv.models.llama_config import LlamaConfig
from nanokv.rope import Rope, Scaling
from tests.llama_support import small_llama, whole
from tests.support import ROOT
from tests.weights.files import stored, write_safetensors
from tests.weights.llama_files import (
    ARRAY,
    STRING,
    U32,
    assert_same_llama,
    config_json,
    entry,
    gguf_arrays,
    gguf_metadata,
    header,
    hf_arrays,
    tensor,
    text,
    typed,
    write_gguf,
)
from weights.gguf_file import load_gguf
from weights.gguf_header import read_header
from weights.llama import read_llama
from weights.tensors import open_safetensors

VOCAB = 260  # 258 tokens, and room that the model has and the tokenizer does not
FAMILIES = {
    "llama": {"qkv_bias": True, "output_bias": True, "mlp_bias": True}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True},
}  # fmt: skip


def model(architecture="llama", heads=6, kv_heads=2, **more):
    return random_params(small_llama(3, heads, kv_heads, vocab=VOCAB, **{**FAMILIES[architecture], **more}), 1, scale=0.3)


def load(path, dtype="float32"):
    return load_gguf(path, "test", dtype, NUMPY)


def write(path, params, architecture="llama", alignment=32, arrays=None, **metadata):
    arrays = gguf_arrays(params, architecture) if arrays is None else arrays
    return write_gguf(path, gguf_metadata(params, architecture) | metadata, arrays, alignment)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


# The same model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_same_model_in_safetensors_and_gguf(path, architecture, kv_heads, tied):
    """Every array bit for bit, so the logits too: queries and keys of a "llama" are back in their order."""
    params = model(architecture, kv_heads=kv_heads, tied_head=tied)
    loaded = load(write(path, params, architecture))
    write_safetensors(path.with_suffix(".safetensors"), {name: stored(value) for name, value in hf_arrays(params).items()})
    config = replace(LlamaConfig.from_dict(config_json(params, architecture)), **FAMILIES[architecture])
    theirs = read_llama(open_safetensors(path.with_suffix(".safetensors")), config, "float32", NUMPY, path)
    assert_same_llama(loaded.params, theirs)
    assert_same_llama(loaded.params, params)
    assert loaded.config == replace(config, windows=()) or loaded.config == config
    tokens = np.arange(40)
    assert np.array_equal(whole(loaded.params, tokens), whole(theirs, tokens))


@pytest.mark.parametrize("writer_alignment", [8, 24, 32, 64, 4096])
def test_alignment(path, writer_alignment):
    """L09, L10: general.alignment is honoured, powers of two or not."""
    params = model()
    assert_same_llama(load(write(path, params, alignment=writer_alignment)).params, params)


def test_a_file_of_the_gguf_package(path):
    """The package's writer instead of ours, with padding after the last tensor (L07)."""
    gguf = pytest.importorskip("gguf")
    params = model()
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in gguf_metadata(params, "llama").items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        if key != "general.architecture":
            add(key, value)
    for name, array in gguf_arrays(params, "llama").items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_llama(load(path).params, params)
    with open(path, "ab") as file:
        file.write(b"\0" * 100)
    assert_same_llama(load(path).params, params)


def test_version_2_is_read(path):
    write(path, model())
    content = bytearray(path.read_bytes())
    content[4] = 2
    path.write_bytes(content)
    assert_same_llama(load(path).params, model())


# Encodings


def quantised(name, array):
    from gguf import GGMLQuantizationType, quants

    return name, array.shape, quants.quantize(array, GGMLQuantizationType[name]).tobytes()


def scalar_values(name, raw):
    """Every element by the formulas of ggml-quants.c, one block after another, in Python's floats."""

    def half(at):
        return float(np.frombuffer(raw, "<f2", 1, at)[0])

    values = []
    match name:
        case "Q8_0":
            for at in range(0, len(raw), 34):
                values += [half(at) * code for code in np.frombuffer(raw, np.int8, 32, at + 2).tolist()]
        case "Q4_0":
            for at in range(0, len(raw), 18):
                codes = raw[at + 2 : at + 18]
                values += [half(at) * (code - 8) for code in [c & 15 for c in codes] + [c >> 4 for c in codes]]
        case "Q4_1":
            for at in range(0, len(raw), 20):
                codes = raw[at + 4 : at + 20]
                values += [half(at) * code + half(at + 2) for code in [c & 15 for c in codes] + [c >> 4 for c in codes]]
        case "Q4_K":
            for at in range(0, len(raw), 144):
                packed, codes = raw[at + 4 : at + 16], raw[at + 16 : at + 144]
                for j in range(8):
                    if j < 4:
                        scale, low = packed[j] & 63, packed[j + 4] & 63
                    else:
                        scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4)
                        low = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4)
                    group = codes[j // 2 * 32 : j // 2 * 32 + 32]
                    values += [half(at) * scale * (c >> 4 if j % 2 else c & 15) - half(at + 2) * low for c in group]
        case "Q6_K":
            for at in range(0, len(raw), 210):
                low, high = raw[at : at + 128], raw[at + 128 : at + 192]
                scales = np.frombuffer(raw, np.int8, 16, at + 192).tolist()
                block = [0.0] * 256
                for n in range(2):
                    for l in range(32):  # noqa: E741 - the source's name
                        a, b, h = low[n * 64 + l], low[n * 64 + l + 32], high[n * 32 + l]
                        codes = (
                            a & 15 | (h & 3) << 4,
                            b & 15 | (h >> 2 & 3) << 4,
                            a >> 4 | (h >> 4 & 3) << 4,
                            b >> 4 | (h >> 6) << 4,
                        )
                        for part, code in enumerate(codes):
                            scale = scales[n * 8 + l // 16 + 2 * part]
                            block[n * 128 + l + 32 * part] = half(at + 208) * scale * (code - 32)
                values += block
    return np.array(values)


SIZES = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210)}


@pytest.mark.parametrize("name", SIZES)
def test_quantised_values(path, name):
    """Random codes with scales that are ordinary numbers, 3 blocks a row: each value as the formula has it, within the few
    float32 roundings of the package's order of operations."""
    pytest.importorskip("gguf")
    block, size = SIZES[name]
    rng = np.random.default_rng(0)
    raw = bytearray(rng.integers(0, 256, 5 * 3 * size, dtype=np.uint8).tobytes())
    for at in range(0, len(raw), size):
        scales = rng.uniform(0.01, 0.1, 2).astype("<f2").tobytes()
        if name == "Q6_K":
            raw[at + 208 : at + 210] = scales[:2]
        else:
            count = 4 if name in ("Q4_1", "Q4_K") else 2
            raw[at : at + count] = scales[:count]
    write_gguf(path, {"general.architecture": "llama"}, {"w": (name, (5, 3 * block), bytes(raw))})
    from weights.gguf_tensors import GGUFTensor

    read = GGUFTensor.of(path, read_header(path).tensors["w"], "w").read("float32")
    expected = scalar_values(name, bytes(raw)).reshape(5, -1)
    assert np.abs(read - expected).max() <= 8 * 2**-24 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_quantised_model(path, name):
    """Matrices quantised, vectors float32, as files are: what arrives is what the package dequantises from the rows in
    their order in the file."""
    gguf = pytest.importorskip("gguf")
    params = random_params(replace(small_llama(2, 4, 2, 16, vocab=VOCAB), width=32, inner=64), 1, scale=0.3)
    arrays = gguf_arrays(params, "llama")
    kind = gguf.GGMLQuantizationType[name]
    coded = {key: quantised(name, array) if array.ndim == 2 else array for key, array in arrays.items()}
    loaded = load(write(path, params, arrays=coded)).params

    def rounded(array):
        return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).astype(np.float32)

    assert np.array_equal(loaded.embedding, rounded(params.embedding))
    assert np.array_equal(loaded.blocks[1].down_weight, rounded(params.blocks[1].down_weight))
    q = arrays["blk.1.attn_q.weight"]
    assert np.array_equal(loaded.blocks[1].qkv_weight[: len(q)], rounded(params.blocks[1].qkv_weight[: len(q)]))
    assert not np.array_equal(rounded(q), rounded(params.blocks[1].qkv_weight[: len(q)]))

    kept = load_gguf(path, "test", "float32", PackedMemory("numpy", np)).params  # decoded as they are, and held as they are
    form = {"F16": "fp16", "BF16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}[name]
    pairs = [(kept.embedding, loaded.embedding), (kept.head, loaded.head)]
    for block, plain in zip(kept.blocks, loaded.blocks, strict=True):
        pairs += [(vars(block)[field], array) for field, array in vars(plain).items() if array is not None and array.ndim == 2]
    for matrix, array in pairs:
        assert matrix.form == form
        assert np.array_equal(matrix.to_array(), array)
    assert (kept.head is kept.embedding) == (loaded.head is loaded.embedding)


def test_large_tensors_come_in_pieces(path, monkeypatch):
    """Whole heads at a time where rows move, whatever the size of a piece."""
    params = model()
    write(path, params)
    for elements in (1, 24 * 5, 24 * 11, 1 << 30):
        monkeypatch.setattr("weights.gguf_tensors.PIECE_ELEMENTS", elements)
        assert_same_llama(load(path).params, params)


# Configuration


def test_llama3_scaling_is_stored_as_divisors(path):
    rope = Rope(8, 500000.0, scaling=Scaling("llama3", 8.0, 64.0))
    params = model(rope=rope)
    divisors = (Rope(8, 500000.0).frequencies() / rope.frequencies()).astype(np.float32)
    loaded = load(write(path, params, arrays={**gguf_arrays(params, "llama"), "rope_freqs.weight": divisors}))
    assert loaded.config.rope.frequencies() == pytest.approx(rope.frequencies(), rel=1e-6)


@pytest.mark.parametrize(("metadata", "scaling"), [
    ({}, Scaling()),
    ({"llama.rope.scaling.type": "none"}, Scaling()),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, Scaling("linear", 4.0)),
    ({"llama.rope.scale_linear": 4.0}, Scaling("linear", 4.0)),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 64},
     Scaling("yarn", 4.0, 64.0, attention_factor=0.1 * np.log(4) + 1)),
])  # fmt: skip
def test_rope_scaling(path, metadata, scaling):
    ours = load(write(path, model(), **metadata)).config.rope.scaling
    assert ours == replace(scaling, attention_factor=ours.attention_factor)
    assert ours.attention_factor == pytest.approx(scaling.attention_factor)


def test_windows_of_a_mistral(path):
    """llama.cpp has one architecture for both; a window in it is a Mistral's, on every layer."""
    assert load(write(path, model(), **{"llama.attention.sliding_window": 16})).config.windows == (16,) * 3
    assert load(write(path, model(), **{"llama.attention.sliding_window": 0})).config.windows == (None,) * 3


@pytest.mark.parametrize(("metadata", "error", "words"), [
    ({"general.architecture": "gemma"}, ConfigError, "'gemma' is not supported"),
    ({"general.architecture": ["llama"]}, ConfigError, "not supported"),
    ({"llama.block_count": 0}, ConfigError, "num_hidden_layers 0"),
    ({"llama.block_count": 1 << 30}, ConfigError, "num_hidden_layers"),
    ({"llama.attention.head_count": [4, 4]}, ConfigError, "num_attention_heads"),
    ({"llama.embedding_length": "64"}, ConfigError, "hidden_size '64'"),
    ({"llama.expert_count": 8}, ConfigError, "expert_count"),
    ({"llama.rope.dimension_count": 4}, ConfigError, "rope.dimension_count 4"),
    ({"llama.attention.value_length": 4}, ConfigError, "value_length 4"),
    ({"llama.rope.scaling.type": "longrope"}, ConfigError, "'longrope'"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": "x", "llama.rope.scaling.attn_factor": 1.0},
     ConfigError, "factor"),
    ({"llama.rope.scaling.yarn_ext_factor": 1.0}, ConfigError, "yarn_ext_factor"),
    ({"tokenizer.ggml.pre": "bloom"}, TokenizerError, "'bloom' is not supported"),
    ({"tokenizer.ggml.pre": ["gpt-2"]}, TokenizerError, "is not supported"),
    ({"tokenizer.ggml.model": "bert"}, TokenizerError, "'bert' is not supported"),
    ({"tokenizer.ggml.token_type": [1] * 5}, TokenizerError, "token_type"),
    ({"tokenizer.ggml.tokens": ["a"] * 258}, TokenizerError, "are both 'a'"),
    ({"tokenizer.ggml.eos_token_id": 258}, TokenizerError, "eos_token_id 258"),
    ({"tokenizer.ggml.merges": ["h e", "h"]}, TokenizerError, "merge 2"),
])  # fmt: skip
def test_metadata_that_is_refused(path, metadata, error, words):
    write(path, model(), **metadata)
    with pytest.raises(error, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_metadata_that_is_missing(path):
    metadata = gguf_metadata(model(), "llama")
    for key in ("llama.block_count", "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.tokens", "tokenizer.ggml.model",
                "tokenizer.ggml.pre", "general.architecture"):  # fmt: skip
        write_gguf(path, {k: v for k, v in metadata.items() if k != key}, gguf_arrays(model(), "llama"))
        with pytest.raises(NanoKVError, match=key.removeprefix("tokenizer.ggml.").replace("pre", "pre-tokenizer")):
            load(path)


def test_tensors_that_do_not_fit(path):
    params = model()
    arrays = gguf_arrays(params, "llama")
    for change, words in (
        ({"blk.0.attn_k.weight": np.zeros((8, 24), np.float32)}, r"\[8, 24\].*\[16, 24\]"),
        ({"blk.9.attn_k.weight": np.zeros((16, 24), np.float32)}, "does not have: layers.9"),
        ({"blk.0.attn_qkv.weight": np.zeros((16, 24), np.float32)}, "does not have: blk.0.attn_qkv.weight"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load(write(path, params, arrays=arrays | change))
    arrays.pop("blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match="layers.1.mlp.up_proj.weight"):
        load(write(path, params, arrays=arrays))


def test_special_tokens_and_template(path):
    loaded = load(write(path, model()))
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.eos_token_ids == {256}
    assert loaded.prefix == ()
    assert loaded.tokenizer.special_tokens == {"<|end|>": 256}
    assert loaded.tokenizer.encode("he<|end|>") == [257, *loaded.tokenizer.encode("<|end|>")]
    assert loaded.tokenizer.encode("he<|end|>", special=True) == [257, 256]
    assert load(write(path, model(), **{"tokenizer.ggml.add_bos_token": True})).prefix == (256,)


# Damage: whatever a header says, nothing is allocated or skipped before it is known to be there.

META = {"general.architecture": "llama"}


def raw_entries(**more):
    return [entry(key, value) for key, value in (META | more).items()]


@pytest.mark.parametrize(("content", "words"), [
    (b"", "too short"),
    (b"GGUF", "too short"),
    (b"PK\x03\x04" + b"\0" * 40, "begins with"),
    (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),  # L06
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
    (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version is 4"),
    (header([], [], counts=(0, 1 << 60)), "pieces of metadata"),
    (header([], [], counts=(1 << 60, 0)), "tensors at byte"),
    (header([struct.pack("<Q", 1 << 60) + b"key" * 9], []), "a string of 1152921504606846976 bytes"),  # L05
    (header([struct.pack("<Q", 2**64 - 1) + b"key" * 9], []), "a string of"),
    (header([text("k") + struct.pack("<I", 77) + b"\0" * 8], []), "k has the unknown type 77"),
    (header([text("k") + struct.pack("<IIQ", ARRAY, U32, 1 << 30) + b"\0" * 99], []), "the 1073741824 numbers of k"),  # L08
    (header([text("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 30) + b"\0" * 99], []), "the 1073741824 strings of k"),  # L08
    (header([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + b"\0" * 99], []), "array of arrays"),
    (header([entry("k", 1), entry("k", 1)], []), "'k' twice"),
    (header([text(b"\xff\xfe") + typed(1)], []), "not UTF-8"),
    (header([*raw_entries(), entry("general.alignment", 0)], []), "alignment 0"),
    (header([*raw_entries(), entry("general.alignment", 12)], []), "alignment 12"),
    (header([*raw_entries(), entry("general.alignment", "32")], []), "alignment '32'"),
    (header(raw_entries(), [tensor("w", [1] * 9, 0, 0)]), "9 dimensions"),  # L05
    (header(raw_entries(), [tensor("w", [], 0, 0) + b"\0" * 9]), "0 dimensions"),
    (header(raw_entries(), [tensor("w", [4, 0], 0, 0)]), "no elements"),  # L04
    (header(raw_entries(), [tensor("w", [(1 << 42) + 1] * 4, 0, 0)]), "reaches past the file's end"),  # L03
    (header(raw_entries(), [tensor("w", [1 << 62, 4], 0, 0)]), "reaches past the file's end"),
    (header(raw_entries(), [tensor("w", [33], 8, 0)]), "no multiple of Q8_0's 32"),
    (header(raw_entries(), [tensor("w", [32], 99, 0)]), "ggml type 99"),
    (header(raw_entries(), [tensor("w", [32], 0, 7)]), "offset 7"),
    (header(raw_entries(), [tensor("w", [32], 0, 2**64 - 32)]), "reaches past the file's end"),
    (header(raw_entries(), [tensor("w", [8], 0, 0)]), "reaches past the file's end"),  # L09: cut at the header
    (header(raw_entries(), [tensor("w", [8], 0, 0), tensor("w", [8], 0, 32)]) + b"\0" * 200, "'w' twice"),
])  # fmt: skip
def test_headers_that_are_refused(path, content, words):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("g") / "model.gguf"
    params = random_params(small_llama(1, 2, 1, 4, vocab=VOCAB), scale=0.3)
    return write(path, params).read_bytes()


@given(st.data())
def test_a_cut_file_is_refused(small_file, tmp_path_factory, data):
    """Anywhere: in the header, in the padding, in the weights."""
    path = tmp_path_factory.mktemp("cut") / "model.gguf"
    path.write_bytes(small_file[: data.draw(st.integers(0, len(small_file) - 1))])
    with pytest.raises(CheckpointError):
        load(path)


@given(st.data())
def test_a_damaged_header_raises_nothing_but_our_errors(small_file, tmp_path_factory, data):
    """Bytes changed at random in the header: either it still means something, or one line says what is wrong."""
    path = tmp_path_factory.mktemp("bad") / "model.gguf"
    content = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(NanoKVError):
        load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


MEASURE = """
import sys
from pathlib import Path
from nanokv.backend import NUMPY
from nanokv.kernels.choice import PackedMemory
from weights.gguf_file import load_gguf
params = load_gguf(Path(sys.argv[1]), "m", sys.argv[2], NUMPY).params
loaded = params.embedding.nbytes + sum(a.nbytes for b in params.blocks for a in b.arrays())
print(loaded, next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not run: this system does not say a process's peak memory")
@pytest.mark.parametrize("name", ["F32", "F16", "Q4_1"])
def test_peak_memory(path, name):
    """SmolLM2-135M's shape with weights of zero, which take no room on the disk: at most 1.25 times what stays, and the
    interpreter with its libraries."""
    pytest.importorskip("gguf")
    config = replace(small_llama(30, 9, 3, 64, positions=8192, vocab=49152), width=576, inner=1536, tied_head=True)
    shapes = {"token_embd.weight": (49152, 576), "output_norm.weight": (576,)}
    stacked = {"qkv_weight": ("attn_q", "attn_k", "attn_v"), "gate_up_weight": ("ffn_gate", "ffn_up")}
    rows = {"attn_q": 576, "attn_k": 192, "attn_v": 192, "ffn_gate": 1536, "ffn_up": 1536}
    single = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm", "output_weight": "attn_output", "down_weight": "ffn_down"}
    for layer in range(30):
        for field, shape in block_shapes(config).items():
            for part in stacked.get(field, ()):
                shapes[f"blk.{layer}.{part}.weight"] = (rows[part], shape[1])
            if field in single:
                shapes[f"blk.{layer}.{single[field]}.weight"] = shape
    listed, at = [], 0
    code = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_1": (3, 32, 20)}
    for key, shape in shapes.items():
        number, block, size = code[name if len(shape) == 2 else "F32"]
        listed.append(tensor(key, shape[::-1], number, at))
        at += int(np.prod(shape)) // block * size
        at += -at % 32
    tiny = random_params(replace(config, num_layers=1, vocab_size=300))
    metadata = gguf_metadata(replace(tiny, config=config), "llama")
    head = header([entry(key, value) for key, value in metadata.items()], listed)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + -len(head) % 32 + at)
    command = [sys.executable, "-c", MEASURE, str(path), "float32"]
    loaded, peak = map(int, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    assert loaded > 4 * 134_000_000
    assert loaded < peak <= 1.25 * loaded + 150e6, f"peak {peak / 1e6:.0f} MB for {loaded / 1e6:.0f} MB of weights"
