"""Whole-model steps: the sums of their parts, and configs read right or refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator_figures import LLAMA2_7B, LLAMA31_8B
from nanokv.errors import ConfigError
from sim.formats import FORMATS
from sim.gpus import get_gpu
from sim.planner.geometry import geometry_from_config
from sim.planner.parameters import count_parameters
from sim.shape import Shape
from sim.transformer import Decoder, decoder_from_dict, read_decoder, simulate_model, step, steps_as_dict

HALF, INT8 = FORMATS["float16"], FORMATS["int8"]
A100 = get_gpu("a100-80")
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
         "intermediate_size": 96, "vocab_size": 100}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def attention(model: Decoder, seq: int, rows: int, batch: int = 1) -> Shape:
    return Shape(seq, model.heads, model.head_dim, rows, model.kv_heads, batch)


def test_gpt2_reads_all_its_parameters_but_unused_table_rows() -> None:
    """124,439,808 parameters: all but the token and position tables are read each step, the token table as the head."""
    model = decoder_from_dict(GPT2, "gpt2")
    ops = step(model, attention(model, 100, 1), HALF)
    weights = sum(op.weight_bytes * op.count for op in ops if op.name != "embedding")
    assert weights == 2 * (124439808 - 1024 * 768)


def test_llama_reads_all_its_parameters() -> None:
    """Llama-3.1-8B: 8,030,261,248, with an untied head; the token table is looked up, not read."""
    ops = step(LLAMA31_8B, attention(LLAMA31_8B, 100, 1), HALF)
    weights = sum(op.weight_bytes * op.count for op in ops if op.name != "embedding")
    assert weights == 2 * (8030261248 - 128256 * 4096)


def test_operations_are_two_a_parameter_and_token() -> None:
    """Products alone: 2 x parameters of the layers for each token, and the head for one token a sequence."""
    for rows, batch in ((1, 1), (1, 8), (64, 2)):
        shape = attention(LLAMA2_7B, 64, rows, batch)
        ops = step(LLAMA2_7B, shape, HALF)
        products = sum(op.flops * op.count for op in ops if op.name.endswith("proj"))
        assert products == 2 * batch * rows * 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
        (head,) = [op for op in ops if op.name == "head"]
        assert head.flops == 2 * batch * 4096 * 32000


def test_the_cache_is_read_once_a_key_value_head() -> None:
    """Llama-3.1-8B has a quarter of Llama-2-7B's key-value heads; LLM-Viewer charges both alike."""
    read = {}
    for model in (LLAMA2_7B, LLAMA31_8B):
        (op,) = [op for op in step(model, attention(model, 4096, 1), HALF) if op.name == "attention"]
        read[model.name] = op.kv_bytes * op.count
    assert read["Llama-2-7B"] == 2 * 32 * 4096 * 32 * 128 * 2 == 2147483648
    assert read["Llama-3.1-8B"] == 2147483648 // 4


@given(st.integers(1, 300), st.integers(1, 4))
def test_fused_attention_never_moves_more_than_the_three_kernels(seq: int, batch: int) -> None:
    model = decoder_from_dict(LLAMA, "small")
    shape = Shape(seq, batch=batch)
    fused, naive = (simulate_model(model, A100, shape, HALF, naive=flag) for flag in (False, True))
    for phase in ("prefill", "decode"):
        assert fused[phase].nbytes < naive[phase].nbytes
        assert fused[phase].seconds <= naive[phase].seconds
        assert fused[phase].seconds >= max(fused[phase].nbytes / A100.bandwidth, fused[phase].flops / A100.rate("float16")) * (
            1 - 1e-12
        )


def test_stored_weights_and_cache_shrink_apart() -> None:
    shape = Shape(4096)
    plain = simulate_model(LLAMA31_8B, A100, shape, HALF)["decode"]
    small = simulate_model(LLAMA31_8B, A100, replace(shape, kv_dtype=INT8), INT8)["decode"]
    products = [(a, b) for a, b in zip(plain.ops, small.ops, strict=True) if a.name.endswith("proj")]
    for wide, narrow in products:  # a byte an element and a float32 scale for each output
        inputs = narrow.input_bytes // 2
        outputs = narrow.output_bytes // 2
        assert (wide.weight_bytes, narrow.weight_bytes) == (2 * inputs * outputs, inputs * outputs + 4 * outputs)


