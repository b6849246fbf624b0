"""The CUDA kernels on a card: are their bits those of the CPU, and how near do they come to what the card can do?

Used by benchmarks.gpu_check. Times are medians between two events on the card's stream; bounds are those of sim/: bytes over
bandwidth, operations over the float32 rate of the preset. A card without a preset gets bytes and operations a second alone.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import nanokv
from nanokv.backend import NUMPY, Backend, to_numpy
from nanokv.card_sampling import host_choice
from nanokv.errors import NanoKVError
from nanokv.kernels.choice import PackedMemory
from nanokv.kernels.cuda import launches, traffic
from nanokv.kernels.cuda.arrays import CardMemory, sent
from nanokv.kernels.cuda.card import Card
from nanokv.kernels.cuda.launches import Choice
from nanokv.kernels.cuda.tables import host_tables
from nanokv.kernels.layout import (
    BEGIN,
    CODEC,
    END,
    FIRST,
    FLOAT32,
    HIGH,
    KEYS,
    LAST,
    NO_LIMIT,
    NUMBER,
    RUN_COLUMNS,
    TILE_COLUMNS,
    VALUES,
)  # fmt: skip
from nanokv.kernels.matrix import FORMATS
from nanokv.kernels.softmax import softmax
from nanokv.kv.codec import get_codec
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedCache
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import TILE, Visibility
from nanokv.models.config import GPT2Config, known_shapes
from nanokv.models.decode_step import DecodeStep
from nanokv.models.gpt2 import forward, random_params
from nanokv.numerics import COMPILED
from nanokv.sampling import Sampler, SamplingParams

DIGESTS = Path(__file__).parent.parent / "tests" / "kernels" / "default_logits.json"
SPECS = (
    CacheSpec(), CacheSpec("paged", 16), CacheSpec("paged", 32, kv_dtype="int4"), CacheSpec(window=40, kv_dtype="int8"),
    CacheSpec("paged", 16, kv_dtype="bfloat16"), CacheSpec(kv_dtype="fp8"),
)  # fmt: skip
Timer = Callable[[Callable[[], Any], int], float]  # call, repeats -> milliseconds


def digests(backend: str) -> dict[str, bool]:
    """Each prompt of the committed digests: whether the shipped model's logits, prefilled and decoded, are those bits."""
    model = nanokv.load("default", backend=backend, numerics="exact", kernels="compiled")
    found = {}
    for prompt, expected in json.loads(DIGESTS.read_text(encoding="utf-8")).items():
        tokens, cache = model.encode(prompt), model.new_cache()
        parts = [to_numpy(model.forward(tokens, cache))]
        for _ in range(8):
            parts.append(to_numpy(model.forward([int(parts[-1][-1].argmax())], cache)))
        found[prompt[:30]] = hashlib.sha256(np.concatenate(parts).astype("<f4").tobytes()).hexdigest() == expected
    return found


def same_bits(gpu: Backend, forms: Sequence[str] = FORMATS, tokens: int = 300) -> list[dict[str, Any]]:
    """Small models in every cache and weight format: cached against uncached on the card, and the card against the CPU."""
    rows = []
    config = GPT2Config(500, 320, 128, 2, 8, 2, 512)
    params, ids = random_params(config, scale=0.1), np.random.default_rng(0).integers(0, 500, tokens)
    shape = config.visibility(), config.num_kv_heads, config.head_dim
    edges = [0, *(n for n in (130, 131, 290) if n < tokens), tokens]
    for form in forms:
        card, host = params.to(CardMemory("cupy", gpu.xp, form)), params.to(PackedMemory("numpy", np, form))
        for spec in SPECS:
            whole = to_numpy(forward(card, ids, new_cache(spec, shape, gpu), numerics=COMPILED))
            cache = new_cache(spec, shape, gpu)
            pieces = [to_numpy(forward(card, ids[a:b], cache, numerics=COMPILED)) for a, b in pairwise(edges)]
            expected = forward(host, ids, new_cache(spec, shape, NUMPY), numerics=COMPILED)
            rows.append({
                "weights": form, "cache": f"{spec.kind} {spec.kv_dtype or 'float32'}",
                "cached_is_uncached": bool(np.array_equal(np.concatenate(pieces), whole)),
                "card_is_cpu": bool(np.array_equal(whole, expected)),
            })  # fmt: skip
    return rows


