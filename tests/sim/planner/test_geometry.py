"""Reading a config.json: every spelling, every family's own rule, and refusal of whatever would be a guess."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import ConfigError
from sim.planner.families import READERS
from sim.planner.fields import LIMITS, SHAPING, SPELLINGS
from sim.planner.geometry import geometry_from_config
from sim.planner.layers import Geometry, Kind, Layer

GROUPED = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


def read(model_type: str, base: dict[str, Any] | None = None, /, **keys: Any) -> Geometry:
    return geometry_from_config({"model_type": model_type, **(GROUPED if base is None else base), **keys})


def kinds(found: Geometry) -> str:
    letters = {Kind.FULL: "F", Kind.SLIDING: "S", Kind.CHUNKED: "C", Kind.LINEAR: "L", Kind.MAMBA: "M", Kind.NONE: "-",
               Kind.SHARED: "s", Kind.MLA: "A", Kind.CROSS: "X"}  # fmt: skip
    return "".join(letters[layer.kind] for layer in found.layers)


@pytest.mark.parametrize(
    ("raw", "layers", "kv_heads", "dim"),
    [
        ({"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 48}, 3, 4, 12),
        ({"model_type": "gptj", "n_layer": 3, "n_head": 4, "n_embd": 48}, 3, 4, 12),
        ({"model_type": "gpt_neox", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 48}, 3, 4, 12),
        ({"model_type": "opt", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 48, "ffn_dim": 9}, 3, 4, 12),
        ({"model_type": "bloom", "n_layer": 3, "num_attention_heads": 4, "n_embed": 48}, 3, 4, 12),
        ({"model_type": "bloom", "n_layer": 3, "n_head": 4, "hidden_size": 48}, 3, 4, 12),
        ({"model_type": "mpt", "n_layers": 3, "n_heads": 4, "d_model": 48}, 3, 4, 12),
        (
            {
                "model_type": "mpt",
                "n_layers": 3,
                "n_heads": 4,
                "d_model": 48,
                "attn_config": {"attn_type": "multiquery_attention"},
            },
            3,
            1,
            12,
        ),
        (
            {
                "model_type": "mpt",
                "n_layers": 3,
                "n_heads": 4,
                "d_model": 48,
                "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2},
            },
            3,
            2,
            12,
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 3,
                "num_attention_heads": 71,
                "hidden_size": 4544,
                "multi_query": True,
            },
            3,
            1,
            64,
        ),
        (
            {"model_type": "falcon", "num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 96, "multi_query": False},
            3,
            8,
            12,
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "hidden_size": 96,
                "num_kv_heads": 2,
                "new_decoder_architecture": True,
                "multi_query": True,
            },
            3,
            2,
            12,
        ),
        ({"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8, "hidden_size": 8192}, 60, 8, 64),
        ({"model_type": "RefinedWebModel", "n_layer": 32, "n_head": 71, "multi_query": True, "hidden_size": 4544}, 32, 1, 64),
        ({"model_type": "RefinedWebModel", "n_layer": 24, "n_head": 32, "multi_query": False, "hidden_size": 2048}, 24, 32, 64),
        ({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True}, 40, 1, 128),
        ({"model_type": "gpt_bigcode", "n_layer": 3, "n_head": 4, "n_embd": 48, "multi_query": False}, 3, 4, 12),
        ({"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}}, 40, 8, 128),
        (
            {"model_type": "qwen", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 48, "kv_channels": 12},
            3,
            4,
            12,
        ),
        ({"model_type": "qwen", "n_layer": 3, "n_head": 4, "n_embd": 48, "kv_channels": 12}, 3, 4, 12),
        ({"model_type": "phi-msft", "n_layer": 3, "n_head": 4, "n_embd": 320, "n_head_kv": None}, 3, 4, 80),
        ({"model_type": "mixformer-sequential", "n_layer": 24, "n_head": 32, "n_embd": 2048}, 24, 32, 64),
        (
            {
                "model_type": "phi3small",
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "hidden_size": 4096,
                "dense_attention_every_n_layers": 2,
            },
            32,
            8,
            128,
        ),
        # ChatGLM-6B, then ChatGLM2-6B and GLM-4-9B
        (
            {
                "model_type": "chatglm",
                "num_layers": 28,
                "num_attention_heads": 32,
                "hidden_size": 4096,
                "inner_hidden_size": 16384,
            },
            28,
            32,
            128,
        ),
        (
            {
                "model_type": "chatglm",
                "num_layers": 28,
                "num_attention_heads": 32,
                "hidden_size": 4096,
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
            },
            28,
            2,
            128,
        ),
        (
            {
                "model_type": "chatglm",
                "num_layers": 40,
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "hidden_size": 4096,
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
            },
            40,
            2,
            128,
        ),
        ({"model_type": "baichuan", "num_hidden_layers": 40, "num_attention_heads": 40, "hidden_size": 5120}, 40, 40, 128),
        ({"model_type": "internlm", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}, 32, 32, 128),
        (
            {
                "model_type": "internlm2",
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "hidden_size": 4096,
            },
            32,
            8,
            128,
        ),
        (
            {
                "model_type": "Yi",
                "num_hidden_layers": 60,
                "num_attention_heads": 56,
                "num_key_value_heads": 8,
                "hidden_size": 7168,
            },
            60,
            8,
            128,
        ),
        (
            {
                "model_type": "stablelm_epoch",
                "num_hidden_layers": 24,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "hidden_size": 2048,
            },
            24,
            32,
            64,
        ),
        (
            {
                "model_type": "deci",
                "num_hidden_layers": 4,
                "num_attention_heads": 32,
                "hidden_size": 4096,
                "num_key_value_heads_per_layer": [4, 4, 4, 4],
            },
            4,
            4,
            128,
        ),
        (
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "hidden_size": 64,
                "num_key_value_heads": None,
            },
            2,
            8,
            8,
        ),
    ],
)
def test_spellings(raw: dict[str, Any], layers: int, kv_heads: int, dim: int) -> None:
    found = geometry_from_config(raw)
    assert found.layers == (Layer(Kind.FULL, kv_heads, dim, dim),) * layers


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            read("gpt_neo", {"num_layers": 4, "num_heads": 8, "hidden_size": 64}, attention_types=[[["global", "local"], 2]]),
            "FSFS",
        ),
        (read("gemma2", sliding_window=4), "SFSFSF"),
        (read("gemma3_text", sliding_window=4), "SSSSSF"),
        (read("gemma3_text", sliding_window=4, sliding_window_pattern=3), "SSFSSF"),
        (read("cohere2", sliding_window=4), "SSSFSS"),
        (read("olmo3", sliding_window=4), "SSSFSS"),
        (read("exaone4", sliding_window=4, sliding_window_pattern="LLG"), "SSFSSF"),
        (read("exaone4", sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 6), "FFFFFF"),
        (read("llama", sliding_window=4, use_sliding_window=False, max_window_layers=3), "FFFFFF"),
        (read("gpt_oss", sliding_window=4, layer_types=["full_attention"] * 5 + ["sliding_attention"]), "FFFFFS"),
        (read("llama4_text", attention_chunk_size=4), "CCCFCC"),
        (read("llama4_text", attention_chunk_size=4, no_rope_layers=[1, 0, 1, 0, 0, 1]), "CFCFFC"),
        (read("llama4_text", attention_chunk_size=None), "FFFFFF"),
        (read("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=4), "FFFFSS"),
        (read("qwen2", use_sliding_window=False, sliding_window=4, max_window_layers=4), "FFFFFF"),
        (read("qwen3_moe", use_sliding_window=True, sliding_window=4), "SSSSSS"),
        (read("mistral", sliding_window=4), "SSSSSS"),
        (read("mistral", sliding_window=None), "FFFFFF"),
        (read("ministral", sliding_window=4, layer_types=["full_attention"] * 3 + ["sliding_attention"] * 3), "FFFSSS"),
        (read("gemma3n_text", num_kv_shared_layers=1, sliding_window=4), "SSSSFs"),
        (read("gemma4_text", sliding_window=4, num_kv_shared_layers=0), "SSSSSF"),
        (
            read("mimo_v2_flash", sliding_window_size=4, head_dim=12, v_head_dim=8, hybrid_layer_pattern=[0, 1, 1, 0, 1, 1]),
            "FSSFSS",
        ),
        (read("qwen3_next"), "LLLFLL"),
        (read("qwen3_next", full_attention_interval=2), "LFLFLF"),
        (read("minimax_text_01", attn_type_list=[0, 0, 1, 0, 0, 1]), "LLFLLF"),
        (read("jamba", attn_layer_period=3, attn_layer_offset=1), "MFMMFM"),
        (read("nemotron_h", mamba_num_heads=4, mamba_head_dim=8, hybrid_override_pattern="M-M*-E"), "M-MF--"),
        (
            read("nemotron_h", mamba_num_heads=4, mamba_head_dim=8, layers_block_type=["mamba", "attention", "moe"] * 2),
            "MF-MF-",
        ),
        (read("granitemoehybrid", {**GROUPED, "hidden_size": 4096}, layer_types=["mamba", "attention"] * 3), "MFMFMF"),
        (
            read(
                "kimi_linear",
                linear_attn_config={
                    "full_attn_layers": [3, 6],
                    "kda_layers": [1, 2, 4, 5],
                    "num_heads": 4,
                    "head_dim": 8,
                    "short_conv_kernel_size": 4,
                },
            ),
            "LLALLA",
        ),
        (read("phi4flash", sliding_window=4), "MSMSFs"),
        (
            read(
                "nemotron-nas",
                {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 64},
                block_configs=[
                    {"attention": {"n_heads_in_group": 4}},
                    {"attention": {"no_op": True}},
                    {"attention": {"replace_with_linear": True}},
                ],
            ),
            "F--",
        ),
        (read("deepseek_v3", num_key_value_heads=8), "AAAAAA"),
        (
            geometry_from_config(
                {
                    "model_type": "mllama",
                    "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
                    "text_config": {"model_type": "mllama_text_model", **GROUPED, "cross_attention_layers": [1, 4]},
                }
            ),
            "FXFFXF",
        ),
    ],
)
def test_which_layers_are_what(found: Geometry, expected: str) -> None:
    assert kinds(found) == expected


def test_one_image_of_llama_vision_in_all_its_tiles() -> None:
    """Llama 3.2 Vision: 1,601 patches of each of 4 tiles."""
    text = {"model_type": "mllama_text_model", **GROUPED, "cross_attention_layers": [1]}
    raw = {
        "model_type": "mllama",
        "text_config": text,
        "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
    }
    assert geometry_from_config(raw).cross_tokens == 6404
    assert geometry_from_config(raw, cross_tokens=100).cross_tokens == 100
    with pytest.raises(ConfigError, match="no vision_config says how many"):
        geometry_from_config(text)
    with pytest.raises(ConfigError, match="'llama' has no cross-attention layers"):
        geometry_from_config({"model_type": "llama", **GROUPED}, cross_tokens=3)


def test_mimos_windows_count_the_current_token() -> None:
    """sliding_window_size is the tokens before the current one; transformers' sliding_window has it included."""
    keys = {"head_dim": 12, "v_head_dim": 8, "swa_num_key_value_heads": 4}
    raw = read("mimo_v2_flash", hybrid_layer_pattern=[0, 1, 1, 1, 1, 1], sliding_window=128, sliding_window_size=128, **keys)
    saved = read("mimo_v2_flash", sliding_window=129, **keys)
    assert {layer.window for layer in raw.layers} == {layer.window for layer in saved.layers} == {None, 129}
    assert raw.layers[1] == Layer(Kind.SLIDING, 4, 12, 8, 129)


