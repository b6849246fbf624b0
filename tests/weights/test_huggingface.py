"""A model directory: the small files around the weights, and what is said when one is missing, wrong or of another model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanokv.errors import CheckpointError, ConfigError, NanoKVError, TokenizerError
from tests.weights.files import CONFIG, arrays_of, assert_same, params_for, shard, write_model
from weights import load
from weights.huggingface import missing_files

PARAMS = params_for(CONFIG)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", CONFIG, arrays_of(PARAMS))


def rewrite(path: Path, **changes: Any) -> None:
    """Keys of a JSON file set, or taken out where the value is ..."""
    raw = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (raw | changes).items() if value is not ...}), encoding="utf-8")


def test_a_checkpoint(model: Path) -> None:
    checkpoint = load(model)
    assert checkpoint.name == "tiny"
    assert checkpoint.config is checkpoint.params.config
    assert checkpoint.config == PARAMS.config
    assert checkpoint.tokenizer.encode("he") == [256]
    assert checkpoint.eos_token_ids == {257}
    assert_same(checkpoint.params, PARAMS)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_are_the_single_file(model: Path, count: int) -> None:
    assert_same(load(shard(model, count)).params, PARAMS)


def test_dtypes(model: Path) -> None:
    assert load(model).params.wte.dtype == np.float32
    double = load(model, dtype="float64")
    assert double.params.wte.dtype == np.float64
    assert np.array_equal(double.params.wte, PARAMS.wte.astype(np.float64))


def test_loading_leaves_the_directory_as_it_was(model: Path) -> None:
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    load(model)
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


# end of text


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (257, ..., {257}),
        (257, 257, {257}),
        (257, [3, 4], {3, 4, 257}),
        ([1, 2], 2, {1, 2}),
        (None, [5], {5}),
        (..., 7, {7}),
        (..., None, set()),
        ([], [], set()),
    ],
)
def test_end_of_text_is_the_union_of_both_files(model: Path, in_config: Any, in_generation: Any, expected: set[int]) -> None:
    """I08: a number or a list, in one file or both."""
    rewrite(model / "config.json", eos_token_id=in_config)
    rewrite(model / "generation_config.json", eos_token_id=in_generation)
    assert load(model).eos_token_ids == expected


@pytest.mark.parametrize("value", [CONFIG["vocab_size"], -1, "2", True, [1, None], 1.0])
def test_end_of_text_outside_the_vocabulary(model: Path, value: Any) -> None:
    for name in ("generation_config.json", "config.json"):
        rewrite(model / name, eos_token_id=value)
        with pytest.raises(ConfigError, match=rf"{name}: eos_token_id .* is not an id of the vocabulary"):
            load(model)


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_a_generation_config_that_is_none(model: Path, text: str) -> None:
    (model / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(model)


# config.json


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": ...}, "config.json: there is no 'n_layer'"),
        ({"n_embd": None}, "config.json: there is no 'n_embd'"),
        ({"model_type": ...}, "model_type None is not supported"),
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported"),
        ({"n_layer": 1 << 40}, "n_layer 1099511627776 is not a whole number between"),
        ({"n_layer": -1}, "n_layer -1 is not"),
        ({"vocab_size": 0}, "vocab_size 0 is not"),
        ({"n_head": 3}, "n_embd 8 is not divisible by n_head 3"),
        ({"n_head": 0}, "n_head 0 is not"),
        ({"n_embd": "8"}, "n_embd '8' is not"),
        ({"n_embd": 8.0}, "n_embd 8.0 is not"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 is not"),
        ({"activation_function": "swish"}, "activation_function 'swish' is not supported"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon nan is not"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no' is not true or false"),
        ({"add_cross_attention": True}, "add_cross_attention is true"),
    ],
)
def test_bad_configs(model: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(model / "config.json", **changes)
    with pytest.raises(ConfigError) as caught:
        load(model)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(model / "config.json"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe{", b"[" * 100_000, b'{"n_layer": ' + b"9" * 5000 + b"}"]
)
def test_configs_that_are_not(model: Path, content: bytes) -> None:
    (model / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(model)
    assert str(caught.value).startswith(str(model / "config.json"))
    assert str(caught.value).count(str(model)) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"n_layer": 4096}, {"n_embd": 1 << 17}, {"vocab_size": 1 << 24}, {"n_positions": 1 << 24}, {"n_inner": 1 << 19}]
)
def test_a_config_of_a_larger_model_is_refused_before_memory_is_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Each of these, allocated, would be from a megabyte to terabytes."""
    monkeypatch.setattr(np, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    rewrite(model / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"configuration|config.json"):
        load(model)


# the tokenizer


def test_a_vocabulary_larger_than_the_models(model: Path) -> None:
    vocab = json.loads((model / "vocab.json").read_text(encoding="utf-8"))
    rewrite(model / "vocab.json", **{"<last>": CONFIG["vocab_size"] - 1})
    assert load(model).tokenizer.vocab_size == CONFIG["vocab_size"]
    rewrite(model / "vocab.json", **vocab, **{"<last>": CONFIG["vocab_size"]})
    with pytest.raises(CheckpointError, match=r"tiny: the tokenizer has ids up to 262, but config\.json has vocab_size 262"):
        load(model)


def as_tokenizer_json(model: Path, merges: list[str]) -> None:
    vocab = json.loads((model / "vocab.json").read_text(encoding="utf-8"))
    raw = {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    (model / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")


def test_which_tokenizer_is_read(model: Path) -> None:
    """The pair where both of its files are there, else tokenizer.json."""
    as_tokenizer_json(model, [])
    assert load(model).tokenizer.encode("he") == [256]
    (model / "merges.txt").unlink()
    assert load(model).tokenizer.encode("he") == [71, 68]
    (model / "tokenizer.json").unlink()
    with pytest.raises(
        TokenizerError, match=r"tiny has no tokenizer: it needs vocab\.json and merges\.txt, or tokenizer\.json"
    ):
        load(model)


def test_a_damaged_tokenizer(model: Path) -> None:
    (model / "vocab.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"vocab\.json"):
        load(model)


# the weights


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda _: b"\xff" * 8, lambda _: b""])
def test_damaged_weights(model: Path, change: Any) -> None:
    """K07, K09."""
    path = model / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        load(model)


def test_only_pickled_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickled checkpoint"):
        load(model)


def test_weights_with_nan_load_and_show(model: Path) -> None:
    arrays = arrays_of(PARAMS)
    arrays["ln_f.bias"] = np.array([np.nan, np.inf, -np.inf, 0, 1, 2, 3, 4], np.float32)
    loaded = load(write_model(model, CONFIG, arrays)).params
    assert np.array_equal(loaded.ln_f_bias, arrays["ln_f.bias"], equal_nan=True)


# what is missing


def test_missing_files(model: Path) -> None:
    assert missing_files(model) == []
    (model / "vocab.json").unlink()
    assert missing_files(model) == ["tokenizer.json"]
    (model / "config.json").unlink()
    (model / "model.safetensors").unlink()
    assert missing_files(model) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_missing_shards(model: Path) -> None:
    shard(model, 3)
    assert missing_files(model) == []
    (model / "model-00002-of-00003.safetensors").unlink()
    assert missing_files(model) == ["model-00002-of-00003.safetensors"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json"])
def test_every_missing_file_is_an_error_of_ours(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(NanoKVError, match=name if name != "vocab.json" else "no tokenizer"):
        load(model)
