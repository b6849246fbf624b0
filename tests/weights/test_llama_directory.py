"""A directory in Hugging Face's layout: weights in one file or in shards, tokenizer, ends and chat template."""

import json

import pytest

from nanokv.backend import NUMPY
from nanokv.errors import CheckpointError, ConfigError, TokenizerError
from nanokv.models.llama import random_params
from tests.llama_support import byte_level, small_llama, small_vocab
from tests.weights.files import shard, stored, write_safetensors
from tests.weights.llama_files import assert_same_llama, config_json, hf_arrays
from weights.huggingface import load_directory

pytest.importorskip("tokenizers")


@pytest.fixture
def params():
    return random_params(small_llama(vocab=910, qkv_bias=True), scale=0.3)


def write(folder, params, **config):
    raw = config_json(params, "qwen2") | {"eos_token_id": 901} | config
    (folder / "config.json").write_text(json.dumps(raw))
    arrays = {name: stored(value) for name, value in hf_arrays(params).items()}
    write_safetensors(folder / "model.safetensors", arrays, {"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(byte_level(small_vocab(), ["a b"])), encoding="utf-8")
    return folder


def load(folder):
    return load_directory(folder, "m", "float32", NUMPY)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_directory(tmp_path, params, shards):
    folder = write(tmp_path, params)
    if shards > 1:
        shard(folder, shards)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [901, 900]}))
    loaded = load(folder)
    assert_same_llama(loaded.params, params)
    assert loaded.eos_token_ids == {900, 901}
    assert loaded.prefix == (900,)
    assert loaded.tokenizer.encode("ab") == [256]
    assert loaded.chat_template is None


def test_chat_templates(tmp_path, params):
    folder = write(tmp_path, params)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ old }}"}))
    assert load(folder).chat_template == "{{ old }}"
    (folder / "chat_template.jinja").write_text("{{ new }}")
    assert load(folder).chat_template == "{{ new }}"


def test_what_is_refused(tmp_path, params):
    folder = write(tmp_path, params, hidden_act="gelu")
    with pytest.raises(ConfigError, match="config.json: hidden_act"):
        load(folder)
    write(tmp_path, params, vocab_size=902)
    with pytest.raises(CheckpointError, match="ids up to 902, but config.json has vocab_size 902"):
        load(folder)
    write(tmp_path, params)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    with pytest.raises(TokenizerError, match=r"no tokenizer.json: vocab.json and merges.txt do not say"):
        load(folder)
