"""Logits against transformers' Llama, Mistral, Qwen2 and Qwen3, position by position, on the same random weights."""

from types import MethodType

import numpy as np
import pytest

from nanokv.models.llama import LlamaParams, random_params
from nanokv.models.llama_config import LlamaConfig
from nanokv.numerics import FAST
from tests.llama_support import cache_for, run
from weights.llama import BLOCK, tensor_shapes

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LENGTH = 150
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def raw_config(model_type: str, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, **more):
    return {
        "model_type": model_type, "vocab_size": 97, "hidden_size": 16 * heads, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, **more,
    }  # fmt: skip


def torch_model(raw, params: LlamaParams):
    """Their model with our weights, in our precision."""
    name = CLASSES[raw["model_type"]]
    keys = {key: value for key, value in raw.items() if key != "model_type"}
    config = getattr(transformers, f"{name}Config")(**keys, attn_implementation="sdpa")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    state = {"model.embed_tokens.weight": params.embedding, "model.norm.weight": params.norm, "lm_head.weight": params.head}
    shapes = tensor_shapes(params.config)
    for layer, block in enumerate(params.blocks):
        for field, names in BLOCK.items():
            array, at = getattr(block, field), 0
            for part in names if array is not None else ():
                rows = shapes[f"layers.{layer}.{part}"][0]
                state[f"model.layers.{layer}.{part}"] = array[at : at + rows]
                at += rows
    model.to(getattr(torch, str(params.dtype)))
    model.load_state_dict({name: torch.tensor(np.ascontiguousarray(array)) for name, array in state.items()})
    return model.eval()


def in_float64(model, params: LlamaParams):
    """Their norms and rotary tables are float32 in a float64 model, too: the same formulas in float64 in their place. The
    frequencies are ours, which test_frequencies compares with theirs."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        angles = position_ids[..., None].double() * torch.tensor(params.config.rope.frequencies())
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(rotary, module)
    return model


def compare(raw, sizes=(100, 1, 49), scale=0.2):
    config = LlamaConfig.from_dict(raw)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, LENGTH)
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 2e-3)):
        params = random_params(config, 1, dtype, scale=scale)
        model = torch_model(raw, params)
        if dtype is np.float64:
            model = in_float64(model, params)
        with torch.no_grad():
            expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
        assert np.abs(expected).max() > 1
        ours = run(params, tokens, list(sizes), cache_for(config, 200, dtype))
        assert np.abs(ours - expected).max() <= tolerance
        fast = run(params, tokens, list(sizes), cache_for(config, 200, dtype), FAST)
        assert np.abs(fast - expected).max() <= tolerance


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (32, 4), (8, 1)])
@pytest.mark.parametrize("model_type", CLASSES)
def test_families_and_head_ratios(model_type, heads, kv_heads):
    """Sharp weights (deviation 0.2), 150 tokens across two tiles in three pieces: 1e-9 in float64. In float32, where logits
    of size 20 pass through 3 layers, 2e-3 is 100 ulp of the largest."""
    compare(raw_config(model_type, heads, kv_heads, sliding_window=None))


@pytest.mark.parametrize("options", [
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"rope_scaling": LLAMA3}, {"rope_scaling": YARN},
    {"rope_scaling": {**YARN, "truncate": False}}, {"rope_scaling": {**YARN, "attention_factor": 1.3}},
    {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}}, {"rope_theta": 500000.0},
    {"rope_parameters": {**LLAMA3, "rope_theta": 5000.0}}, {"tie_word_embeddings": True}, {"attention_bias": True},
    {"mlp_bias": True}, {"head_dim": 32}, {"rms_norm_eps": 1e-3},
])  # fmt: skip
def test_settings(options):
    raw = raw_config("llama")
    if "rope_parameters" in options:
        raw.pop("rope_theta")
    compare({**raw, **options})


@pytest.mark.parametrize("raw", [
    raw_config("mistral", sliding_window=20),
    raw_config("qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1),
    raw_config("qwen3", use_sliding_window=True, sliding_window=20, max_window_layers=0),
    raw_config("qwen2", use_sliding_window=True, sliding_window=20,
               layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    raw_config("qwen2", use_sliding_window=False, sliding_window=20, max_window_layers=0),
    raw_config("qwen3", head_dim=24, attention_bias=True),
], ids=["mistral", "qwen2", "qwen3", "layer_types", "off", "qwen3-bias"])  # fmt: skip
def test_windows_shorter_than_the_prompt(raw):
    compare(raw)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN])
def test_frequencies(scaling):
    """Theirs are float32: a power, a quotient and a few products, so within 8 of its roundings."""
    raw = raw_config("llama", rope_scaling=scaling)
    config = LlamaConfig.from_dict(raw)
    theirs = torch_model(raw, random_params(config)).model.rotary_emb
    assert config.rope.frequencies() == pytest.approx(theirs.inv_freq.double().numpy(), rel=8 * 2**-24)
    assert config.rope.scaling.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
