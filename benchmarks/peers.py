"""Our weights in other people's models."""

from typing import Any

import numpy as np

from nanokv.models.gpt2 import GPT2Params


def torch_gpt2(params: GPT2Params) -> Any:
    """transformers' GPT2LMHeadModel with our weights, in evaluation mode and our precision."""
    import torch
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    config = params.config
    model: Any = GPT2LMHeadModel(
        TheirConfig(
            vocab_size=config.vocab_size, n_positions=config.num_positions, n_embd=config.width, n_layer=config.num_layers,
            n_head=config.num_heads, n_inner=config.inner, activation_function=config.activation,
            layer_norm_epsilon=config.layer_norm_epsilon, scale_attn_weights=config.scale_by_head_dim,
            scale_attn_by_inverse_layer_idx=config.scale_by_layer, tie_word_embeddings=config.tied_head,
        )
    )  # fmt: skip
    model.eval()
    state = {
        "wte.weight": params.wte,
        "wpe.weight": params.wpe,
        "ln_f.weight": params.ln_f_weight,
        "ln_f.bias": params.ln_f_bias,
    }
    for i, block in enumerate(params.blocks):
        state |= {
            f"h.{i}.ln_1.weight": block.ln_1_weight, f"h.{i}.ln_1.bias": block.ln_1_bias,
            f"h.{i}.attn.c_attn.weight": block.qkv_weight.T, f"h.{i}.attn.c_attn.bias": block.qkv_bias,
            f"h.{i}.attn.c_proj.weight": block.proj_weight.T, f"h.{i}.attn.c_proj.bias": block.proj_bias,
            f"h.{i}.ln_2.weight": block.ln_2_weight, f"h.{i}.ln_2.bias": block.ln_2_bias,
            f"h.{i}.mlp.c_fc.weight": block.fc_weight.T, f"h.{i}.mlp.c_fc.bias": block.fc_bias,
            f"h.{i}.mlp.c_proj.weight": block.out_weight.T, f"h.{i}.mlp.c_proj.bias": block.out_bias,
        }  # fmt: skip
    model.to(getattr(torch, str(params.wte.dtype)))
    if not config.tied_head:
        model.lm_head.load_state_dict({"weight": torch.tensor(params.head)})
    model.transformer.load_state_dict({name: torch.tensor(np.ascontiguousarray(value)) for name, value in state.items()})
    return model
