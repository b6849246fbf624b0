"""Paged against contiguous, many sequences against one by one, a prefix hit against a cold prompt: GPT-2 124M's shape.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python -m benchmarks.caches [--batch 32] [--context 512] [--json]

Random weights, float32. Everything in one run, contenders in turn, medians. With transformers installed (the peers extra),
its batched decode step stands beside ours.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedCache
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Batch
from nanokv.measure import blas, read_bandwidth
from nanokv.model import Model
from nanokv.models.config import known_shapes
from nanokv.models.gpt2 import GPT2Params, random_params
from nanokv.numerics import EXACT, FAST, Numerics
from nanokv.tokenizer import Tokenizer

PAGED = CacheSpec("paged", block_size=16)
Caches = list[ContiguousCache] | list[PagedCache]


def contiguous(model: Model, count: int, context: int) -> list[ContiguousCache]:
    caches = [model.new_cache(context + 64) for _ in range(count)]
    return [cache for cache in caches if isinstance(cache, ContiguousCache)]


def paged(model: Model, count: int, context: int) -> list[PagedCache]:
    """Sequences of one pool that grew side by side, so that their blocks are mixed as in use."""
    pool = model.new_pool(count * ((context + 64) // PAGED.block_size + 1) + 1, PAGED)
    return [pool.new_sequence() for _ in range(count)]


def fill(model: Model, caches: Caches, tokens: np.ndarray, context: int) -> None:
    """The context of every cache: the prompt up to 64 tokens before it, the rest in steps of all sequences together."""
    for cache in caches:
        model.prefill(tokens[: context - 64].tolist(), cache)
    for start in range(context - 64, context, 16):
        batch = Batch([(cache, 16) for cache in caches])
        model.hidden_states(np.tile(tokens[start : start + 16], len(caches)), batch)


def decode(model: Model, caches: Caches, steps: int) -> float:
    """Seconds of one step of all sequences together: the median."""
    times = []
    for step in range(steps):
        start = time.perf_counter()
        model.forward(np.full(len(caches), step), Batch([(cache, 1) for cache in caches]))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def transformers_step(model: Model, count: int, context: int, tokens: np.ndarray) -> Callable[[int], float] | None:
    """The median seconds of a batched decode step of transformers, if it is installed and the model is a GPT-2."""
    if not isinstance(model.params, GPT2Params):
        return None
    try:
        import torch

        from benchmarks.peers import torch_gpt2
        from nanokv.numerics import threads
    except ImportError:
        return None
    torch.set_num_threads(threads())
    theirs = torch_gpt2(model.params)
    with torch.no_grad():
        state = theirs(torch.tensor(np.tile(tokens[:context], (count, 1))), use_cache=True, logits_to_keep=1).past_key_values

    def steps(number: int) -> float:
        times = []
        with torch.no_grad():
            for step in range(number):
                start = time.perf_counter()
                theirs(torch.full((count, 1), step), past_key_values=state, use_cache=True)
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    return steps


def prefix_hit(model: Model, tokens: np.ndarray, repeat: int) -> tuple[float, float]:
    """Seconds to the first logits of a 512-token prompt, cold and after a hit of all its blocks but the last."""
    pool = model.new_pool(4 * (512 // PAGED.block_size) + 2, PAGED)
    prompt = [int(token) for token in tokens[:512]]
    times: dict[str, list[float]] = {"cold": [], "hit": []}
    for _ in range(repeat):
        pool.blocks.reset_prefix_cache()
        for name in ("cold", "hit"):
            sequence = pool.new_sequence()
            start = time.perf_counter()
            known = sequence.adopt(prompt)
            model.prefill(prompt[known:], sequence)
            times[name].append(time.perf_counter() - start)
            sequence.publish(prompt)
            sequence.reset()
    return statistics.median(times["cold"]), statistics.median(times["hit"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    params = random_params(known_shapes()["gpt2"])
    tokens = np.random.default_rng(0).integers(0, 50257, args.context + 1)
    models = {mode: Model("gpt2", params, Tokenizer.of_bytes(), numerics=mode) for mode in (EXACT, FAST)}
    peer = transformers_step(models[EXACT], args.batch, args.context, tokens)

    sets: dict[tuple[Numerics, str, int], Caches] = {}
    for mode, model in models.items():
        for count in (1, args.batch):
            sets[mode, "contiguous", count] = contiguous(model, count, args.context)
            sets[mode, "paged", count] = paged(model, count, args.context)
    for (mode, _, _), caches in sets.items():
        fill(models[mode], caches, tokens, args.context)
    step_s: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for (mode, kind, count), caches in sets.items():
            step_s.setdefault(f"{mode} {kind} {count}", []).append(decode(models[mode], caches, args.steps))
        if peer:
            step_s.setdefault(f"transformers {args.batch}", []).append(peer(args.steps))
    medians = {name: statistics.median(times) for name, times in step_s.items()}
    hits = {str(mode): prefix_hit(model, tokens, 3) for mode, model in models.items()}
    result: dict[str, Any] = {
        "context": args.context, "batch": args.batch, "blas": blas()[0], "read_gb_per_s": read_bandwidth() / 1e9,
        "step_ms": {name: value * 1e3 for name, value in medians.items()},
        "batched_over_solo": {
            str(mode): args.batch * medians[f"{mode} paged 1"] / medians[f"{mode} paged {args.batch}"] for mode in models
        },
        "paged_over_contiguous": {
            f"{mode} {count}": medians[f"{mode} paged {count}"] / medians[f"{mode} contiguous {count}"]
            for mode in models for count in (1, args.batch)
        },
        "exact_over_fast": medians[f"exact paged {args.batch}"] / medians[f"fast paged {args.batch}"],
        "prefix_hit_over_cold": {mode: hit / cold for mode, (cold, hit) in hits.items()},
    }  # fmt: skip
    if peer:
        result["over_transformers"] = {
            str(mode): medians[f"transformers {args.batch}"] / medians[f"{mode} paged {args.batch}"] for mode in models
        }
    if args.json:
        print(json.dumps(result))
        return
    print(f"GPT-2 124M's shape, float32, context {args.context}, {result['blas']}, reads {result['read_gb_per_s']:.1f} GB/s")
    for name, value in result["step_ms"].items():
        count = int(name.split()[-1])
        print(f"{name:24} {value:8.1f} ms a step  {count / value * 1e3:8.1f} tokens/s")
    for name in ("batched_over_solo", "over_transformers", "paged_over_contiguous", "exact_over_fast", "prefix_hit_over_cold"):
        if name in result:
            print(f"{name}: {result[name]}")


if __name__ == "__main__":
    main()
