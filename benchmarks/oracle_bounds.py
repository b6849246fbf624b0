"""How far real kernels are from exact attention, in units of the bound that docs/oracle.md derives.

    python -m benchmarks.oracle_bounds --cases 10000

Random cases: lengths to 1024, head widths 8 to 128, MHA, GQA and MQA, half of them with the oracle's planted values and half
with normal ones, some with windows and other scales. An error above 1 would be a bound that does not hold; the bound is sharp
where the largest error is a large part of it.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from nanokv.attention import cached_attention
from nanokv.backend import NUMPY
from nanokv.kv.codec import CODECS, Codec, get_codec
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedCache, PagedPool
from nanokv.kv.tile import CAUSAL, TILE, Visibility
from nanokv.numerics import COMPILED, EXACT, FAST, Numerics
from nanokv.oracle.case import Call, Case
from nanokv.oracle.formats import rounded
from nanokv.oracle.judge import exceeds
from nanokv.oracle.kernels import nanokv_attend, torch_sdpa
from nanokv.oracle.layouts import unpack
from nanokv.oracle.spec import PAGED, Spec
from nanokv.oracle.values import Values

LAYOUTS = ("contiguous", *PAGED)
HEADS = ((1, 1), (2, 2), (4, 2), (6, 3), (3, 1), (8, 2))
BUCKETS = (8, 64, 1024)


class Run(NamedTuple):
    """`trial` draws a case and gives what the kernel made of it [R, Hq, D]."""

    name: str
    dtype: str
    stored: str
    trial: Callable[[np.random.Generator], tuple[Case, np.ndarray]]


def of_calls(name: str, kernel: Callable[[Call], np.ndarray], dtype: str, kv_dtype: str | None = None) -> Run:
    """A kernel on the oracle's arrays."""

    def trial(rng: np.random.Generator) -> tuple[Case, np.ndarray]:
        spec = random_spec(rng, dtype, kv_dtype)
        case = Case(spec) if spec.scaled or rng.random() < 0.5 else Case(spec, values=_normal(rng, spec))
        return case, unpack(spec, kernel(case.call()))

    return Run(name, dtype, kv_dtype or dtype, trial)


def of_caches(numerics: Numerics, codec_name: str) -> Run:
    """nanokv's attention on its own caches, paged and not: exact is what is exact of the K and V that they hold."""
    codec = get_codec(codec_name, np.float32, NUMPY)

    def trial(rng: np.random.Generator) -> tuple[Case, np.ndarray]:
        spec = replace(random_spec(rng, "float32", None), layout="contiguous")
        raw = Case(spec).values if rng.random() < 0.5 else _normal(rng, spec)
        held, outs = [], []
        for q, k, v, *_ in raw:
            q = q[-(1 + (len(k) - 1) % TILE) :]  # rows of one tile: what they read of int4's is the same
            held.append(Values(q, *_held(_new_cache(rng, codec, spec, CAUSAL), codec, k, v), None, None))
            cache = _new_cache(rng, codec, spec, Visibility(spec.window) if spec.window else CAUSAL)
            before = len(k) - len(q)
            _store(cache, k[:before], v[:before])
            outs.append(cached_attention(q, k[before:], v[before:], cache.extend(len(q)), cache, 0, spec.scale, numerics))
        lengths = tuple((len(each.q), len(each.k_codes)) for each in held)
        return Case(replace(spec, lengths=lengths), values=held), np.concatenate(outs)

    return Run(f"nanokv {numerics}, its caches", "float32", codec_name, trial)


RUNS = (
    *(of_calls("torch SDPA", torch_sdpa, dtype) for dtype in ("float32", "bfloat16", "float16")),
    *(of_calls("nanokv exact", nanokv_attend, dtype) for dtype in ("float64", "float32", "float16", "bfloat16")),
    *(of_calls("nanokv exact", nanokv_attend, "float32", kv) for kv in ("float16", "bfloat16", "int8", "fp8")),
    *(of_calls("nanokv exact", nanokv_attend, "bfloat16", kv) for kv in ("int8", "fp8")),
    *(of_calls("nanokv fast", partial(nanokv_attend, numerics=FAST), dtype) for dtype in ("float64", "float32")),
    of_calls("nanokv compiled", partial(nanokv_attend, numerics=COMPILED), "float32"),
    *(of_caches(numerics, codec) for numerics in (EXACT, COMPILED) for codec in CODECS),
)