def test_a_window_caps_what_decoding_reads() -> None:
    model = decoder_from_dict({**LLAMA, "model_type": "mistral", "sliding_window": 128}, "windowed")
    (op,) = [op for op in simulate_model(model, A100, Shape(1000), HALF)["decode"].ops if op.name == "attention"]
    assert op.kv_bytes == 2 * 128 * 2 * 8 * 2


def test_the_object_adds_up() -> None:
    model, shape = decoder_from_dict(GPT2, "gpt2"), Shape(100, batch=3)
    whole = steps_as_dict(model, A100, shape, simulate_model(model, A100, shape, HALF))
    assert (whole["model"], whole["context"], whole["batch"], set(whole["phases"])) == ("gpt2", 100, 3, {"prefill", "decode"})
    for phase in whole["phases"].values():
        for total, each in (("hbm_bytes", "hbm_bytes"), ("flops", "flops"), ("time_s", "time_s")):
            assert phase[total] == pytest.approx(sum(op[each] * op["count"] for op in phase["ops"]), rel=1e-12)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("biases", [{}, {"attention_bias": True}, {"mlp_bias": True, "attention_bias": False}])
def test_a_step_reads_the_parameters_that_the_planner_counts(kind: str, biases: dict[str, bool]) -> None:
    """Two independent counts: only Llama and Qwen 3 read attention_bias (on the output too), only Llama mlp_bias."""
    raw = {**LLAMA, "model_type": kind, "head_dim": 16, "tie_word_embeddings": False, "sliding_window": None, **biases}
    model = decoder_from_dict(raw, kind)
    ops = step(model, attention(model, 9, 3), HALF)
    read = sum(op.weight_bytes * op.count for op in ops if op.name != "embedding")
    assert read == 2 * (count_parameters(raw, geometry_from_config(raw)) - 100 * 64)


def test_what_a_file_leaves_out_is_the_classes_default() -> None:
    """transformers: Mistral has 8 key-value heads and a window of 4096, Qwen 32 heads, Qwen 3 a head of 128."""
    bare = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"num_attention_heads": 32}
    found = {kind: decoder_from_dict({**bare, "model_type": kind}, kind) for kind in ("llama", "mistral", "qwen2", "qwen3")}
    assert {kind: model.kv_heads for kind, model in found.items()} == {"llama": 32, "mistral": 8, "qwen2": 32, "qwen3": 32}
    assert {kind: model.head_dim for kind, model in found.items()} == {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 128}
    assert {kind: model.window for kind, model in found.items() if model.window} == {"mistral": 4096}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_llama_like_configs(kind: str) -> None:
    model = decoder_from_dict({**LLAMA, "model_type": kind, "head_dim": 16}, kind)
    assert (model.layers, model.width, model.heads, model.kv_heads, model.head_dim, model.inner) == (2, 64, 8, 2, 16, 96)
    assert (model.qkv_bias, model.qk_norm) == (kind == "qwen2", kind == "qwen3")
    names = [op.name for op in step(model, attention(model, 9, 9), HALF)]
    assert ("q, k norm" in names) == (kind == "qwen3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not simulated"),
        ({"model_type": ["llama"]}, "is not simulated"),
        ({"model_type": None}, "model_type None is not simulated"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_attention_heads": 0}, "num_attention_heads 0 is not a whole number"),
        ({"num_key_value_heads": 3}, "8 is not divisible by num_key_value_heads 3"),
        ({"hidden_size": 63}, "hidden_size 63 is not divisible"),
        ({"intermediate_size": "96"}, "intermediate_size '96' is not a whole number"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "mixes layers"),
    ],
)
def test_a_bad_config_is_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        decoder_from_dict({**LLAMA, **change}, "bad")
    assert "\n" not in str(caught.value)


def test_gpt2_heads_must_divide() -> None:
    with pytest.raises(ConfigError, match="n_embd 768 is not divisible by n_head 7"):
        decoder_from_dict({**GPT2, "n_head": 7}, "bad")


def test_files_are_read_or_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert read_decoder(tmp_path) == read_decoder(tmp_path / "config.json")
    assert read_decoder(tmp_path).name == tmp_path.name
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("no")
    for name, message in (("list.json", "does not hold an object"), ("text.json", "is not JSON"), ("none.json", "cannot read")):
        with pytest.raises(ConfigError, match=message):
            read_decoder(tmp_path / name)