def new_cache(spec: CacheSpec, shape: tuple[list[Visibility], int, int], backend: Backend) -> ContiguousCache | PagedCache:
    """An empty cache for 320 tokens."""
    backend = replace(backend, kernels=backend.name == "cupy")
    if spec.kind == "paged":
        return spec.pool(*shape, 320 // spec.block_size + 2, np.float32, backend).new_sequence()
    return spec.contiguous(*shape, 320, np.float32, backend)


def decode(
    gpu: Backend, timer: Timer, config: GPT2Config, batches: Sequence[int] = (1, 8, 64), context: int = 512
) -> list[dict[str, float]]:
    """One token for each of some sequences: microseconds a step, with and without a graph, beside the bytes that it moves."""
    params = random_params(config).to(CardMemory("cupy", gpu.xp))
    rows = []
    for batch in batches:
        pool = CacheSpec("paged", 16).pool(
            config.visibility(), config.num_kv_heads, config.head_dim, batch * (context // 16 + 2) + 1, np.float32,
            replace(gpu, kernels=True),
        )  # fmt: skip
        caches = [pool.new_sequence() for _ in range(batch)]
        for cache in caches:
            forward(params, np.zeros(context, np.int64), cache, rows=slice(-1, None), numerics=COMPILED)
        step = DecodeStep(params, caches[0], batch, context + 8)
        step.prepare(caches, [0] * batch)
        plain = timer(step.launch, 30) * 1e3
        step.capture()
        graph = timer(step.launch, 30) * 1e3
        heads, dim = config.num_heads, config.head_dim
        attention = sum(each.nbytes for each in traffic.decode([context + 1] * batch, heads, heads, dim, 4 * dim, 16).values())
        weights = sum(each.nbytes for block in params.blocks for each in vars(block).values()) + params.head.nbytes
        rows.append({
            "batch": batch, "us": plain, "us_graph": graph, "us_a_token": graph / batch,
            "bytes": weights + config.num_layers * attention,
        })  # fmt: skip
    return rows


def prefill(gpu: Backend, timer: Timer, config: GPT2Config, tokens: int = 512) -> dict[str, float]:
    """The logits after a prompt: milliseconds, and TFLOP/s of its products."""
    params = random_params(config).to(CardMemory("cupy", gpu.xp))
    memory, shape = replace(gpu, kernels=True), (config.visibility(), config.num_kv_heads, config.head_dim)
    cache = CacheSpec().contiguous(*shape, tokens, np.float32, memory)

    def call() -> None:
        cache.reset()
        forward(params, np.zeros(tokens, np.int64), cache, rows=slice(-1, None), numerics=COMPILED)

    matrices = sum(each.shape[0] * each.shape[1] for block in params.blocks for each in vars(block).values() if each.ndim == 2)
    flops = 2 * tokens * matrices + 4 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1) // 2
    ms = timer(call, 10)
    return {"ms": ms, "tflops": flops / ms / 1e9}


def paged_attention(
    gpu: Backend, timer: Timer, sizes: Sequence[int] = (1024, 4096, 16384, 65536, 131072)
) -> list[dict[str, float]]:
    """attend_tiles and combine_tiles for one token of a sequence, 32 query and 8 key-value heads of width 128, float32, blocks
    of 16 in random order: microseconds beside traffic.py's bytes."""
    xp, card, rows = gpu.xp, Card(gpu.xp), []
    heads, kv_heads, dim, block = 32, 8, 128, 16
    rng = np.random.default_rng(0)
    for keys in sizes:
        blocks = keys // block
        k, v = (xp.asarray(rng.standard_normal((keys * kv_heads, dim), dtype=np.float32)) for _ in range(2))
        tiles = np.zeros((keys // TILE, TILE_COLUMNS), np.int64)
        tiles[:, NUMBER] = np.arange(len(tiles))
        tiles[:, [CODEC, KEYS, VALUES, HIGH]] = FLOAT32, card.address(k), card.address(v), NO_LIMIT
        runs = np.zeros((1, RUN_COLUMNS), np.int64)
        runs[0, [BEGIN, END, FIRST, LAST]] = 0, 1, 0, len(tiles)
        units = rng.permutation(blocks).reshape(len(tiles), -1)
        tables = sent(host_tables(np.array([keys - 1]), runs, tiles, units, block, heads // kv_heads, dim), xp)
        q, out = xp.asarray(rng.standard_normal((1, heads, dim), dtype=np.float32)), xp.zeros((1, heads, dim), dtype=np.float32)
        partial = tuple(
            xp.zeros(shape, dtype=np.float32)
            for shape in ((len(tiles), 1, heads), (len(tiles), 1, heads), (len(tiles), 1, heads, dim))
        )

        def call(tables: Any = tables, q: Any = q, out: Any = out, partial: Any = partial) -> None:
            launches.attend(card, q, q, tables, kv_heads, 1.0, dim**-0.5, out, partial)

        nbytes = sum(each.nbytes for each in traffic.decode([keys], heads, kv_heads, dim, 4 * dim, block).values())
        us = timer(call, 30) * 1e3
        rows.append({"keys": keys, "us": us, "bytes": nbytes, "gb_s": nbytes / us / 1e3})
    return rows


FILTERS = {"temperature": SamplingParams(0.8), "all filters": SamplingParams(0.8, 50, 0.95, 0.01, 1.1)}


def choices(gpu: Backend, timer: Timer, vocab: int = 50257, rows: int = 8) -> list[dict[str, Any]]:
    """Softmax and sampling of some rows: whether softmax's bits are the CPU's, how many tokens are the host Sampler's (float32
    may decide a few otherwise), and microseconds a launch."""
    card, rng = Card(gpu.xp), np.random.default_rng(0)
    logits = rng.standard_normal((rows, vocab), dtype=np.float32) * np.float32(4)
    x, out, tokens = (
        gpu.xp.asarray(logits),
        gpu.xp.zeros((rows, vocab), dtype=np.float32),
        gpu.xp.zeros((rows,), dtype=np.int32),
    )
    launches.softmax(card, x, out)
    same = bool(np.array_equal(to_numpy(out), softmax(logits)))
    found: list[dict[str, Any]] = [
        {"kernel": "softmax", "same": same, "us": timer(lambda: launches.softmax(card, x, out), 30) * 1e3}
    ]
    histories = [rng.integers(0, vocab, 100).tolist() for _ in range(rows)]
    for name, params in FILTERS.items():
        uniforms = [np.random.default_rng(seed).random() for seed in range(rows)]  # what a Sampler of that seed draws first
        host = host_choice([params] * rows, histories, uniforms, vocab)
        choice = Choice(*(gpu.xp.asarray(table) for table in vars(host).values()))

        def call(choice: Choice = choice) -> None:
            launches.sample(card, x, choice, out, tokens)

        us = timer(call, 30) * 1e3
        samplers = [Sampler(replace(params, seed=seed)) for seed in range(rows)]
        expected = [each.choose(*row) for each, *row in zip(samplers, logits, histories, strict=True)]
        found.append({"kernel": name, "same": f"{int((to_numpy(tokens) == expected).sum())}/{rows}", "us": us})
    return found


def int4_writes(gpu: Backend) -> dict[str, bool]:
    """Whether keys and values in int4 are the codec's bytes."""
    x = np.random.default_rng(0).standard_normal((256, 4, 65), dtype=np.float32)
    slots = gpu.xp.asarray(np.arange(256, dtype=np.int32))
    found = {}
    for name, entries in zip(("keys", "values"), get_codec("int4", np.float32, NUMPY).encode(x, x), strict=True):
        planes = [gpu.xp.zeros(each.shape, dtype=each.dtype) for each in entries]
        launches.append_int4(Card(gpu.xp), gpu.xp.asarray(x), slots, planes, name == "keys")
        found[name] = all(np.array_equal(to_numpy(plane), each) for plane, each in zip(planes, entries, strict=True))
    return found


def sanitizer() -> str:
    """compute-sanitizer's memcheck over the small models, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "not installed"
    script = (
        "from nanokv.backend import get_backend; from benchmarks import gpu_exact as checks; gpu = get_backend('cupy'); "
        "checks.same_bits(gpu); checks.choices(gpu, lambda call, _: call() or 0.0, 3000); checks.int4_writes(gpu)"
    )
    done = subprocess.run(
        [tool, "--error-exitcode", "9", sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    return "clean" if done.returncode == 0 else (done.stdout or done.stderr).strip().splitlines()[-1]


def check(gpu: Backend, timer: Timer) -> dict[str, Any]:
    """All of it. A part that an error of nanokv's ends says so in its place."""
    found: dict[str, Any] = {}
    for name, part in (
        ("digests", lambda: digests("cupy")),
        ("same_bits", lambda: same_bits(gpu)),
        ("choices", lambda: choices(gpu, timer)),
        ("int4_writes", lambda: int4_writes(gpu)),
        ("decode", lambda: decode(gpu, timer, known_shapes()["gpt2"])),
        ("prefill", lambda: prefill(gpu, timer, known_shapes()["gpt2"])),
        ("paged_attention", lambda: paged_attention(gpu, timer)),
        ("compute_sanitizer", sanitizer),
    ):
        try:
            found[name] = part()
        except NanoKVError as error:
            found[name] = {"error": str(error)}
    return found


def passed(found: dict[str, Any]) -> bool:
    """Whether every comparison of bits held."""
    rows, choices = found["same_bits"], found["choices"]
    return (
        isinstance(rows, list)
        and isinstance(choices, list)
        and choices[0]["same"]
        and all(value is True for value in found["int4_writes"].values())
        and all(row["cached_is_uncached"] and row["card_is_cpu"] for row in rows)
        and all(value is True for value in found["digests"].values())
        and found["compute_sanitizer"] in ("clean", "not installed")
    )
