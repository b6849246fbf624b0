"""SmolLM2-135M against llama.cpp, in one run: the same dequantised float32 weights, the same threads, batch 1.

    python cli.py pull smollm2 && pip install '.[gguf,llama-cpp]'
    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python -m benchmarks.against_llama_cpp [--model FILE.gguf] [--json]

llama.cpp reads a GGUF of the model's weights in F32, written beside it for the run (540 MB of temporary space), and keeps K
and V in F32. Decode: 60 tokens after a prompt of 8. Prefill: 512 tokens, logits of the last. The contenders take turns;
medians of `--repeat` rounds. Load: our own, from the packed file, of which the first reading warms the disk's cache.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import nanokv
from benchmarks.llama_cpp import LlamaCpp, write_float32
from nanokv.measure import blas, read_bandwidth
from nanokv.model import Model
from nanokv.numerics import EXACT, FAST, threads
from weights.pull import pulled

PROMPT, DECODED, PREFILL, CONTEXT = 8, 60, 512, 1024

Start = Callable[[], Callable[[list[int]], np.ndarray]]  # an empty cache; then tokens -> logits after the last of them


def ours(model: Model) -> Start:
    def start() -> Callable[[list[int]], np.ndarray]:
        cache = model.new_cache(CONTEXT)
        return lambda tokens: model.forward(tokens, cache, slice(-1, None))[0]

    return start


def theirs(model: LlamaCpp) -> Start:
    def start() -> Callable[[list[int]], np.ndarray]:
        model.reset()
        return model.feed

    return start


def rounds(contenders: dict[str, Start], tokens: list[int], repeat: int) -> dict[str, dict[str, Any]]:
    """Medians of each: prefill_s, decode_ms; and the logits after the prefill."""
    times: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in contenders}
    logits = {}
    for number in range(repeat + 1):
        for name, start in contenders.items():
            feed = start()
            began = time.perf_counter()
            logits[name] = feed(tokens[:PREFILL])
            prefill = time.perf_counter() - began
            feed = start()
            feed(tokens[:PROMPT])
            steps = []
            for token in tokens[PROMPT : PROMPT + DECODED]:
                began = time.perf_counter()
                feed([token])
                steps.append(time.perf_counter() - began)
            if number:  # the first round warms up
                times[name]["prefill"].append(prefill)
                times[name]["decode"].append(statistics.median(steps))
    return {
        name: {
            "prefill_s": statistics.median(each["prefill"]),
            "decode_ms": statistics.median(each["decode"]) * 1e3,
            "logits": logits[name],
        }
        for name, each in times.items()
    }


def load_seconds(source: str) -> float:
    """The median of three loads after one."""
    nanokv.load(source, kernels="numpy")
    times = []
    for _ in range(3):
        began = time.perf_counter()
        nanokv.load(source, kernels="numpy")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="a GGUF file; SmolLM2, where it was pulled, if not given")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    path = args.model or pulled("smollm2")
    loading = load_seconds(str(path))
    model = nanokv.load(str(path), kernels="numpy")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, PREFILL).tolist()
    with tempfile.TemporaryDirectory() as folder:
        llama = LlamaCpp(write_float32(path, Path(folder) / "float32.gguf"), threads(), CONTEXT)
        contenders = {"llama.cpp": theirs(llama), "exact": ours(replace(model, numerics=EXACT)),
                      "fast": ours(replace(model, numerics=FAST))}  # fmt: skip
        found = rounds(contenders, tokens, args.repeat)
    base, bandwidth = found["llama.cpp"], read_bandwidth()
    kernels, blas_threads = blas()
    result: dict[str, Any] = {
        "model": model.name, "threads": threads(), "blas_threads": blas_threads, "blas": kernels,
        "binding": f"llama-cpp-python {llama.version}", "read_gb_per_s": bandwidth / 1e9, "load_s": loading,
        "openblas_variables": [name for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ],
        "contenders": {
            name: {
                "prefill_512_s": each["prefill_s"], "prefill_ratio": each["prefill_s"] / base["prefill_s"],
                "decode_ms": each["decode_ms"], "decode_ratio": each["decode_ms"] / base["decode_ms"],
                "max_logit_difference": float(np.abs(each["logits"] - base["logits"]).max()),
            }
            for name, each in found.items()
        },
    }  # fmt: skip
    if args.json:
        print(json.dumps(result))
        return
    print(f"{model.name}, float32, batch 1, {threads()} threads; {result['binding']}; {kernels}")
    for name, each in result["contenders"].items():
        print(
            f"{name:10} prefill of {PREFILL} {each['prefill_512_s']:6.3f} s ({each['prefill_ratio']:.2f})   "
            f"decode {each['decode_ms']:6.2f} ms ({each['decode_ratio']:.2f})   "
            f"{model.weight_bytes / each['decode_ms'] / 1e6:5.1f} GB/s of {bandwidth / 1e9:.1f}   "
            f"logits differ by {each['max_logit_difference']:.1e} at most"
        )
    print(f"load from the packed file: {loading:.2f} s")


if __name__ == "__main__":
    main()
