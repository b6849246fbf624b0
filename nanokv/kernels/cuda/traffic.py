"""What each launch moves through memory and multiplies, in closed form. tests/cuda/test_traffic.py holds it against counts.

Bytes are those that thread blocks bring on chip or send off it, every address once a block: what a card's memory system is
asked for at most, before the L2 answers some. FLOPs are those of products, two a multiply-add.

Symbols: R rows, K inputs, N outputs, Hq query heads, H key-value heads, G = Hq / H, D head width, S keys of one sequence.
"""

from dataclasses import dataclass, field

from nanokv.kernels.cuda.launches import FEW, MANY_ROWS, PANEL, TILE, segments_of
from nanokv.kernels.cuda.program import FEW_ROWS


@dataclass(frozen=True)
class Traffic:
    """Of one kernel: bytes by tensor and direction, and FLOPs."""

    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    flops: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.loads.values()) + sum(self.stores.values())


def linear(rows: int, inputs: int, outputs: int, weight_bytes: int, bias: bool) -> dict[str, Traffic]:
    """linear(): the weights once for every 8 rows (every 128 where there are many), x once a panel.

    `weight_bytes` is Matrix.nbytes. FLOPs are those that are done: of whole panels, and of as many rows as a block holds.
    """
    panels, segments, x = -(-outputs // PANEL), segments_of(inputs), rows * inputs * 4
    added = {"bias": 4 * outputs * (1 if rows <= FEW else -(-rows // MANY_ROWS))} if bias else {}
    if rows > FEW:
        blocks = -(-rows // MANY_ROWS)
        padded = -(-inputs // 32) * 32
        return {
            "linear_rows": Traffic(
                {"W": blocks * weight_bytes, "x": panels * x, **added},
                {"out": 4 * rows * outputs},
                2 * blocks * MANY_ROWS * padded * panels * PANEL,
            )
        }
    each = next((count for count in FEW_ROWS if count >= rows), FEW_ROWS[-1])
    blocks, sums = -(-rows // each), 4 * segments * rows * outputs
    padded = -(-inputs // 8) * 8
    return {
        "linear_segments": Traffic(
            {"W": blocks * weight_bytes, "x": panels * x}, {"sums": sums}, 2 * blocks * each * padded * panels * PANEL
        ),
        "linear_sum": Traffic({"sums": sums, **added}, {"out": 4 * rows * outputs}),
    }


def decode(seqs: list[int], heads: int, kv_heads: int, dim: int, kv_row_bytes: int, block_size: int) -> dict[str, Traffic]:
    """attend_tiles and combine_tiles for one query in each of sequences of `seqs` keys, in a paged cache without a window.

    `kv_row_bytes` are those of one head of one token of K, or of V, scales included. G at most 8.
    """
    tiles = [-(-seq // TILE) for seq in seqs]
    count, keys = sum(tiles), sum(seqs)
    row, line = 4 * heads * dim, 4 * heads
    blocks = sum(-(-seq // block_size) for seq in seqs)
    partial = {"partial O": count * row, "m": count * line, "l": count * line}
    return {
        "attend_tiles": Traffic(
            {"Q": count * row, "KV": 2 * kv_heads * keys * kv_row_bytes, "table": 4 * kv_heads * blocks},
            partial,
            4 * heads * keys * dim,
        ),
        "combine_tiles": Traffic(partial, {"O": len(seqs) * row}),
    }
