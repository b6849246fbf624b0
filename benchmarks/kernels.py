"""The compiled kernels' speed beside other people's, with the bar of each number.

    pip install '.[cpu,peers,llama-cpp]'
    python -m benchmarks.kernels [--threads N] [--smollm2 SmolLM2-135M-Instruct.gguf] [--only gpt2,llama,paged,blas,growth]

All of one run: medians of --repeat, the same threads, and the read bandwidth measured beside them (nanokv.measure);
contenders take turns where their threads do not get in each other's way. Run it on a quiet machine. The GGUF may have any
encoding: llama.cpp requantises it for every comparison, and both read the same file.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nanokv.kernels.choice import PackedMemory, physical_cores, start
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedPool
from nanokv.kv.tile import Batch
from nanokv.measure import blas, read_bandwidth
from nanokv.models import gpt2, llama
from nanokv.models.config import known_shapes
from nanokv.numerics import COMPILED, linear

PREFILL, CONTEXT, BATCH, DECODED = 512, 512, 32, 64
# llama.cpp's file types (llama.h, llama_ftype) and the format of ours that has as many bits.
LLAMA_CPP = {"F32": (0, "float32"), "BF16": (32, "bf16"), "F16": (1, "fp16"), "Q8_0": (7, "int8"), "Q4_0": (2, "int4")}
SECTIONS = ("gpt2", "llama", "paged", "blas", "growth")
Row = tuple[str, str, str]


def turns(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Seconds of each, the median of `repeat` rounds in which they take turns, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeat + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if round_:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


def gpt2_shape(positions: int = 1024) -> tuple[gpt2.GPT2Params, gpt2.GPT2Params]:
    """Random weights of GPT-2 124M, as arrays and packed."""
    params = gpt2.random_params(replace(known_shapes()["gpt2"], num_positions=positions))
    return params, params.to(PackedMemory("numpy", np))


def contiguous(config: Any, capacity: int) -> ContiguousCache:
    return ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, capacity)


def against_transformers(repeat: int, threads: int, bandwidth: float) -> Iterator[Row]:
    """Decode, prefill and a batch of GPT-2 124M's shape in float32. PyTorch is slower in a process that holds numba's threads:
    benchmarks.against_transformers has its own time."""
    import torch

    from benchmarks.peers import torch_gpt2

    torch.set_num_threads(threads)
    params, packed = gpt2_shape()
    model, config = torch_gpt2(params), packed.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, PREFILL + DECODED)
    ids = torch.tensor(tokens)[None]

    def ours_prefill() -> None:
        gpt2.forward(packed, tokens[:PREFILL], contiguous(config, PREFILL), rows=slice(-1, None), numerics=COMPILED)

    def theirs_prefill() -> None:
        with torch.no_grad():
            model(ids[:, :PREFILL], use_cache=True, logits_to_keep=1)

    cache = contiguous(config, 8 + DECODED)

    def ours_decode() -> None:
        cache.reset()
        gpt2.forward(packed, tokens[:8], cache, numerics=COMPILED)
        for i in range(8, 8 + DECODED):
            gpt2.forward(packed, tokens[i : i + 1], cache, numerics=COMPILED)

    def theirs_decode() -> None:
        with torch.no_grad():
            out = model(ids[:, :8], use_cache=True)
            for i in range(8, 8 + DECODED):
                out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)

    with torch.no_grad():
        held = model(torch.tensor(tokens[:CONTEXT])[None].repeat(BATCH, 1), use_cache=True, logits_to_keep=1).past_key_values
    step = tokens[-BATCH:]

    def theirs_batch() -> None:
        with torch.no_grad():
            model(torch.tensor(step)[:, None], past_key_values=held, use_cache=True)
        held.crop(-1)

    theirs = {
        name: turns({"theirs": call}, repeat)
        for name, call in (("decode", theirs_decode), ("prefill", theirs_prefill), ("batch", theirs_batch))
    }
    spent = turns({"ours": ours_decode}, repeat) | theirs["decode"]
    each = {name: seconds / DECODED for name, seconds in spent.items()}
    read = sum(array.nbytes for block in packed.blocks for array in vars(block).values()) + packed.head.nbytes
    share = read / each["ours"] / bandwidth
    yield "GPT-2 124M decode", f"{each['ours'] * 1e3:.2f} ms, {share:.0%} of the read bandwidth", "80%, aim 90%"
    yield "... of transformers' time", f"{each['ours'] / each['theirs']:.2f} of {each['theirs'] * 1e3:.1f} ms", "0.4"
    spent = turns({"ours": ours_prefill}, repeat) | theirs["prefill"]
    ratio = spent["ours"] / spent["theirs"]
    yield "prefill of 512, of transformers' time", f"{ratio:.2f} of {spent['theirs'] * 1e3:.0f} ms", "0.3"

    first = tokens[:CONTEXT]
    base = contiguous(config, CONTEXT + 1)
    gpt2.forward(packed, first, base, rows=slice(-1, None), numerics=COMPILED)
    caches = [base.copy() for _ in range(BATCH)]

    def ours_batch() -> None:
        gpt2.forward(packed, step, Batch([(cache, 1) for cache in caches]), numerics=COMPILED)
        for cache in caches:
            cache.truncate(CONTEXT)

    spent = turns({"ours": ours_batch}, repeat) | theirs["batch"]
    yield (
        f"{BATCH} sequences at {CONTEXT}, tokens/s over transformers'",
        f"{spent['theirs'] / spent['ours']:.2f} ({BATCH / spent['ours']:.0f} tokens/s)",
        "4",
    )


def against_llama_cpp(repeat: int, threads: int, source: Path) -> Iterator[Row]:
    """SmolLM2 at equal bits: decode at batch 1, prefill of 512."""
    import llama_cpp

    from weights.gguf_file import load_gguf

    tokens = np.random.default_rng(0).integers(100, 40000, PREFILL + DECODED)
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, form) in LLAMA_CPP.items():
            path = Path(folder) / f"{name}.gguf"
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype, options.allow_requantize, options.nthread, options.pure = kind, True, threads, True
            if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), options):
                raise SystemExit(f"llama.cpp cannot make a {name} file of {source}")
            theirs = llama_cpp.Llama(str(path), n_ctx=PREFILL + DECODED, n_batch=PREFILL, n_ubatch=PREFILL, n_threads=threads,
                                     n_threads_batch=threads, verbose=False, logits_all=False)  # fmt: skip
            params = load_gguf(path, name, "float32", PackedMemory("numpy", np)).params
            config = params.config

            def cache(config: Any = config) -> ContiguousCache:
                return ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, PREFILL + DECODED)

            def ours_prefill(params: Any = params, cache: Any = cache) -> None:
                llama.forward(params, tokens[:PREFILL], cache(), rows=slice(-1, None), numerics=COMPILED)

            def theirs_prefill(theirs: Any = theirs) -> None:
                theirs.reset()
                theirs.eval(tokens[:PREFILL].tolist())

            def ours_decode(params: Any = params, cache: Any = cache) -> None:
                kept = cache()
                llama.forward(params, tokens[:8], kept, numerics=COMPILED)
                for i in range(8, 8 + DECODED):
                    llama.forward(params, tokens[i : i + 1], kept, numerics=COMPILED)

            def theirs_decode(theirs: Any = theirs) -> None:
                theirs.reset()
                theirs.eval(tokens[:8].tolist())
                for i in range(8, 8 + DECODED):
                    theirs.eval([int(tokens[i])])

            spent = turns({"ours": ours_decode, "theirs": theirs_decode}, repeat)
            ours, other = (spent[who] / DECODED * 1e3 for who in ("ours", "theirs"))
            bar = "1" if name == "Q4_0" else "1, aim 1.5"
            yield f"SmolLM2 decode, {form} over {name}", f"{other / ours:.2f} ({ours:.2f} ms, {other:.2f})", bar
            spent = turns({"ours": ours_prefill}, repeat) | theirs["prefill"]
            yield (
                f"SmolLM2 prefill of 512, {form} over {name}",
                f"{spent['theirs'] / spent['ours']:.2f} ({spent['ours'] * 1e3:.0f} ms, {spent['theirs'] * 1e3:.0f})",
                "1",
            )
            del theirs


def paged_against_contiguous(repeat: int) -> Iterator[Row]:
    _, packed = gpt2_shape()
    config = packed.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, CONTEXT)
    for batch in (1, BATCH):
        pool = PagedPool(config.num_layers, config.num_kv_heads, config.head_dim, batch * (CONTEXT // 16 + 2) + 1, 16)
        kinds: dict[str, list[Any]] = {
            "contiguous": [contiguous(config, CONTEXT + 1) for _ in range(batch)],
            "paged": [pool.new_sequence() for _ in range(batch)],
        }
        for begin in range(0, CONTEXT, 16):  # in turns, so that the sequences' blocks lie scattered
            for caches in kinds.values():
                for cache in caches:
                    gpt2.forward(packed, tokens[begin : begin + 16], cache, rows=slice(-1, None), numerics=COMPILED)

        def step(caches: list[Any], batch: int = batch) -> Callable[[], None]:
            def run() -> None:
                gpt2.forward(packed, tokens[:batch], Batch([(cache, 1) for cache in caches]), numerics=COMPILED)
                for cache in caches:
                    cache.truncate(CONTEXT)

            return run

        spent = turns({name: step(caches) for name, caches in kinds.items()}, repeat)
        ratio = spent["paged"] / spent["contiguous"]
        yield f"paged over contiguous, batch {batch}", f"{ratio:.3f} of {spent['contiguous'] * 1e3:.1f} ms", "1.05"


def against_blas(repeat: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3072, 768), dtype=np.float32)
    packed = PackedMemory("numpy", np).from_numpy(weight)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        x = rng.standard_normal((rows, 768), dtype=np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda x=x: linear(x, packed, numerics=COMPILED),  # type: ignore[misc]
            "blas": lambda x=x: x @ weight.T,  # type: ignore[misc]
        }
        spent = turns(calls, 5 * repeat)
        flops = 2 * rows * weight.size / spent["ours"] / 1e9
        yield (
            f"768 -> 3072, {rows} rows, BLAS's time over ours",
            f"{spent['blas'] / spent['ours']:.2f} ({spent['ours'] * 1e6:.0f} us, {flops:.0f} GFLOP/s)",
            "",
        )


def growth(repeat: int, bandwidth: float) -> Iterator[Row]:
    """Decode time against context: the slope of a line, against the bytes of K and V that a token adds."""
    contexts = [128 << i for i in range(7)]
    _, packed = gpt2_shape(contexts[-1] + 1)
    config = packed.config
    cache = contiguous(config, contexts[-1] + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, contexts[-1])
    times = []
    for context in contexts:
        while cache.length < context:
            part = tokens[cache.length : min(context, cache.length + 512)]
            gpt2.forward(packed, part, cache, rows=slice(-1, None), numerics=COMPILED)

        def step(context: int = context) -> None:
            gpt2.forward(packed, tokens[:1], cache, numerics=COMPILED)
            cache.truncate(context)

        times.append(turns({"ours": step}, 3 * repeat)["ours"])
        yield f"decode at context {context}", f"{times[-1] * 1e3:.2f} ms", ""
    slope, start_ = np.polyfit(contexts, times, 1)
    fit = np.abs(np.polyval([slope, start_], contexts) / times - 1).max()
    ideal = cache.bytes_per_token / bandwidth
    yield "slope over KV bytes / read bandwidth", f"{slope / ideal:.2f}; the line is within {fit:.0%}", "0.75 to 1.25"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--smollm2", type=Path, help="a GGUF of SmolLM2; without it no comparison with llama.cpp")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    args = parser.parse_args()
    chosen = args.only.split(",")
    start(args.threads)
    bandwidth = read_bandwidth()
    print("| | reached | bar |\n|---|---|---|")
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "gpt2": lambda: against_transformers(args.repeat, args.threads, bandwidth),
        "paged": lambda: paged_against_contiguous(args.repeat),
        "blas": lambda: against_blas(args.repeat),
        "growth": lambda: growth(args.repeat, bandwidth),
    }
    if args.smollm2:
        sections["llama"] = lambda: against_llama_cpp(args.repeat, args.threads, args.smollm2)
    for name in chosen:
        for row in sections[name]() if name in sections else ():
            print(f"| {' | '.join(row)} |", flush=True)
    from nanokv.kernels.compiled import settings

    ran = settings()
    print(
        f"\n{args.threads} threads ({ran['layer']}), numba {ran['numba']}; BLAS {blas()[0]}, {blas()[1]} threads; "
        f"the machine reads {bandwidth / 1e9:.1f} GB/s"
    )


if __name__ == "__main__":
    main()
