"""config.json of Llama and its relatives: published shapes, windows by each family's rule, bad values refused by name."""

import json

import pytest

from nanokv.errors import ConfigError
from nanokv.kv.tile import Visibility
from nanokv.models.llama_config import LlamaConfig
from tests.support import DATA

BASE = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip


def read(**changes):
    return LlamaConfig.from_dict({**BASE, **changes})


def smollm2():
    return {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
        "eos_token_id": 2, "rope_scaling": None, "rope_interleaved": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


@pytest.mark.parametrize(("raw", "parameters", "kv_bytes"), [
    (smollm2(), 134_515_008, 23_040),
    ({"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
      "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True,
      "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21},
     494_032_768, 12_288),
    ({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
      "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
      "tie_word_embeddings": True, "rope_theta": 1000000}, 596_049_920, 114_688),
    ({"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
      "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096},
     7_241_732_096, 131_072),
    ({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
      "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
      "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                       "original_max_position_embeddings": 8192}}, 8_030_261_248, 131_072),
], ids=["smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "llama-3.1-8b"])  # fmt: skip
def test_published_sizes(raw, parameters, kv_bytes):
    """Parameter counts as their hub pages give them; KV bytes a token in 16 bits."""
    config = LlamaConfig.from_dict(raw)
    assert config.num_parameters == parameters
    assert config.kv_bytes_per_token(2) == kv_bytes


def test_public_configs_are_read_or_refused_by_name():
    """Every config.json of the facts file that says one of the four families is read, or misses a key by name."""
    path = DATA.parent / "facts" / "model_configs.json"
    if not path.exists():
        pytest.skip("not run: facts/model_configs.json is not beside the project")
    read_ones = 0
    for entry in json.loads(path.read_text())["models"]:
        raw, normal = entry["raw_config_keys"], entry["normalised"]
        if raw.get("model_type") not in ("llama", "mistral", "qwen2", "qwen3"):
            continue
        filled = {"vocab_size": 200000, "intermediate_size": 1000, **raw}
        config = LlamaConfig.from_dict(filled)
        read_ones += 1
        assert (config.num_layers, config.num_kv_heads, config.head_dim) == (
            normal["layers"], normal["kv_heads"], normal["head_dim"],
        )  # fmt: skip
    assert read_ones >= 5


def test_what_the_families_have():
    llama, qwen2, qwen3 = read(), read(model_type="qwen2"), read(model_type="qwen3")
    assert (llama.qkv_bias, llama.output_bias, llama.qk_norm, llama.head_dim) == (False, False, False, 8)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    assert read(attention_bias=True).output_bias
    assert read(mlp_bias=True).mlp_bias
    assert not read(model_type="mistral", attention_bias=True).qkv_bias  # as in transformers, which has no such key there
    assert read(num_key_value_heads=None).num_kv_heads == 8
    assert read(head_dim=32).head_dim == 32
    assert read().norm_epsilon == 1e-6
    assert not read().tied_head
    assert read(eos_token_id=[1, 2]).eos_token_ids == (1, 2)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(("raw", "windows"), [
    ({"model_type": "mistral", "sliding_window": 16}, [16] * 4),
    ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
    ({"model_type": "mistral"}, [None] * 4),  # 4096, the default, is not below 2048 positions
    ({"model_type": "mistral", "max_position_embeddings": 8192}, [4096] * 4),
    ({"model_type": "mistral", "sliding_window": 2048}, [None] * 4),
    ({"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 0}, [None] * 4),  # D06
    ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0}, [None] * 4),
    ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4),  # D05
    ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, [None, 16, 16, 16]),
    ({"model_type": "qwen3", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, [16] * 4),
    ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, [None] * 4),
    ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0,
      "layer_types": [FULL, SLIDING, FULL, SLIDING]}, [None, 16, None, 16]),
    ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False, "layer_types": [SLIDING] * 4}, [None] * 4),
    ({"model_type": "llama", "sliding_window": None}, [None] * 4),
])  # fmt: skip
def test_which_layers_have_a_window(raw, windows):
    assert read(**raw).visibility() == [Visibility(window) for window in windows]


def test_qwen25_7b_has_full_attention():
    """D06: window 131072, flag false."""
    raw = {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False, "max_position_embeddings": 131072}
    assert read(**raw).visibility() == [Visibility()] * 4


@pytest.mark.parametrize(("changes", "words"), [
    ({"model_type": "mixtral"}, "'mixtral' is not supported"),
    ({"model_type": None}, "None is not supported"),
    ({"model_type": ["llama"]}, "is not supported"),
    ({"hidden_size": None}, "no 'hidden_size'"),
    ({"hidden_size": 63}, "63 is not divisible by num_attention_heads 8"),
    ({"num_key_value_heads": 3}, "8 is not divisible by num_key_value_heads 3"),
    ({"num_key_value_heads": 0}, "num_key_value_heads 0"),
    ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    ({"num_attention_heads": "8"}, "num_attention_heads '8'"),
    ({"vocab_size": True}, "vocab_size True"),
    ({"head_dim": 7}, "head width 7 is odd"),
    ({"rms_norm_eps": 0}, "rms_norm_eps 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "use a GGUF file"),
    ({"add_cross_attention": True}, "only decoders"),
    ({"sliding_window": 4096}, "'llama' has no windows"),
    ({"model_type": "mistral", "layer_types": [FULL] * 4}, "layer_types"),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": [FULL]}, "layer_types"),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
    ({"model_type": "qwen2", "use_sliding_window": 1}, "use_sliding_window 1"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'"),
    ({"eos_token_id": 100}, "eos_token_id 100"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
])  # fmt: skip
def test_what_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        read(**changes)


def test_something_else_than_an_object():
    with pytest.raises(ConfigError, match="object"):
        LlamaConfig.from_dict([1])
