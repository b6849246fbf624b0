"""What one block costs in the pool, from a thousand to a million blocks: it should not depend on how many there are.

    python -m benchmarks.block_pool

A cycle takes 10,000 blocks (or all), enters them into the prefix index, frees them in reverse, finds them again and
evicts them: every list and index is in use. Medians of 7.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from nanokv.kv.block_pool import BlockPool
from nanokv.kv.prefix import BlockKey

REPEAT = 7


def cycle(pool: BlockPool, keys: list[BlockKey]) -> dict[str, float]:
    """Nanoseconds a block of every operation, once through a block's life."""
    spent = {}

    def timed(name: str, call: Callable[[], Any], count: int) -> Any:
        start = time.perf_counter()
        result = call()
        spent[name] = (time.perf_counter() - start) / count * 1e9
        return result

    part = len(keys)
    blocks = timed("take", lambda: pool.get_new_blocks(part), part)

    def enter_all() -> None:
        for block, key in zip(blocks, keys, strict=True):
            pool.cache_block(block, key)

    timed("cache", enter_all, part)
    timed("free", lambda: pool.free_blocks(blocks[::-1]), part)
    timed("find", lambda: [pool.get_cached_block(key) for key in keys], part)
    timed("touch", lambda: pool.touch(blocks), part)
    pool.free_blocks(blocks[::-1])
    free = pool.num_free
    taken = timed("evict", lambda: pool.get_new_blocks(free), free)
    pool.free_blocks(taken[::-1])
    return spent


def main() -> None:
    print("    blocks   take  cache   free   find  touch  evict   (ns a block)")
    for exponent in range(3, 7):
        count = 10**exponent
        pool = BlockPool(count + 1, 16)
        part = min(count, 10_000)
        keys = [BlockKey(i.to_bytes(32, "little"), b"", (i,), ()) for i in range(part)]
        spent: dict[str, list[float]] = {name: [] for name in ("take", "cache", "free", "find", "touch", "evict")}

        for _ in range(REPEAT):
            for name, nanoseconds in cycle(pool, keys).items():
                spent[name].append(nanoseconds)
        medians = "  ".join(f"{statistics.median(times):5.0f}" for times in spent.values())
        print(f"{count:10,}  {medians}")


if __name__ == "__main__":
    main()
