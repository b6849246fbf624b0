"""The compiled kernels' speed beside other people's, with the bar of each number, and the roofline of this machine.

    pip install '.[cpu,peers,llama-cpp,plot]'
    python -m benchmarks.kernels [--threads N] [--smollm2 SmolLM2-135M-Instruct.gguf] [--only gpt2,llama,paged,blas,growth]
                                 [--plot docs/kernels.png]

All of one run: medians of --repeat rounds in which the contenders take turns, each in a process of its own, with the same
threads; the read bandwidth and the rate of multiply-adds measured beside them. Run it on a quiet machine. The GGUF may have
any encoding: llama.cpp requantises it for every comparison, and both read the same file.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import Calls, Contender, contenders, in_turns
from nanokv.kernels.choice import PackedMemory, physical_cores, start
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.paged import PagedPool
from nanokv.kv.tile import Batch
from nanokv.measure import blas, read_bandwidth, seconds
from nanokv.models import gpt2, llama
from nanokv.models.config import known_shapes
from nanokv.numerics import COMPILED, linear

PREFILL, CONTEXT, BATCH, DECODED = 512, 512, 32, 64
# llama.cpp's file types (llama.h, llama_ftype) and the format of ours that has as many bits.
LLAMA_CPP = {"F32": (0, "float32"), "BF16": (32, "bf16"), "F16": (1, "fp16"), "Q8_0": (7, "int8"), "Q4_0": (2, "int4")}
SECTIONS = ("gpt2", "llama", "paged", "blas", "growth")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
Row = tuple[str, str, str]


@dataclass(frozen=True)
class Point:
    """A place on the roofline: FLOPs and bytes that a step needs at least, and the seconds that it took."""

    name: str
    ours: bool
    flops: float
    moved: float
    seconds: float


def gpt2_shape(positions: int = 1024) -> tuple[gpt2.GPT2Params, gpt2.GPT2Params]:
    """Random weights of GPT-2 124M, as arrays and packed."""
    params = gpt2.random_params(replace(known_shapes()["gpt2"], num_positions=positions))
    return params, params.to(PackedMemory("numpy", np))


def contiguous(config: Any, capacity: int) -> ContiguousCache:
    return ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, capacity)


def gpt2_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50257, PREFILL + DECODED)


def machine(threads: int) -> Calls:
    """Bytes and multiply-adds a second, as calls that give seconds a byte and a FLOP."""
    from numba import njit, prange

    from nanokv.kernels.simd import product

    start(threads)
    rows, depth, times = 6, 1024, 4000
    block = product((rows, 1), 4)

    @njit(parallel=True)  # type: ignore[untyped-decorator]
    def multiply(x: Any, w: Any, out: Any) -> None:
        for thread in prange(len(x)):
            for _ in range(times):
                block(rows, x[thread].ctypes.data, depth, w[thread].ctypes.data, 64, depth, out[thread].ctypes.data, 64)

    x, w = np.ones((threads, rows, depth), np.float32), np.ones((threads, depth, 64), np.float32)
    out = np.zeros((threads, rows, 64), np.float32)

    def flop() -> float:
        best = np.inf
        for _ in range(4):
            begin = time.perf_counter()
            multiply(x, w, out)
            best = min(best, time.perf_counter() - begin)
        return float(best) / (2 * threads * times * rows * depth * 64)

    return {"byte": lambda: 1 / read_bandwidth(), "flop": flop}


def our_gpt2(threads: int) -> Calls:
    start(threads)
    _, packed = gpt2_shape()
    config, tokens = packed.config, gpt2_tokens()
    cache, base = contiguous(config, 8 + DECODED), contiguous(config, CONTEXT + 1)
    gpt2.forward(packed, tokens[:CONTEXT], base, rows=slice(-1, None), numerics=COMPILED)
    caches = [base.copy() for _ in range(BATCH)]

    def prefill() -> None:
        gpt2.forward(packed, tokens[:PREFILL], contiguous(config, PREFILL), rows=slice(-1, None), numerics=COMPILED)

    def decode() -> None:
        cache.reset()
        gpt2.forward(packed, tokens[:8], cache, numerics=COMPILED)
        for i in range(8, 8 + DECODED):
            gpt2.forward(packed, tokens[i : i + 1], cache, numerics=COMPILED)

    def batch() -> None:
        gpt2.forward(packed, tokens[-BATCH:], Batch([(each, 1) for each in caches]), numerics=COMPILED)
        for each in caches:
            each.truncate(CONTEXT)

    return {"decode": decode, "prefill": prefill, "batch": batch}


def their_gpt2(threads: int) -> Calls:
    """transformers."""
    import torch

    from benchmarks.peers import torch_gpt2

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model, tokens = torch_gpt2(gpt2.random_params(known_shapes()["gpt2"])), gpt2_tokens()
    ids = torch.tensor(tokens)[None]
    held = model(ids[:, :CONTEXT].repeat(BATCH, 1), use_cache=True, logits_to_keep=1).past_key_values

    def prefill() -> None:
        model(ids[:, :PREFILL], use_cache=True, logits_to_keep=1)

    def decode() -> None:
        out = model(ids[:, :8], use_cache=True)
        for i in range(8, 8 + DECODED):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)

    def batch() -> None:
        model(ids[0, -BATCH:, None], past_key_values=held, use_cache=True)
        held.crop(-1)

    return {"decode": decode, "prefill": prefill, "batch": batch}


def against_transformers(repeat: int, threads: int, per_byte: float, points: list[Point]) -> Iterator[Row]:
    """Decode, prefill and a batch of GPT-2 124M's shape in float32."""
    config = known_shapes()["gpt2"]
    e, layers, vocab = config.width, config.num_layers, config.vocab_size
    weights = layers * 12 * e * e  # and vectors, which are few
    read, kept = 4 * (weights + vocab * e), 2 * layers * e * 4  # bytes of a token's weights, and of its keys and values
    with contenders(ours=(our_gpt2, threads), theirs=(their_gpt2, threads)) as made:
        spent = in_turns(made, "decode", repeat)
        ours, theirs = (spent[who] / DECODED for who in ("ours", "theirs"))
        share = read * per_byte / ours
        yield "GPT-2 124M decode", f"{ours * 1e3:.2f} ms, {share:.0%} of the read bandwidth", "80%, aim 90%"
        yield "... of transformers' time", f"{ours / theirs:.2f} of {theirs * 1e3:.1f} ms", "0.4"
        needed: tuple[float, float] = 2 * (weights + vocab * e), read
        points += [Point("GPT-2 decode", True, *needed, ours), Point("GPT-2 decode", False, *needed, theirs)]
        spent = in_turns(made, "prefill", repeat)
        attention = 4 * layers * e * PREFILL * PREFILL / 2
        needed = 2 * weights * PREFILL + attention + 2 * vocab * e, read + kept * PREFILL
        yield (
            "prefill of 512, of transformers' time",
            f"{spent['ours'] / spent['theirs']:.2f} of {spent['theirs'] * 1e3:.0f} ms ({spent['ours'] * 1e3:.0f} ms, "
            f"{needed[0] / spent['ours'] / 1e9:.0f} GFLOP/s)",
            "0.3",
        )
        points += [Point("GPT-2 prefill of 512", who == "ours", *needed, spent[who]) for who in ("ours", "theirs")]
        spent = in_turns(made, "batch", repeat)
        yield (
            f"{BATCH} sequences at {CONTEXT}, tokens/s over transformers'",
            f"{spent['theirs'] / spent['ours']:.2f} ({BATCH / spent['ours']:.0f} tokens/s)",
            "4",
        )
        needed = BATCH * (2 * (weights + vocab * e) + 4 * layers * e * CONTEXT), read + BATCH * kept * CONTEXT
        name = f"GPT-2, {BATCH} sequences"
        points += [Point(name, who == "ours", *needed, spent[who]) for who in ("ours", "theirs")]


