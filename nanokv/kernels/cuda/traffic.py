"""What each launch moves through memory and multiplies, in closed form. tests/cuda/test_traffic.py holds it against counts.

Bytes are those that thread blocks bring on chip or send off it, every address once a block: what a card's memory system is
asked for at most, before the L2 answers some. FLOPs are those of products, two a multiply-add.

Symbols: R rows, K inputs, N outputs, Hq query heads, H key-value heads, G = Hq / H, D head width, S keys of one sequence.
"""

from dataclasses import dataclass, field

from nanokv.kernels.cuda.launches import CODE_GROUP, FEW, FEW_WARPS, MANY_ROWS, PANEL, TILE, queries_of, segments_of
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


def linear(rows: int, inputs: int, outputs: int, weight_bytes: int, bias: bool, row_scales: bool = False) -> dict[str, Traffic]:
    """linear(): the weights once for every 8 rows (every 128 where there are many), x once a panel.

    `weight_bytes` is Matrix.nbytes without int4's words past the last input, which nobody reads; scales of whole rows are
    read by each block that has segments of them. FLOPs are those that are done: of whole panels, and of as many rows as a
    block holds.
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
    padded, again = -(-inputs // 8) * 8, -(-segments // FEW_WARPS) - 1
    weight_bytes += again * panels * PANEL * 2 if row_scales else 0
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


def prefill(
    before: int, rows: int, heads: int, kv_heads: int, dim: int, kv_row_bytes: int, block_size: int, window: int | None = None
) -> dict[str, Traffic]:
    """attend_rows for `rows` tokens of one sequence that has `before` more in a paged cache: K and V once for each of its
    blocks of queries, which hold rows times the G heads of a key-value head and end with a tile.

    Scores are computed for every query of a block over each key that one of them sees, weighted values for what is seen.
    """
    group, line = heads // kv_heads, 4 * heads * dim
    keys = table = pairs = 0
    start = before
    while start < before + rows:
        end = min(before + rows, (start // TILE + 1) * TILE)
        count = (end - start) * group
        for first in range(0, count, queries_of(dim)):
            last = min(first + queries_of(dim), count) - 1
            low = 0 if window is None else max(0, start + first // group - window + 1)
            high = start + last // group + 1
            keys += high - low
            pairs += (last - first + 1) * (high - low)
            table += (high - 1) // block_size - low // block_size + 1
        start = end
    seen = sum(min(position + 1, window or position + 1) for position in range(before, before + rows))
    loads = {"Q": rows * line, "KV": 2 * kv_heads * keys * kv_row_bytes, "table": 4 * kv_heads * table}
    return {"attend_rows": Traffic(loads, {"O": rows * line}, 2 * dim * (kv_heads * pairs + heads * seen))}


def softmax(rows: int, vocab: int) -> dict[str, Traffic]:
    """softmax(): a row is read for its largest and again for its weights, which are written, read back and divided."""
    line = 4 * rows * vocab
    return {"softmax": Traffic({"x": line, "out": line}, {"out": 2 * line})}


def sample(rows: int, vocab: int, penalty: bool) -> dict[str, Traffic]:
    """sample(): the logits, the bits of tokens that occurred where there is a penalty, and the weights, which a block writes
    once and reads back once for each pass of a search; these come from the L2, as sample_passes() says how often."""
    line, bits = 4 * rows * vocab, 4 * rows * -(-vocab // 32)
    loads = {"logits": line, "weights": line, "settings": 16 * rows, "top_k": 4 * rows, "uniform": 4 * rows}
    return {"sample": Traffic(loads | ({"seen": bits} if penalty else {}), {"weights": line, "tokens": 4 * rows})}


def sample_passes(vocab: int, top_k: bool, top_p: bool, min_p: bool) -> int:
    """How often sample() goes over a row's weights: 15 times for two bits of a weight and once for two bits of an id in each
    search, and once for each mass of what a filter left."""
    search, ids = 15, 1
    while 4**ids < vocab:
        ids += 1
    searches = 1 + top_k + top_p
    return searches * (search + ids) + (top_k and top_p) + (top_k or top_p or min_p)


def append_int4(rows: int, heads: int, dim: int, keys: bool) -> dict[str, Traffic]:
    """append_int4(): the tokens once, their codes, lows and spans; the slots aside."""
    x, codes = 4 * rows * heads * dim, rows * heads * -(-dim // 2)
    groups = rows // CODE_GROUP * heads * dim if keys else rows * heads * -(-dim // CODE_GROUP)
    name = "append_keys_int4" if keys else "append_values_int4"
    return {name: Traffic({"x": x}, {"codes": codes, "low": 4 * groups, "span": 4 * groups})}