def random_spec(rng: np.random.Generator, dtype: str, kv_dtype: str | None) -> Spec:
    lengths = []
    for _ in range(int(rng.integers(1, 4))):
        kv = int(2 ** rng.uniform(0, 10))
        lengths.append((int(rng.integers(1, min(kv, 8) + 1)), kv))
    heads, kv_heads = HEADS[int(rng.integers(len(HEADS)))]
    window = int(rng.integers(1, 100)) if rng.random() < 0.2 else None
    return Spec(
        lengths=tuple(lengths), layout=LAYOUTS[int(rng.integers(len(LAYOUTS)))], dtype=dtype, kv_dtype=kv_dtype,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=int(2 ** rng.integers(3, 8)), window=window,
        scale=float(rng.uniform(0.05, 0.5)) if rng.random() < 0.2 else None, seed=int(rng.integers(1 << 30)),
    )  # fmt: skip


def _normal(rng: np.random.Generator, spec: Spec) -> list[Values]:
    def draw(tokens: int, heads: int, name: str) -> np.ndarray:
        return rounded(rng.standard_normal((tokens, heads, spec.head_dim)), name)

    found = []
    for q, kv in spec.lengths:
        k, v = (draw(kv, spec.num_kv_heads, spec.stored) for _ in range(2))
        found.append(Values(draw(q, spec.num_heads, spec.dtype), k, v, None, None))
    return found


def _new_cache(rng: np.random.Generator, codec: Codec, spec: Spec, visibility: Visibility) -> ContiguousCache | PagedCache:
    shape = 1, spec.num_kv_heads, spec.head_dim
    if rng.random() < 0.5:
        return ContiguousCache(*shape, 1024, codec=codec, visibility=visibility)
    size = int(2 ** rng.integers(5 if codec.own_tile else 0, 8))  # int4 works on groups of 32 tokens
    return PagedPool(*shape, 1 + -(-1024 // size), size, codec=codec, visibility=visibility).new_sequence()


def _store(cache: ContiguousCache | PagedCache, k: np.ndarray, v: np.ndarray) -> None:
    for at in range(0, len(k), TILE):  # as much as a windowed cache takes at once
        part = slice(at, at + TILE)
        cache.extend(len(k[part]))
        cache.write(0, k[part], v[part])
        cache.commit()


def _held(cache: ContiguousCache | PagedCache, codec: Codec, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the last token reads of k and v [S, Hkv, D] from a cache, as its codec gives them back; its own tile as it is, where
    a codec leaves that in full precision."""
    stored = (len(k) - 1) // TILE * TILE if codec.own_tile else len(k)
    _store(cache, k[:stored], v[:stored])
    tiles = sorted(cache.tiles(0, (len(k) - 1) // TILE), key=lambda each: each.first)
    planes = (
        np.concatenate([x.reshape(-1, *k.shape[1:]) for x in each]) for each in zip(*((t.k, t.v) for t in tiles), strict=True)
    )
    k_held, v_held = (np.concatenate([x[:stored], raw[stored:]]) for x, raw in zip(planes, (k, v), strict=True))
    return k_held, v_held


def measure(run: Run, cases: int, seed: int) -> dict[int, float]:
    """The largest error in bounds, by the number of keys up to which a row sees."""
    rng, worst = np.random.default_rng(seed), dict.fromkeys(BUCKETS, 0.0)
    for _ in range(cases):
        case, out = run.trial(rng)
        ratio = exceeds(out.astype(np.float64), case.expected.out, case.expected.bound).max(axis=(1, 2))
        positions = np.concatenate([problem.positions for problem in case.problems])
        for row, position in zip(ratio, positions, strict=True):
            seen = min(int(position) + 1, case.spec.window or 1 << 30)
            bucket = next(edge for edge in BUCKETS if seen <= edge)
            worst[bucket] = max(worst[bucket], float(row))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Runs whose name begins so.")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print("| kernel | dtype | K and V | cases | largest error in bounds | bound over largest error | by keys: " +
          ", ".join(f"to {edge}" for edge in BUCKETS) + " |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for run in RUNS:
        if run.name.startswith(options.only):
            worst = measure(run, options.cases, options.seed)
            most = max(worst.values())
            each = ", ".join(f"{value:.3f}" for value in worst.values())
            cells = (run.name, run.dtype, run.stored, options.cases, f"{most:.3f}", f"{1 / most:.1f}", each)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
