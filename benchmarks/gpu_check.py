"""One look at a GPU: does the runtime on CuPy agree with NumPy, and how fast is it? Under four minutes on one card.

    python -m benchmarks.gpu_check [--out FILE.json]

Exact: the CUDA kernels give the CPU's bits (the committed digests of the shipped model's logits, small models in every
cache and weight format); decode and prefill of GPT-2 124M's shape, and paged attention at 1k to 128k keys, beside the
bytes that they move (gpu_exact.py). Fast: logits on CuPy against NumPy's in float32 and float64, cached against
uncached on the card, within the bound of docs/numerics.md; greedy text of the shipped model on both; GPT-2 124M's shape
with random weights, prefill of 512 tokens and decode at batch 1, timed by events, medians after a warm-up. Exit code 1
when a check fails.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import nanokv
from benchmarks import gpu_exact
from nanokv.backend import NUMPY, Backend, get_backend, to_numpy
from nanokv.kv.contiguous import ContiguousCache
from nanokv.models.config import GPT2Config, known_shapes
from nanokv.models.gpt2 import GPT2Params, fast_bound, forward, hidden_states, random_params
from nanokv.numerics import FAST


def cache_for(config: GPT2Config, dtype: Any, backend: Backend) -> ContiguousCache:
    return ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, config.num_positions, dtype, backend)


def agreement(gpu: Backend) -> list[dict[str, Any]]:
    """Worst share of the bound that a difference used, for each shape and dtype; above 1 it is wrong."""
    rows = []
    for heads, kv_heads, dim in ((4, 4, 16), (8, 2, 16), (6, 1, 32), (12, 12, 64)):
        for dtype in (np.float32, np.float64):
            config = GPT2Config(500, 320, heads * dim, 2, heads, kv_heads, 4 * heads * dim)
            params = random_params(config, dtype=dtype, scale=0.1)
            on_card = params.to(gpu)
            tokens = np.random.default_rng(0).integers(0, 500, 300)
            host = cache_for(config, dtype, NUMPY)
            hidden = hidden_states(params, tokens, host, numerics=FAST)
            bound = fast_bound(params, hidden)
            expected = forward(params, tokens, cache_for(config, dtype, NUMPY), numerics=FAST)
            whole = to_numpy(forward(on_card, tokens, cache_for(config, dtype, gpu), numerics=FAST))
            pieces, cache = [], cache_for(config, dtype, gpu)
            for start, stop in ((0, 130), (130, 131), (131, 290), (290, 300)):
                pieces.append(to_numpy(forward(on_card, tokens[start:stop], cache, numerics=FAST)))
            rows.append({
                "heads": f"{heads}/{kv_heads}", "head_dim": dim, "dtype": np.dtype(dtype).name,
                "card_to_host": float((np.abs(whole - expected) / bound).max()),
                "cached_to_whole": float((np.abs(np.concatenate(pieces) - whole) / bound).max()),
                "max_difference": float(np.abs(whole - expected).max()),
            })  # fmt: skip
    return rows


def milliseconds(gpu: Backend, call: Callable[[], Any], repeat: int) -> float:
    """Median time between two events on the card around a call, after three calls to warm up."""
    events = gpu.xp.cuda.Event
    for _ in range(3):
        call()
    times = []
    for _ in range(repeat):
        start, stop = events(), events()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(float(gpu.xp.cuda.get_elapsed_time(start, stop)))
    return statistics.median(times)


def speed(gpu: Backend, params: GPT2Params) -> dict[str, float]:
    config = params.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 512)
    cache = cache_for(config, np.float32, gpu)
    last = slice(-1, None)

    def prefill() -> None:
        cache.reset()
        forward(params, tokens, cache, rows=last, numerics=FAST)

    def decode() -> None:
        forward(params, tokens[:1], cache, rows=last, numerics=FAST)
        cache.truncate(128)

    out = {"prefill_512_ms": milliseconds(gpu, prefill, 10)}
    cache.truncate(128)
    out["decode_ms"] = milliseconds(gpu, decode, 50)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Agreement and speed of the runtime on one GPU.")
    parser.add_argument("--out", type=Path, help="write the results here as JSON, too")
    args = parser.parse_args()
    gpu = get_backend("cupy")
    device = gpu.xp.cuda.runtime.getDeviceProperties(0)
    rows = agreement(gpu)
    models = [nanokv.load("default", backend=name, numerics="fast") for name in ("numpy", "cupy")]
    texts = [model.generate("Hello, how", max_tokens=40).text for model in models]
    result = {
        "card": device["name"].decode(), "date": date.today().isoformat(), "cupy": gpu.xp.__version__, "agreement": rows,
        "same_greedy_text": texts[0] == texts[1], **speed(gpu, random_params(known_shapes()["gpt2"]).to(gpu)),
        "exact": gpu_exact.check(gpu, lambda call, repeat: milliseconds(gpu, call, repeat)),
    }  # fmt: skip
    table = Table("heads", "width", "dtype", "card / host", "cached / whole", title=f"{result['card']}, {result['date']}")
    for row in rows:
        shares = (f"{row[name]:.4f} of the bound" for name in ("card_to_host", "cached_to_whole"))
        table.add_row(row["heads"], str(row["head_dim"]), row["dtype"], *shares)
    console = Console()
    console.print(table)
    console.print(f"greedy text on both equal: {result['same_greedy_text']}")
    console.print(f"GPT-2 124M: prefill of 512 {result['prefill_512_ms']:.2f} ms, decode {result['decode_ms']:.3f} ms a token")
    exact = result["exact"]
    console.print(f"exact: bits are the CPU's: {gpu_exact.passed(exact)}; compute-sanitizer: {exact['compute_sanitizer']}")
    for name in ("decode", "prefill", "paged_attention", "choices"):
        found = exact[name]
        for row in found if isinstance(found, list) else [found]:
            cells = (f"{key} {value:,.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
            console.print(f"  {name}: {', '.join(cells)}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    worst = max(max(row["card_to_host"], row["cached_to_whole"]) for row in rows)
    sys.exit(0 if worst <= 1 and result["same_greedy_text"] and gpu_exact.passed(exact) else 1)


if __name__ == "__main__":
    main()
