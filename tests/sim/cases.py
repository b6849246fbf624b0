"""What the simulator's tests draw from: shapes, tiles and algorithms, small enough to run."""

from hypothesis import strategies as st

from nanokv.errors import UsageError
from sim.formats import COMPUTE, FORMATS
from sim.memory import Counts, Machine, Moved, Values
from sim.problem import make_problem
from sim.schedules import BACKWARD, PREFILL, Schedule, get_schedule
from sim.shape import Shape, TileSize

FORWARD_TILED = ("flash1", "flash2", "decode", "decode-per-head", "split-kv", "paged")


@st.composite
def shapes(draw: st.DrawFn, kind: str = "prefill") -> Shape:
    """`kind`: prefill (with or without a past), decode or backward."""
    seq = draw(st.integers(1, 300))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 320)) if causal else None
    rows = {"decode": 1, "backward": seq}.get(kind) or draw(st.integers(1, seq))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3]))
    dtype, kv_dtype = FORMATS[draw(st.sampled_from(COMPUTE))], draw(st.none() | st.sampled_from(list(FORMATS.values())))
    return Shape(
        seq, kv_heads * group, draw(st.sampled_from([4, 16, 33])), rows, kv_heads, draw(st.integers(1, 2)), causal, window,
        dtype, kv_dtype,
    )  # fmt: skip


tiles = st.builds(TileSize, st.sampled_from([1, 7, 16, 64, 128, 500]), st.sampled_from([16, 30, 64, 128, 512]))
options = st.fixed_dictionaries(
    {
        "mask": st.booleans(),
        "dropout": st.booleans(),
        "init": st.booleans(),
        "stats": st.booleans(),
        "splits": st.sampled_from([None, 1, 2, 3, 100]),
        "block_size": st.sampled_from([1, 16, 32, 128, 512]),
    }
)


@st.composite
def cases(draw: st.DrawFn, name: str) -> tuple[Schedule, Shape, TileSize]:
    """The algorithm called `name` with options, a shape and a tile that it can run."""
    kind = "backward" if name in BACKWARD else "decode" if name not in PREFILL else "prefill"
    shape, tile = draw(shapes(kind)), draw(tiles)
    schedule = get_schedule(name, **draw(options))
    try:
        schedule.check(shape, tile)
    except UsageError:  # blocks of a paged cache that do not divide the tile
        tile = TileSize(tile.rows, 512)
    return schedule, shape, tile


def counted(schedule: Schedule, shape: Shape, tile: TileSize, values: Values = Values.NONE, l2: int | None = None) -> Counts:
    """What the loop counts on a machine without limits."""
    machine = Machine(l2=l2, values=values)
    schedule.run(machine, make_problem(shape, values), tile)
    return machine.finish()


def plain(counts: Counts) -> object:
    """Counts without tensors of which no byte moved, for comparison."""
    kernels = {
        name: ({tensor: moved for tensor, moved in kernel.tensors.items() if moved != Moved()}, kernel.flops)
        for name, kernel in counts.kernels.items()
    }
    return kernels, counts.sram_peak, counts.register_peak
