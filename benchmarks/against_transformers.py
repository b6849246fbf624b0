"""GPT-2's shape against transformers, in one run: the same random weights, the same threads, float32, batch 1.

    pip install '.[peers]'                                   # the CPU build of torch is enough
    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python -m benchmarks.against_transformers [--shape gpt2-medium] [--json]

Decode: 120 tokens after a prompt of 8. Prefill: 512 tokens, logits of the last. The contenders take turns; medians of
`--repeat` rounds. Also shown: the largest difference of the logits, and the speed-up of the cache at 512 tokens.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers import torch_gpt2
from nanokv.kv.contiguous import ContiguousCache
from nanokv.measure import blas, read_bandwidth
from nanokv.models.config import GPT2Config, known_shapes
from nanokv.models.gpt2 import GPT2Params, forward, random_params
from nanokv.numerics import EXACT, FAST, Numerics, threads

PROMPT, DECODED, PREFILL = 8, 120, 512


def new_cache(config: GPT2Config) -> ContiguousCache:
    return ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, config.num_positions)


def contenders(params: GPT2Params, tokens: np.ndarray) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """name -> (prefill, decode): decode gives the seconds of each token."""
    import torch

    torch.set_num_threads(threads())
    model = torch_gpt2(params)
    ids = torch.tensor(tokens)[None]

    def their_prefill() -> np.ndarray:
        with torch.no_grad():
            return model(ids[:, :PREFILL], use_cache=True, logits_to_keep=1).logits[0, -1].numpy()

    def their_decode() -> list[float]:
        times = []
        with torch.no_grad():
            out = model(ids[:, :PROMPT], use_cache=True)
            for i in range(PROMPT, PROMPT + DECODED):
                start = time.perf_counter()
                out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
                times.append(time.perf_counter() - start)
        return times

    def ours(numerics: Numerics) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def prefill() -> np.ndarray:
            return forward(params, tokens[:PREFILL], new_cache(params.config), rows=slice(-1, None), numerics=numerics)[0]

        def decode() -> list[float]:
            cache, times = new_cache(params.config), []
            forward(params, tokens[:PROMPT], cache, numerics=numerics)
            for i in range(PROMPT, PROMPT + DECODED):
                start = time.perf_counter()
                forward(params, tokens[i : i + 1], cache, numerics=numerics)
                times.append(time.perf_counter() - start)
            return times

        return prefill, decode

    return {"transformers": (their_prefill, their_decode), "exact": ours(EXACT), "fast": ours(FAST)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="gpt2", choices=sorted(known_shapes()))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = known_shapes()[args.shape]
    params = random_params(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, PREFILL + 1)
    names = contenders(params, tokens)
    bandwidth = read_bandwidth()
    logits = {name: prefill() for name, (prefill, _) in names.items()}
    prefill_s: dict[str, list[float]] = {name: [] for name in names}
    decode_s: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.repeat):
        for name, (prefill, decode) in names.items():
            start = time.perf_counter()
            prefill()
            prefill_s[name].append(time.perf_counter() - start)
            decode_s[name].append(statistics.median(decode()))
        bandwidth = max(bandwidth, read_bandwidth(allocations=1))
    cache = new_cache(config)
    forward(params, tokens[:PREFILL], cache)
    start = time.perf_counter()
    forward(params, tokens[PREFILL:], cache)
    cached = time.perf_counter() - start
    moved = sum(a.nbytes for block in params.blocks for a in vars(block).values()) + params.head.nbytes
    moved += 2 * config.num_layers * config.width * 4 * (PROMPT + DECODED // 2)
    kernels, blas_threads = blas()
    result = {
        "shape": args.shape, "threads": blas_threads, "blas": kernels, "read_gb_per_s": bandwidth / 1e9,
        "openblas_variables": [name for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ],
        "prefill_512_s": {name: statistics.median(times) for name, times in prefill_s.items()},
        "decode_ms": {name: statistics.median(times) * 1e3 for name, times in decode_s.items()},
        "max_logit_difference": {n: float(np.abs(logits[n] - logits["transformers"]).max()) for n in ("exact", "fast")},
        "uncached_to_cached_at_512": statistics.median(prefill_s["exact"]) / cached,
    }  # fmt: skip
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.shape}, float32, batch 1, {blas_threads} threads, {kernels}, reads {bandwidth / 1e9:.1f} GB/s")
    for name in names:
        prefill, decode = result["prefill_512_s"][name], result["decode_ms"][name]
        print(
            f"{name:13} prefill {prefill:6.3f} s ({prefill / result['prefill_512_s']['transformers']:.2f})   "
            f"decode {decode:6.2f} ms ({decode / result['decode_ms']['transformers']:.2f})   "
            f"{moved / decode / 1e6:5.1f} GB/s, {moved / decode * 1e3 / bandwidth:.0%} of the read bandwidth"
        )
    print(f"largest difference of the logits: {result['max_logit_difference']}")
    print(f"one more token after 512, recomputed / cached: {result['uncached_to_cached_at_512']:.0f}")


if __name__ == "__main__":
    main()