def smollm2_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(100, 40000, PREFILL + DECODED)


def our_smollm2(path: Path, threads: int) -> Calls:
    from weights.gguf_file import load_gguf

    start(threads)
    params: Any = load_gguf(path, path.stem, "float32", PackedMemory("numpy", np)).params
    tokens = smollm2_tokens()

    def prefill() -> None:
        llama.forward(params, tokens[:PREFILL], contiguous(params.config, PREFILL), rows=slice(-1, None), numerics=COMPILED)

    def decode() -> None:
        kept = contiguous(params.config, PREFILL + DECODED)
        llama.forward(params, tokens[:8], kept, numerics=COMPILED)
        for i in range(8, 8 + DECODED):
            llama.forward(params, tokens[i : i + 1], kept, numerics=COMPILED)

    return {"decode": decode, "prefill": prefill}


def their_smollm2(path: Path, threads: int) -> Calls:
    """llama.cpp, with its own defaults for keys and values."""
    import llama_cpp

    _quiet_llama_cpp()
    model, tokens = llama_cpp.Llama(str(path), n_ctx=PREFILL + DECODED, n_batch=PREFILL, n_ubatch=PREFILL, n_threads=threads,
                                    n_threads_batch=threads, verbose=False, logits_all=False), smollm2_tokens()  # fmt: skip

    def prefill() -> None:
        model.reset()
        model.eval(tokens[:PREFILL].tolist())

    def decode() -> None:
        model.reset()
        model.eval(tokens[:8].tolist())
        for i in range(8, 8 + DECODED):
            model.eval([int(tokens[i])])

    return {"decode": decode, "prefill": prefill}


