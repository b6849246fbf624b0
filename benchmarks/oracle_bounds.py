"""How far real kernels are from exact attention, in units of the bound that docs/oracle.md derives.

    python -m benchmarks.oracle_bounds --cases 10000

Random cases: lengths to 1024, head widths 8 to 128, MHA, GQA and MQA, half of them with the oracle's planted values and half
with normal ones, some with windows and other scales. An error above 1 would be a bound that does not hold; the bound is sharp
where the largest error is a large part of it.
"""

import argparse
from collections.abc import Callable

import numpy as np

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
RUNS: tuple[tuple[str, Callable[[Call], np.ndarray], str, str | None], ...] = (
    ("torch SDPA", torch_sdpa, "float32", None),
    ("torch SDPA", torch_sdpa, "bfloat16", None),
    ("torch SDPA", torch_sdpa, "float16", None),
    ("nanokv", nanokv_attend, "float64", None),
    ("nanokv", nanokv_attend, "float32", None),
    ("nanokv", nanokv_attend, "float16", None),
    ("nanokv", nanokv_attend, "bfloat16", None),
    ("nanokv", nanokv_attend, "float32", "bfloat16"),
    ("nanokv", nanokv_attend, "float32", "int8"),
    ("nanokv", nanokv_attend, "float32", "fp8"),
    ("nanokv", nanokv_attend, "bfloat16", "fp8"),
)


def random_case(rng: np.random.Generator, dtype: str, kv_dtype: str | None) -> Case:
    lengths = []
    for _ in range(int(rng.integers(1, 4))):
        kv = int(2 ** rng.uniform(0, 10))
        lengths.append((int(rng.integers(1, min(kv, 8) + 1)), kv))
    heads, kv_heads = HEADS[int(rng.integers(len(HEADS)))]
    window = int(rng.integers(1, 100)) if rng.random() < 0.2 else None
    spec = Spec(
        lengths=tuple(lengths), layout=LAYOUTS[int(rng.integers(len(LAYOUTS)))], dtype=dtype, kv_dtype=kv_dtype,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=int(2 ** rng.integers(3, 8)), window=window,
        scale=float(rng.uniform(0.05, 0.5)) if rng.random() < 0.2 else None, seed=int(rng.integers(1 << 30)),
    )  # fmt: skip
    return Case(spec) if spec.scaled or rng.random() < 0.5 else Case(spec, values=_normal(rng, spec))


def _normal(rng: np.random.Generator, spec: Spec) -> list[Values]:
    def draw(tokens: int, heads: int, name: str) -> np.ndarray:
        return rounded(rng.standard_normal((tokens, heads, spec.head_dim)), name)

    found = []
    for q, kv in spec.lengths:
        k, v = (draw(kv, spec.num_kv_heads, spec.stored) for _ in range(2))
        found.append(Values(draw(q, spec.num_heads, spec.dtype), k, v, None, None))
    return found


def measure(kernel: Callable[[Call], np.ndarray], dtype: str, kv_dtype: str | None, cases: int, seed: int) -> dict[int, float]:
    """The largest error in bounds, by the number of keys up to which a row sees."""
    rng, worst = np.random.default_rng(seed), dict.fromkeys(BUCKETS, 0.0)
    for _ in range(cases):
        case = random_case(rng, dtype, kv_dtype)
        out = unpack(case.spec, kernel(case.call())).astype(np.float64)
        ratio = exceeds(out, case.expected.out, case.expected.bound).max(axis=(1, 2))
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
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print("| kernel | dtype | K and V | cases | largest error in bounds | bound over largest error | by keys: " +
          ", ".join(f"to {edge}" for edge in BUCKETS) + " |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for name, kernel, dtype, kv_dtype in RUNS:
        worst = measure(kernel, dtype, kv_dtype, options.cases, options.seed)
        most = max(worst.values())
        each = ", ".join(f"{value:.3f}" for value in worst.values())
        print(
            f"| {name} | {dtype} | {kv_dtype or dtype} | {options.cases} | {most:.3f} | {1 / most:.1f} | {each} |", flush=True
        )


if __name__ == "__main__":
    main()
