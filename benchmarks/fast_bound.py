"""How far fast logits really are from exact ones, beside the bound that docs/numerics.md derives.

    python -m benchmarks.fast_bound

Random weights of GPT-2's shapes cut to a few layers, float32, 200 tokens in one piece.
"""

import numpy as np

from nanokv.kv.contiguous import ContiguousCache
from nanokv.models.config import GPT2Config
from nanokv.models.gpt2 import fast_bound, forward, hidden_states, random_params, unembed
from nanokv.numerics import FAST


def main() -> None:
    print("layers width     largest |fast - exact|        bound    ratio")
    for layers, heads, dim in ((2, 6, 32), (6, 6, 32), (2, 12, 64), (12, 12, 64), (4, 16, 64)):
        config = GPT2Config(1000, 512, heads * dim, layers, heads, heads, 4 * heads * dim)
        for scale in (0.02, 0.1):
            params = random_params(config, scale=scale)
            tokens = np.random.default_rng(0).integers(0, 1000, 200)

            def cache(config: GPT2Config = config) -> ContiguousCache:
                return ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, 200)

            hidden = hidden_states(params, tokens, cache())
            bound = fast_bound(params, hidden)
            difference = np.abs(forward(params, tokens, cache(), numerics=FAST) - unembed(params, hidden))
            print(
                f"{layers:6} {heads * dim:5} {scale:5} {difference.max():16.2e} {bound.max():12.2e} "
                f"{(difference / bound).max():8.5f}"
            )


if __name__ == "__main__":
    main()
