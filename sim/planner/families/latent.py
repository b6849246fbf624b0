"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one compressed vector a token and layer, shared by all heads.

What is kept is kv_lora_rank + qk_rope_head_dim elements; it serves as key and as value, so nothing is doubled. An engine
without an MLA kernel expands it into per-head keys (qk_nope + qk_rope wide) and values (v_head_dim wide), which differ.
DeepSeek-V3.2's sparse attention adds an indexer with keys of its own.
"""

from typing import Any

from nanokv.errors import ConfigError
from sim.planner.families.base import Reader, plain
from sim.planner.fields import Fields, pattern
from sim.planner.layers import Kind, Layer

INDEX_BLOCK = 128  # elements of an indexer key that share one float32 scale (DeepSeek-V3.2-Exp, inference/model.py)


def latent(f: Fields, index_bytes: int = 0) -> Layer:
    """One MLA layer: the latent vector, or its expansion where the caller asked for it."""
    if not f.flag("use_mla", True):
        raise ConfigError("use_mla is false, and the family is not known to have another attention")
    heads = f.integer("heads")
    rank, rope = f.integer("kv_lora_rank"), f.integer("qk_rope_head_dim")
    nope, value = f.integer("qk_nope_head_dim"), f.integer("v_head_dim")
    f.ignore("kv_heads", "head_dim", "q_lora_rank", "width")  # they shape queries, or repeat what is read above
    if f.expand_latent:
        return Layer(Kind.FULL, heads, nope + rope, value, None, index_bytes)
    return Layer(Kind.MLA, 1, rank + rope, 0, None, index_bytes)


LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def mla(f: Fields) -> list[Layer]:
    """Every layer MLA; or, with use_mla false as in DeepSeek-VL2-Tiny and DeepSeek-OCR, plain attention."""
    if not f.flag("use_mla", True):
        f.ignore(*LATENT_KEYS)
        return plain(f)
    return [latent(f)] * f.integer("layers")


def indexed(f: Fields) -> list[Layer]:
    """MLA with DeepSeek sparse attention: each layer that runs an indexer keeps a key for it, fp8 with float32 scales."""
    count = f.integer("layers")
    dim = f.integer("index_head_dim")
    f.ignore("index_n_heads", "index_topk")
    names = f.one_per_layer("layer_types", count)
    if names is not None:
        known = dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), Kind.MLA)
        pattern(names, known, "layer_types")
    index_bytes = dim + 4 * -(-dim // INDEX_BLOCK)
    return [latent(f, index_bytes if own else 0) for own in own_indexer(f, count)]


def own_indexer(f: Fields, count: int) -> list[bool]:
    """Which layers run their own indexer; the others reuse the choice of the layer before (GLM-5's indexer_types)."""
    names: Any = f.one_per_layer("indexer_types", count)
    if names is None and f.source != "GlmMoeDsaConfig":
        return [True] * count
    if names is None:
        spec = f.value("index_topk_pattern")
        if spec is not None:
            names = [{"F": "full", "S": "shared"}.get(c, c) for c in spec]
        else:
            period = f.integer("index_topk_freq", default=1)
            offset = f.integer("index_skip_topk_offset", default=2, least=0)
            names = ["full" if max(i - offset + 1, 0) % period == 0 else "shared" for i in range(count)]
    if len(names) != count:
        raise ConfigError(f"index_topk_pattern has {len(names)} entries, but {f.key('layers')} is {count}")
    return pattern(names, {"full": True, "shared": False}, "indexer_types")


READERS: dict[str, Reader] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "mistral4"), mla),
    "deepseek_v32": indexed,
    "glm_moe_dsa": indexed,
}
