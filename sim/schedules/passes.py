"""The kernels that standard attention is made of, forward and backward: each reads its operands and writes its result once.

What a product reads again for another row or key tile comes from a cache, as the paper counts (naive.py).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from sim.fold import product
from sim.memory import Machine, Range, Tensor
from sim.schedules.base import heads_of, row_blocks
from sim.shape import Shape, TileSize, key_tiles, row_tiles

Scale = np.float32 | int


def outer(machine: Machine, shape: Shape, tile: TileSize, left: Tensor, right: Tensor, out: Tensor,
          scale: Scale = 1) -> None:  # fmt: skip
    """out [N, S] = scale left [N, D] @ right [S, D]^T, right by key-value head."""
    for kv, head, rows in row_blocks(machine, shape, tile):
        again = head > kv * shape.group or rows[0] > 0
        with machine.load(left, head, rows) as a:
            for keys in key_tiles(shape, tile):
                count = (rows[1] - rows[0]) * (keys[1] - keys[0])
                with machine.load(right, kv, keys, cached=again) as b, machine.hold(out.name, count):
                    value = product(a.values * scale, b.values.T) if machine.computes(kv) else None
                    machine.store(out, head, rows, value, keys)
                    machine.multiply(2 * count * shape.head_dim)


def over_keys(machine: Machine, shape: Shape, tile: TileSize, square: Tensor, right: Tensor, out: Tensor,
              scale: Scale = 1) -> None:  # fmt: skip
    """out [N, D] = scale square [N, S] @ right [S, D], right by key-value head."""
    for kv, head, rows in row_blocks(machine, shape, tile):
        again = head > kv * shape.group or rows[0] > 0
        total = np.zeros((rows[1] - rows[0], shape.head_dim), dtype=np.float32)
        with machine.hold(out.name, total.size):
            for keys in key_tiles(shape, tile):
                with machine.load(square, head, rows, keys) as a, machine.load(right, kv, keys, cached=again) as b:
                    if machine.computes(kv):
                        total += product(a.values, b.values)
                    machine.multiply(2 * (rows[1] - rows[0]) * (keys[1] - keys[0]) * shape.head_dim)
            machine.store(out, head, rows, total * scale if machine.computes(kv) else None)


def over_rows(machine: Machine, shape: Shape, tile: TileSize, square: Tensor, right: Tensor, out: Tensor,
              scale: Scale = 1) -> None:  # fmt: skip
    """out [S, D] = scale times the sum over the group of square [N, S]^T @ right [N, D]."""
    for kv in machine.each(shape.all_kv_heads):
        for keys in key_tiles(shape, tile):
            total = np.zeros((keys[1] - keys[0], shape.head_dim), dtype=np.float32)
            with machine.hold(out.name, total.size):
                for head in heads_of(shape, kv):
                    for rows in row_tiles(shape, tile):
                        again = keys[0] > 0
                        with machine.load(square, head, rows, keys) as a, machine.load(right, head, rows, cached=again) as b:
                            if machine.computes(kv):
                                total += product(a.values.T, b.values)
                            machine.multiply(2 * (rows[1] - rows[0]) * (keys[1] - keys[0]) * shape.head_dim)
                machine.store(out, kv, keys, total * scale if machine.computes(kv) else None)


def elementwise(machine: Machine, shape: Shape, tile: TileSize, sources: Sequence[Tensor], results: Sequence[Tensor],
                value: Callable[[np.ndarray, Range, Range], np.ndarray] | None = None) -> None:  # fmt: skip
    """Reads the sources and writes the results, all [N, S]; the last one has `value` of the first source, its rows and keys;
    without `value` it shares the source's data and nothing is computed."""
    for kv, head, rows in row_blocks(machine, shape, tile):
        for keys in key_tiles(shape, tile):
            with ExitStack() as loaded:
                first, *_ = [loaded.enter_context(machine.load(source, head, rows, keys)) for source in sources]
                for result in results[:-1]:
                    machine.store(result, head, rows, None, keys)
                new = value(first.values, rows, keys) if value and machine.computes(kv) else None
                machine.store(results[-1], head, rows, new, keys)