def test_the_sparse_attention_of_deepseek_keeps_keys_for_its_indexer() -> None:
    """DeepSeek-V3.2: 128 fp8 elements and one float32 scale a token; GLM-5 lets layers share an indexer."""
    assert {layer.index_bytes for layer in read("deepseek_v32").layers} == {132}
    shared = read("glm_moe_dsa", index_topk_pattern="FSSFSS")
    assert [layer.index_bytes for layer in shared.layers] == [132, 0, 0, 132, 0, 0]


def test_mimo_saved_by_transformers_doubles_the_heads_of_windowed_layers() -> None:
    found = read("mimo_v2_flash", head_dim=12, v_head_dim=8)
    assert kinds(found) == "FSSSSF"
    assert [layer.kv_heads for layer in found.layers[:2]] == [2, 4]


def test_the_last_layer_of_gemma4_is_full() -> None:
    assert kinds(read("gemma4_text", num_hidden_layers=8, sliding_window=4)) == "SSSSSFSF"


def test_searched_layers_have_their_own_group_size() -> None:
    """8 query heads in groups of 4 and of 1 are 2 and 8 key-value heads."""
    raw = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}
    found = read("nemotron-nas", raw, block_configs=[{"attention": {"n_heads_in_group": size}} for size in (4, 1)])
    assert [layer.kv_heads for layer in found.layers] == [2, 8]


