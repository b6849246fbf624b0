"""torch's scaled_dot_product_attention on transformers' layout, in bfloat16: `python examples/oracle/torch_sdpa.py`.

The arrays come as torch tensors (convert=oracle.to_torch), padded on the left, with an attention mask; rows of padding may
hold anything.
"""

import torch

from nanokv import oracle


def sdpa(call):
    keys, rows = call.k.shape[2], call.q.shape[2]
    position = torch.arange(keys)
    causal = position[None, :] <= torch.arange(keys - rows, keys)[:, None]  # bottom-right
    mask = causal & call.attention_mask.bool()[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(
        call.q, call.k, call.v, attn_mask=mask, scale=call.scale, enable_gqa=True
    )
    return torch.where(mask.any(-1, keepdim=True), out, 0)  # a row that sees nothing is 0


if __name__ == "__main__":
    print(oracle.check(sdpa, layout="hf", dtype="bfloat16", convert=oracle.to_torch))
