"""How much HBM attention needs at once, not how much it moves."""

from sim.memory import Counts
from sim.schedules.base import STATISTIC, row_bytes
from sim.shape import Shape

SQUARES = frozenset({"S", "S masked", "P", "P dropped", "dP", "dP dropped", "dS", "dS masked"})
LINES = frozenset({"Q", "O", "dO", "dQ"})
STATISTICS = frozenset({"l", "m", "L", "D"})


def hbm_footprint(counts: Counts, shape: Shape) -> int:
    """Bytes of all tensors that a schedule touches, K and V with their scales included; nothing is freed in between."""
    lines = shape.all_heads * shape.rows
    sizes = {
        **dict.fromkeys(SQUARES, lines * shape.dtype.row_bytes(shape.seq)),
        **dict.fromkeys(LINES, lines * shape.dtype.row_bytes(shape.head_dim)),
        **dict.fromkeys(STATISTICS, lines * STATISTIC.row_bytes(1)),
        **dict.fromkeys(("K", "V"), shape.all_kv_heads * shape.seq * row_bytes(shape, shape.kv)),
        **dict.fromkeys(("dK", "dV"), shape.all_kv_heads * shape.seq * shape.dtype.row_bytes(shape.head_dim)),
        "dropout mask": lines * shape.seq,
    }
    total = 0
    for name, moved in counts.per_tensor().items():
        if name.startswith("partial"):
            total += moved.sram_write
        elif "unused slots" in name:
            total += moved.sram_read
        elif name == "block table":
            total += moved.sram_read // shape.num_kv_heads  # each reads the sequence's own
        elif name not in ("K scales", "V scales"):
            total += sizes[name]
    return total


# Elements of N x D, of N x N and float32 values of N that training keeps at its peak. Fitted on the very rows of table 21 that
# they are compared with: they confirm the growth in N and the units, not the count of buffers. Four N x N matrices read as
# S, P and their gradients; eight N x D ones are the inputs, the output and their gradients, the rest work space.
PYTORCH, FLASH_SHORT, FLASH = (10, 4, 0), (11, 0, 0), (13, 0, 2)
FLASH_SHORT_UNTIL = 256


def training_peak(shape: Shape, *, flash: bool) -> int:
    """Bytes at the peak of one forward and backward pass (FlashAttention, arXiv 2205.14135, table 21)."""
    lines, squares, statistics = PYTORCH if not flash else FLASH_SHORT if shape.seq <= FLASH_SHORT_UNTIL else FLASH
    row = lines * shape.dtype.row_bytes(shape.head_dim) + squares * shape.dtype.row_bytes(shape.seq)
    return shape.all_heads * shape.seq * (row + statistics * STATISTIC.row_bytes(1))