@pytest.mark.parametrize(
    ("found", "expected"),
    [  # elements and bytes of an element, by hand from the papers' shapes
        # Qwen3-Next: 16 key and 32 value heads of 128; a convolution of 4 over q, k and v; a 128 x 128 matrix a value head
        (read("qwen3_next"), {(4 * (2 * 16 + 32) * 128, None), (32 * 128 * 128, 4)}),
        # Kimi Linear: 32 heads of 128, three convolutions of 4
        (read("kimi_linear"), {(4 * 3 * 32 * 128, None), (32 * 128 * 128, 4)}),
        # MiniMax-Text-01: a 128 x 128 matrix for each of 64 heads
        (
            read("minimax_text_01", num_attention_heads=64, head_dim=128, attn_type_list=[0] * 5 + [1]),
            {(64 * 128 * 128, 4)},
        ),
        # Jamba: 8,192 inner channels, a convolution of 4 and 16 states each
        (read("jamba", hidden_size=4096), {(8192 * 4, None), (8192 * 16, 4)}),
        # Phi-4-mini-flash: 5,120 channels, states in the model's dtype
        (read("phi4flash", hidden_size=2560), {(5120 * 4, None), (5120 * 16, None)}),
        # Nemotron-H-8B: 128 heads of 64, 8 groups of 128 states, a convolution of 4 over x, B and C
        (read("nemotron_h", hybrid_override_pattern="MMM*--"), {(4 * (128 * 64 + 2 * 8 * 128), None), (128 * 64 * 128, 4)}),
        (
            read("nemotron_h", hybrid_override_pattern="MMM*--", mamba_ssm_cache_dtype="bfloat16"),
            {(4 * (128 * 64 + 2 * 8 * 128), None), (128 * 64 * 128, 2)},
        ),
        # Granite 4: 128 heads of 64, one group of 256 states
        (read("granitemoehybrid", hidden_size=4096), {(4 * (128 * 64 + 2 * 256), None), (128 * 64 * 256, 4)}),
        # LFM2: a convolution of 3 over the width
        (read("lfm2", full_attn_idxs=[1]), {(64 * 3, None)}),
    ],
)
def test_states(found: Geometry, expected: set[tuple[int, int | None]]) -> None:
    layer = next(layer for layer in found.layers if layer.state)
    totals: dict[int | None, list[int]] = {}
    for part in layer.state:
        totals.setdefault(part.itemsize, []).append(part.heads * part.per_head)
    if found.model_type in ("phi4flash",):  # both parts have the model's dtype
        assert {(part.heads * part.per_head, part.itemsize) for part in layer.state} == expected
    else:
        assert {(sum(sizes), itemsize) for itemsize, sizes in totals.items()} == expected


