"""config.json: read as it is, or refused by the name of the key before anything is allocated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import ConfigError
from nanokv.models.config import GPT2Config, known_shapes
from nanokv.models.gpt2 import random_params
from tests.support import small_config

GOOD = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}


def test_the_file_of_gpt2():
    config = GPT2Config.from_dict(GOOD | {"eos_token_id": 50256, "n_ctx": 1024, "resid_pdrop": 0.1})
    assert (config.inner, config.head_dim, config.num_kv_heads) == (3072, 64, 12)
    assert config.activation == "gelu_new"
    assert config.eos_token_ids == (50256,)
    assert config.num_parameters == 124439808
    assert config.kv_bytes_per_token(2) == 36864


def test_published_parameter_counts():
    counts = {name: shape.num_parameters for name, shape in known_shapes().items()}
    assert counts == {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200}


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"kv_heads": 1, "tied_head": False}])
def test_the_parameter_count_is_that_of_the_arrays(options):
    params = random_params(small_config(**options))
    arrays = [params.wte, params.wpe, params.ln_f_weight, params.ln_f_bias]
    arrays += [array for block in params.blocks for array in vars(block).values()]
    if params.head is not params.wte:
        arrays.append(params.head)
    assert sum(array.size for array in arrays) == params.config.num_parameters


def test_the_inner_width_is_what_the_file_says_or_four_times_the_outer():
    assert GPT2Config.from_dict(GOOD | {"n_inner": None}).inner == 3072
    assert GPT2Config.from_dict(GOOD | {"n_inner": 5}).inner == 5


def test_the_scale_of_the_scores():
    assert GPT2Config.from_dict(GOOD).attention_scale(3) == 1 / 8
    assert GPT2Config.from_dict(GOOD | {"scale_attn_weights": False}).attention_scale(3) == 1
    assert GPT2Config.from_dict(GOOD | {"scale_attn_by_inverse_layer_idx": True}).attention_scale(3) == 1 / 32


@pytest.mark.parametrize(("changes", "words"), [
    ({"model_type": "bert"}, "model_type 'bert'"), ({"model_type": None}, "model_type None"),
    ({"vocab_size": None}, "'vocab_size'"), ({"n_embd": 0}, "n_embd 0"), ({"n_layer": -1}, "n_layer -1"),
    ({"n_head": 5}, "n_embd 768 is not divisible by n_head 5"), ({"n_layer": 10**9}, "n_layer 1000000000"),
    ({"n_embd": "768"}, "n_embd '768'"), ({"n_positions": True}, "n_positions True"), ({"n_inner": 2**40}, "n_inner"),
    ({"num_key_value_heads": 5}, "n_head 12 is not divisible by num_key_value_heads 5"),
    ({"num_key_value_heads": 24}, "num_key_value_heads 24"), ({"activation_function": "relu"}, "'relu'.*gelu_new, gelu"),
    ({"layer_norm_epsilon": 0}, "layer_norm_epsilon 0"), ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon 'x'"),
    ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"), ({"eos_token_id": 50257}, "eos_token_id 50257"),
    ({"eos_token_id": [1, "a"]}, "eos_token_id 'a'"), ({"scale_attn_weights": 1}, "scale_attn_weights 1"),
    ({"add_cross_attention": True}, "add_cross_attention"), ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no'"),
])  # fmt: skip
def test_a_bad_value_is_named(changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        GPT2Config.from_dict(GOOD | changes)
    assert "\n" not in str(caught.value)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3),
    st.sampled_from(sorted(GOOD)),
)
def test_any_other_value_is_a_config_error_or_a_config(value, key):
    try:
        config = GPT2Config.from_dict(GOOD | {key: value})
    except ConfigError:
        return
    assert config.width % config.num_heads == 0


@pytest.mark.parametrize("raw", [[], None, "gpt2", 3])
def test_what_is_no_object_is_refused(raw):
    with pytest.raises(ConfigError, match="object"):
        GPT2Config.from_dict(raw)
