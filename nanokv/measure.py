"""What this machine can do: its read bandwidth, its threads, the BLAS kernels that run."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from nanokv.numerics import in_parallel, threads


def read_bandwidth(megabytes: int = 256, allocations: int = 4) -> float:
    """Bytes a second that all cores together read from memory: the best of several fresh allocations.

    The best, because how fast one array reads depends on where its pages landed. Two ways of reading compete, a sum on
    every core and a matrix-vector product of BLAS, so that decoding cannot look better than the probe.
    """
    best = 0.0
    columns = 1024
    rows = megabytes * (1 << 20) // (4 * columns)
    vector = np.ones(columns, np.float32)
    for _ in range(allocations):
        matrix = np.ones((rows, columns), np.float32)
        shares = np.array_split(matrix.reshape(-1), threads())

        def total(share: np.ndarray) -> None:
            np.add.reduce(share)

        def sums(shares: list[np.ndarray] = shares) -> None:
            in_parallel(total, shares)

        def product(matrix: np.ndarray = matrix) -> None:
            matrix @ vector

        best = max(best, *(matrix.nbytes / seconds(read, 3, min) for read in (sums, product)))
    return best


def seconds(call: Callable[[], object], repeat: int, of: Callable[[list[float]], float] = statistics.median) -> float:
    """Seconds that a call takes after one warm-up: the median of `repeat`, or what `of` makes of them."""
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return of(times)


def blas() -> tuple[str, int]:
    """The BLAS library with the kernels it chose for this processor, and its threads."""
    from threadpoolctl import threadpool_info

    for pool in threadpool_info():
        if pool["user_api"] == "blas":
            name = " ".join(str(pool[key]) for key in ("internal_api", "version", "architecture") if pool.get(key))
            return name, int(pool["num_threads"])
    return "unknown", threads()