def test_deepseek_without_mla() -> None:
    """DeepSeek-VL2-Tiny's and DeepSeek-OCR's language parts: the family's name, and plain attention."""
    off = {
        "use_mla": False,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
    }
    raw = {"num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10, "hidden_size": 1280}
    assert read("deepseek_v2", raw, **off).layers == (Layer(Kind.FULL, 10, 128, 128),) * 12


def test_mamba_keys_mean_nothing_without_mamba_layers() -> None:
    found = read("granitemoehybrid", layer_types=["attention"] * 6, mamba_n_heads=3, mamba_d_state=128)
    assert found.layers == (Layer(Kind.FULL, 2, 8, 8),) * 6


def test_the_length_of_training_data_is_no_contradiction() -> None:
    """Qwen-7B-Chat: 32,768 positions, trained on 8,192."""
    found = read("qwen", {**GROUPED, "num_key_value_heads": 8}, kv_channels=8, max_position_embeddings=32768, seq_length=8192)
    assert found.max_positions == 32768


def test_expanded_latents_differ_in_k_and_v() -> None:
    found = geometry_from_config({"model_type": "deepseek_v3", **GROUPED, "num_key_value_heads": 8}, expand_latent=True)
    assert set(found.layers) == {Layer(Kind.FULL, 8, 128 + 64, 128)}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "not a config.json"),
        ({"hidden_size": 64}, "no 'model_type'"),
        ({"model_type": 5}, "model_type 5 is not a name"),
        ({"model_type": "bert", **GROUPED}, "'bert' is an encoder"),
        ({"model_type": "t5", **GROUPED}, "encoder-decoder"),
        ({"model_type": "llama", "is_encoder_decoder": True, **GROUPED}, "is_encoder_decoder"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention is true"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True, **GROUPED}, "use_bidirectional_attention"),
        ({"model_type": "next_year", **GROUPED}, "unknown attention family: model_type 'next_year'"),
        ({"model_type": "llama"}, "nothing to read a size from"),
        ({"model_type": "llava", "vision_config": {"hidden_size": 1024}}, "unknown attention family: model_type 'llava'"),
        (
            {"text_config": {"model_type": "llama", **GROUPED}, "llm_config": {"model_type": "qwen2"}},
            "text_config and llm_config both",
        ),
        ({"model_type": "llama", **GROUPED, "num_attention_heads": 0}, "num_attention_heads 0 is not a whole number"),
        ({"model_type": "llama", **GROUPED, "num_attention_heads": True}, "num_attention_heads True is not a whole number"),
        ({"model_type": "llama", **GROUPED, "num_attention_heads": "8"}, "num_attention_heads '8' is not a whole number"),
        ({"model_type": "llama", **GROUPED, "num_attention_heads": None}, "no 'num_attention_heads'"),
        (
            {"model_type": "llama", **GROUPED, "num_key_value_heads": 3},
            "num_attention_heads 8 is not divisible by num_key_value_heads 3",
        ),
        ({"model_type": "llama", **GROUPED, "num_key_value_heads": 16}, "is not divisible by num_key_value_heads 16"),
        ({"model_type": "llama", **GROUPED, "hidden_size": 65}, "hidden_size 65 is not divisible by num_attention_heads 8"),
        ({"model_type": "llama", **GROUPED, "n_head": 4}, "num_attention_heads 8 and n_head 4 contradict"),
        ({"model_type": "baichuan", **GROUPED}, "num_key_value_heads 2 differs from num_attention_heads 8"),
        ({"model_type": "llama", **GROUPED, "sliding_window": 4096}, "sliding_window 4096 changes what a layer caches"),
        ({"model_type": "llama", **GROUPED, "kv_lora_rank": 512}, "kv_lora_rank 512 changes what a layer caches"),
        (
            {"model_type": "llama", **GROUPED, "layer_types": ["sliding_attention"] * 6},
            "layer_types .* unknown attention family",
        ),
        ({"model_type": "llama", **GROUPED, "torch_dtype": "int7"}, "torch_dtype 'int7'"),
        ({"model_type": "llama", **GROUPED, "torch_dtype": "float16", "dtype": "bfloat16"}, "contradict each other"),
        (
            {"model_type": "gemma2", **GROUPED, "layer_types": ["full_attention"]},
            "layer_types has 1 entries, but num_hidden_layers is 6",
        ),
        ({"model_type": "gemma2", **GROUPED, "layer_types": ["full_attention"] * 5 + ["odd"]}, r"layer_types\[5\] is 'odd'"),
        ({"model_type": "gemma2", **GROUPED, "layer_types": "full"}, "is not a list with one entry a layer"),
        ({"model_type": "gemma2", **GROUPED, "sliding_window": None}, "the file gives no sliding_window"),
        ({"model_type": "qwen2", **GROUPED, "layer_types": ["sliding_attention"] * 6}, "use_sliding_window is false"),
        ({"model_type": "gpt_neo", "num_layers": 3, "num_heads": 8, "hidden_size": 64}, "attention_types spells out 24 layers"),
        (
            {"model_type": "gpt_neo", "num_layers": 3, "num_heads": 8, "hidden_size": 64, "attention_types": [3]},
            "not a list of",
        ),
        (
            {"model_type": "mpt", "n_layers": 3, "n_heads": 4, "d_model": 48, "attn_config": {"attn_type": "odd"}},
            "attn_type 'odd'",
        ),
        (
            {"model_type": "mpt", "n_layers": 3, "n_heads": 4, "d_model": 48, "attn_config": {"sliding_window_size": 7}},
            "window_size 7",
        ),
        ({"model_type": "mpt", "n_layers": 3, "n_heads": 4, "d_model": 48, "attn_config": 5}, "attn_config 5 is not an object"),
        ({"model_type": "RefinedWebModel", "n_layer": 3, "n_head": 4, "hidden_size": 48}, "without multi_query"),
        (
            {
                "model_type": "dbrx",
                "n_layers": 3,
                "n_heads": 4,
                "d_model": 48,
                "attn_config": {"kv_n_heads": 2},
                "num_key_value_heads": 4,
            },
            "kv_n_heads 2 and num_key_value_heads 4 contradict",
        ),
        (
            {"model_type": "nemotron-nas", "num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 64},
            "no 'block_configs'",
        ),
        (
            {
                "model_type": "nemotron-nas",
                "num_hidden_layers": 1,
                "num_attention_heads": 8,
                "hidden_size": 64,
                "block_configs": [{"attention": {"n_heads_in_group": 3}}],
            },
            r"block_configs\[0\].attention.n_heads_in_group 3",
        ),
        (
            {
                "model_type": "nemotron-nas",
                "num_hidden_layers": 1,
                "num_attention_heads": 8,
                "hidden_size": 64,
                "block_configs": [{"attention": {"n_heads_in_group": 2, "window_length": 8}}],
            },
            "window_length 8 is not supported",
        ),
        (
            {
                "model_type": "nemotron-nas",
                "num_hidden_layers": 1,
                "num_attention_heads": 8,
                "hidden_size": 64,
                "block_configs": [{}],
            },
            r"block_configs\[0\].attention is missing",
        ),
        ({"model_type": "nemotron_h", **GROUPED}, "neither 'hybrid_override_pattern'"),
        ({"model_type": "nemotron_h", **GROUPED, "hybrid_override_pattern": "M*"}, "num_hidden_layers 6 contradicts"),
        ({"model_type": "nemotron_h", **GROUPED, "hybrid_override_pattern": "M*?M*-"}, r"hybrid_override_pattern\[2\] is '\?'"),
        ({"model_type": "minimax_text_01", **GROUPED}, "no 'attn_type_list'"),
        (
            {"model_type": "minimax_m2", **GROUPED, "attn_type_list": [1, 1, 1, 1, 1, 0]},
            "attn_type_list has layers that are not full",
        ),
        (
            {"model_type": "kimi_linear", **GROUPED, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [3]}},
            "do not name each of 6 layers once",
        ),
        ({"model_type": "deepseek_v32", **GROUPED, "use_mla": False}, "use_mla is false"),
        ({"model_type": "jamba", **GROUPED, "attn_layer_period": 2, "attn_layer_offset": 2}, "no layer would attend"),
        ({"model_type": "gemma3n_text", **GROUPED, "num_kv_shared_layers": 6}, "leaves no layer"),
        ({"model_type": "gemma3n_text", **GROUPED, "num_kv_shared_layers": 2}, "no earlier layer has a full_attention cache"),
        ({"model_type": "granitemoehybrid", **GROUPED, "mamba_n_heads": 3}, "do not make its inner width"),
        ({"model_type": "phi4flash", **GROUPED, "mb_per_layer": 3}, "mb_per_layer 3 is not 2"),
        ({"model_type": "gemma4_text", **GROUPED, "per_layer_config": {"5": {"odd": 1}}}, "per_layer_config '5'"),
    ],
)
def test_what_would_be_a_guess_is_refused_by_name(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        geometry_from_config(raw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", sorted(set(SHAPING) - set(SPELLINGS["head_dim"])))
def test_a_plain_family_refuses_every_key_that_shapes_caches(key: str) -> None:
    with pytest.raises(ConfigError):
        geometry_from_config({"model_type": "llama", **GROUPED, key: 7})


@pytest.mark.parametrize("nothing", [None, False, 0, "", [], {}])
def test_a_key_that_is_off_refuses_nothing(nothing: Any) -> None:
    assert kinds(read("llama", use_sliding_window=nothing, layer_types=nothing, index_topk=nothing)) == "FFFFFF"


def test_a_class_default_is_named_in_the_notes() -> None:
    """LLaVA-1.5 says of its text part only that it is a Llama."""
    found = geometry_from_config({"model_type": "llava", "text_config": {"model_type": "llama", "torch_dtype": "float16"}})
    assert found.layers == (Layer(Kind.FULL, 32, 128, 128),) * 32
    assert "num_hidden_layers is not in the file: 32 is the default of LlamaConfig" in found.notes


def test_the_innermost_dtype_counts() -> None:
    inner = {"model_type": "llama", **GROUPED}
    three = {"torch_dtype": "float32", "thinker_config": {"torch_dtype": "float16", "text_config": inner}}
    assert geometry_from_config(three).dtype == "float16"
    inner["dtype"] = "bfloat16"
    assert geometry_from_config(three).dtype == "bfloat16"


def test_a_nested_part_without_a_family_takes_the_one_around_it() -> None:
    inner = {**GROUPED, "sliding_window": 4, "head_dim": 12}
    assert kinds(geometry_from_config({"model_type": "gemma3", "text_config": inner})) == "SSSSSF"
    with pytest.raises(ConfigError, match="unknown attention family"):
        geometry_from_config({"model_type": "some_vlm", "text_config": inner})


@given(
    st.sampled_from(sorted(READERS)),
    st.sampled_from(["layers", "heads", "width"]),
    st.sampled_from([0, -1, 1.5, "6", [], LIMITS["width"] + 1]),
)
def test_no_family_reads_an_absurd_number(model_type: str, name: str, value: Any) -> None:
    """Whatever the family calls it: a ConfigError, and no other exception. A width may go unread beside a head_dim."""
    raw = {"model_type": model_type, **GROUPED, "n_layer": 6}
    for key in SPELLINGS[name]:
        raw[key] = value
    try:
        found = geometry_from_config(raw)
    except ConfigError:
        return
    assert name == "width"
    assert found.layers


FUZZED = [*SHAPING, "num_hidden_layers", "hidden_size", "no_rope_layers", "no_rope_layer_interval", "index_topk_pattern",
          "index_topk_freq", "linear_num_heads", "mamba_d_head", "mamba_n_heads", "mamba_n_groups", "mamba_d_ssm", "n_groups",
          "attn_layer_offset", "conv_kernel", "mamba_ssm_cache_dtype", "linear_key_head_dim", "torch_dtype", "text_config",
          "max_position_embeddings", "swa_num_attention_heads", "quantization_config"]  # fmt: skip
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=7),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "mamba", "odd"]), min_size=6, max_size=6),
    st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=2),
)


@given(st.sampled_from(sorted(READERS)), st.dictionaries(st.sampled_from(FUZZED), VALUES))
def test_any_file_is_read_or_refused(model_type: str, keys: dict[str, Any]) -> None:
    """Nothing but a ConfigError comes out of a bad file, and no layer has half a shape."""
    try:
        found = geometry_from_config({"model_type": model_type, **GROUPED, **keys})
    except ConfigError:
        return
    for layer in found.layers:
        assert (layer.kv_heads > 0) == (layer.head_dim_k > 0)
        assert layer.window is None or layer.window > 0
        assert all(part.heads > 0 and part.per_head > 0 for part in layer.state)
