"""A kernel's test suite in a dozen lines: copy, put your own kernel in, run pytest.

`my_kernel` reads vLLM's paged layout: q [tokens, heads, head_dim], k_cache and v_cache [blocks, block_size, kv_heads,
head_dim], block_tables [sequences, blocks], seq_lens and query_start_loc.
"""

import numpy as np
from hypothesis import given, settings

from nanokv import oracle


def my_kernel(call):
    out = np.zeros_like(call.q)
    for i, length in enumerate(call.seq_lens):
        blocks = call.block_tables[i, : -(-length // call.block_size)]
        k, v = (cache[blocks].reshape(-1, *cache.shape[2:])[:length] for cache in (call.k_cache, call.v_cache))
        k, v = (np.repeat(x, call.num_heads // call.num_kv_heads, axis=1) for x in (k, v))
        start, stop = call.query_start_loc[i : i + 2]
        for row in range(start, stop):
            seen = max(0, length - (stop - start) + (row - start) + 1)
            if seen:
                scores = np.einsum("hd,shd->hs", call.q[row], k[:seen]) * np.float32(call.scale)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[row] = np.einsum("hs,shd->hd", weights, v[:seen]) / weights.sum(axis=1, keepdims=True)
    return out


def test_the_fixed_suite():
    report = oracle.check(my_kernel, layout="vllm", dtype="float32")
    assert report.passed, str(report)


@settings(max_examples=25, deadline=None)
@given(oracle.attention_cases(layouts=["vllm"], max_tokens=64))
def test_whatever_hypothesis_finds(case):
    verdict = oracle.judge(case, my_kernel(case.call()))
    assert verdict.passed, str(verdict)