_SILENT: list[Any] = []


def _quiet_llama_cpp() -> None:
    import llama_cpp

    _SILENT.append(llama_cpp.llama_log_callback(lambda *_: None))  # llama.cpp keeps no reference of its own
    llama_cpp.llama_log_set(_SILENT[-1], None)


def requantise(source: Path, target: Path, kind: int, threads: int) -> None:
    """Another file of the same weights, by llama.cpp."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread, options.pure = kind, True, threads, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options):
        raise SystemExit(f"llama.cpp cannot make {target.name} of {source}")


def against_llama_cpp(repeat: int, threads: int, source: Path, points: list[Point]) -> Iterator[Row]:
    """SmolLM2 at equal bits: decode at batch 1, prefill of 512."""
    from weights.gguf_file import load_gguf

    _quiet_llama_cpp()
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, form) in LLAMA_CPP.items():
            path = Path(folder) / f"{name}.gguf"
            requantise(source, path, kind, threads)
            params: Any = load_gguf(path, name, "float32", PackedMemory("numpy", np)).params
            moved, config = params.weight_bytes, params.config
            matrices = [each for block in params.blocks for each in vars(block).values() if getattr(each, "ndim", 0) == 2]
            flops = 2 * sum(each.shape[0] * each.shape[1] for each in (*matrices, params.head))
            head = 2 * params.head.shape[0] * params.head.shape[1]
            del params, matrices
            with contenders(ours=(our_smollm2, path, threads), theirs=(their_smollm2, path, threads)) as made:
                spent = in_turns(made, "decode", repeat)
                ours, theirs = (spent[who] / DECODED for who in ("ours", "theirs"))
                bar = "1" if name == "Q4_0" else "1, aim 1.5"
                yield (
                    f"SmolLM2 decode, {form}: llama.cpp's {name} over ours",
                    f"{theirs / ours:.2f} ({ours * 1e3:.2f} ms, {theirs * 1e3:.2f})",
                    bar,
                )
                label = f"SmolLM2 decode, {form}"
                points += [Point(label, who == "ours", flops, moved, spent[who] / DECODED) for who in ("ours", "theirs")]
                spent = in_turns(made, "prefill", repeat)
                yield (
                    f"SmolLM2 prefill of 512, {form}: llama.cpp's {name} over ours",
                    f"{spent['theirs'] / spent['ours']:.2f} ({spent['ours'] * 1e3:.0f} ms, {spent['theirs'] * 1e3:.0f})",
                    "1",
                )
                attention = 4 * config.num_layers * config.num_heads * config.head_dim * PREFILL * PREFILL / 2
                needed = (flops - head) * PREFILL + head + attention, moved
                label = f"SmolLM2 prefill, {form}"
                points += [Point(label, who == "ours", *needed, spent[who]) for who in ("ours", "theirs")]


def stored(batch: int, threads: int) -> Calls:
    """One step of a batch at CONTEXT tokens, contiguous and paged in scattered blocks."""
    start(threads)
    _, packed = gpt2_shape()
    config, tokens = packed.config, gpt2_tokens()
    pool = PagedPool(config.num_layers, config.num_kv_heads, config.head_dim, batch * (CONTEXT // 16 + 2) + 1, 16)
    kinds: dict[str, list[Any]] = {
        "contiguous": [contiguous(config, CONTEXT + 1) for _ in range(batch)],
        "paged": [pool.new_sequence() for _ in range(batch)],
    }
    for begin in range(0, CONTEXT, 16):  # in turns, so that the sequences' blocks lie scattered
        for caches in kinds.values():
            for cache in caches:
                gpt2.forward(packed, tokens[begin : begin + 16], cache, rows=slice(-1, None), numerics=COMPILED)

    def step(caches: list[Any]) -> None:
        gpt2.forward(packed, tokens[:batch], Batch([(cache, 1) for cache in caches]), numerics=COMPILED)
        for cache in caches:
            cache.truncate(CONTEXT)

    return {kind: lambda caches=caches: step(caches) for kind, caches in kinds.items()}  # type: ignore[misc]


def paged_against_contiguous(repeat: int, threads: int) -> Iterator[Row]:
    for batch in (1, BATCH):
        with contenders(ours=(stored, batch, threads)) as made:
            times: dict[str, list[float]] = {"contiguous": [], "paged": []}
            for _ in range(4 * repeat):
                for kind, each in times.items():
                    each.append(made["ours"].seconds(kind))
            middle = {kind: float(np.median(each[2:])) for kind, each in times.items()}
        ratio = middle["paged"] / middle["contiguous"]
        yield f"paged over contiguous, batch {batch}", f"{ratio:.3f} of {middle['contiguous'] * 1e3:.1f} ms", "1.05"


REPEATS = 1000  # of one product: a call of some microseconds is too short for a turn


def products(packed: bool, threads: int) -> Calls:
    """x [R, 768] times [3072, 768], by our kernels or by BLAS."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3072, 768), dtype=np.float32)
    xs = {rows: rng.standard_normal((rows, 768), dtype=np.float32) for rows in ROWS}
    if packed:
        start(threads)
        matrix = PackedMemory("numpy", np).from_numpy(weight)
    else:
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads)

    def run(x: np.ndarray) -> None:
        for _ in range(max(1, REPEATS // len(x))):
            if packed:
                linear(x, matrix, numerics=COMPILED)
            else:
                x @ weight.T

    return {f"{rows}": lambda x=x: run(x) for rows, x in xs.items()}  # type: ignore[misc]


def against_blas(repeat: int, threads: int) -> Iterator[Row]:
    with contenders(ours=(products, True, threads), blas=(products, False, threads)) as made:
        for rows in ROWS:
            spent = {who: each / max(1, REPEATS // rows) for who, each in in_turns(made, f"{rows}", repeat).items()}
            flops = 2 * rows * 768 * 3072 / spent["ours"] / 1e9
            yield (
                f"768 -> 3072, {rows} rows, BLAS's time over ours",
                f"{spent['blas'] / spent['ours']:.2f} ({spent['ours'] * 1e6:.0f} us, {flops:.0f} GFLOP/s)",
                "",
            )


CONTEXTS = tuple(128 << i for i in range(7))


def growing(threads: int) -> Calls:
    """A decoded token of GPT-2's shape after each of CONTEXTS, in a cache of its own."""
    start(threads)
    _, packed = gpt2_shape(CONTEXTS[-1] + 1)
    tokens = np.random.default_rng(0).integers(0, packed.config.vocab_size, CONTEXTS[-1])
    caches = {context: contiguous(packed.config, context + 1) for context in CONTEXTS}
    for context, cache in caches.items():
        for begin in range(0, context, 512):
            part = tokens[begin : min(context, begin + 512)]
            gpt2.hidden_states(packed, part, cache, numerics=COMPILED)

    def step(context: int) -> float:
        def token() -> None:
            gpt2.forward(packed, tokens[:1], caches[context], numerics=COMPILED)
            caches[context].truncate(context)

        return seconds(token, 5)

    return {f"{context}": lambda context=context: step(context) for context in CONTEXTS}  # type: ignore[misc]


def growth(repeat: int, threads: int, per_byte: float) -> Iterator[Row]:
    """Decode time against context: the slope of a line, against the bytes of K and V that a token adds."""
    with contenders(ours=(growing, threads)) as made:
        rounds = [[made["ours"].seconds(f"{context}") for context in CONTEXTS] for _ in range(3 * repeat)]
    times = np.median(rounds, axis=0)
    for context, taken in zip(CONTEXTS, times, strict=True):
        yield f"decode at context {context}", f"{taken * 1e3:.2f} ms", ""
    slope, first = np.polyfit(CONTEXTS, times, 1)
    fit = np.abs(np.polyval([slope, first], CONTEXTS) / times - 1).max()
    config = known_shapes()["gpt2"]
    ideal = 2 * config.num_layers * config.width * 4 * per_byte
    yield "slope over KV bytes / read bandwidth", f"{slope / ideal:.2f}; the line is within {fit:.0%}", "0.75 to 1.25"


def plot(points: list[Point], per_byte: float, per_flop: float, path: Path) -> None:
    """FLOP/s against FLOPs a byte, below the two roofs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    intensity = np.geomspace(0.3, 1000, 200)
    axes.loglog(intensity, np.minimum(intensity / per_byte, 1 / per_flop) / 1e9, color="black", linewidth=1.5)
    names = list(dict.fromkeys(point.name for point in points))
    colours = pyplot.get_cmap("tab20")
    for point in points:
        axes.plot(
            point.flops / point.moved, point.flops / point.seconds / 1e9, "o" if point.ours else "x",
            color=colours(names.index(point.name) % 20), label=point.name if point.ours else None,
        )  # fmt: skip
    axes.set_xlabel("FLOPs a byte that has to be moved")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"{1 / per_byte / 1e9:.0f} GB/s and {1 / per_flop / 1e9:.0f} GFLOP/s measured; o ours, x theirs")
    axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--smollm2", type=Path, help="a GGUF of SmolLM2; without it no comparison with llama.cpp")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    parser.add_argument("--plot", type=Path, help="draw the roofline with what was measured into this file")
    args = parser.parse_args()
    with contenders(machine=(machine, args.threads)) as made:
        per_byte, per_flop = (min(_some(made["machine"], name)) for name in ("byte", "flop"))
    points: list[Point] = []
    sections: Mapping[str, Callable[[], Iterator[Row]]] = {
        "gpt2": lambda: against_transformers(args.repeat, args.threads, per_byte, points),
        "paged": lambda: paged_against_contiguous(args.repeat, args.threads),
        "blas": lambda: against_blas(args.repeat, args.threads),
        "growth": lambda: growth(args.repeat, args.threads, per_byte),
        "llama": lambda: against_llama_cpp(args.repeat, args.threads, args.smollm2, points) if args.smollm2 else iter(()),
    }
    print("| | reached | bar |\n|---|---|---|")
    for name in args.only.split(","):
        for row in sections[name]():
            print(f"| {' | '.join(row)} |", flush=True)
    with contenders(machine=(machine, args.threads)) as made:
        again = 1 / min(_some(made["machine"], "byte")) / 1e9
    if args.plot:
        plot(points, per_byte, per_flop, args.plot)
    from nanokv.kernels.compiled import linear as any_kernel
    from nanokv.kernels.compiled import settings

    start(args.threads)
    any_kernel(np.ones((1, 64), np.float32), np.ones((64, 64), np.float32), None)
    ran = settings()
    print(
        f"\n{args.threads} threads ({ran['layer']}), numba {ran['numba']}; BLAS {blas()[0]}; the machine reads "
        f"{1 / per_byte / 1e9:.1f} GB/s ({again:.1f} at the end) and does {1 / per_flop / 1e9:.0f} GFLOP/s"
    )


def _some(contender: Contender, name: str) -> list[float]:
    return [contender.seconds(name) for _ in range(3)]


if __name__ == "__main__":
    main()
