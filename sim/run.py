"""One attention shape through several algorithms on one GPU: counts, values and bounds side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanokv.errors import UsageError
from nanokv.kv.tile import TILE
from sim.gpus import GPU
from sim.memory import Counts, Machine, Moved, Values
from sim.problem import Problem, make_problem
from sim.roofline import Bound, lower_bound
from sim.schedules import BACKWARD, DECODE, PREFILL, Schedule, get_schedule
from sim.schedules.base import TileSizeError, largest_square
from sim.shape import Shape, TileSize

LOOP_STEPS = 1 << 13  # tile pairs that counting goes through one by one; beyond, the closed form, which is proven equal
VALUE_STEPS = 1 << 12  # the same for computing
VALUE_FLOPS = 3 << 29  # operations that all algorithms together may compute without being told to
VALUE_PAIRS = 1 << 24  # elements of S that they may hold
MOST_PAIRS = 1 << 30  # and those that nobody may ask for
CACHE_STEPS = 1 << 21  # tile pairs through a simulated L2


@dataclass(frozen=True)
class Result:
    """One algorithm. `looped`: counted by its loop rather than by the closed form. `error`: the largest difference from the
    float64 reference, over outputs or gradients; None when nothing was computed. `same_bits`: whether the output has the
    runtime's bits; None where it folds other tiles."""

    name: str
    tile: TileSize
    counts: Counts
    bound: Bound
    looped: bool
    backward: bool
    error: float | None = None
    same_bits: bool | None = None

    @property
    def hbm(self) -> int:
        return self.counts.total.hbm


@dataclass(frozen=True)
class Simulation:
    """`left_out`: algorithm -> why it has no result; `values`: what was computed; `l2`: whether HBM bytes are
    those behind a simulated L2."""

    shape: Shape
    gpu: GPU
    values: Values
    results: Mapping[str, Result]
    left_out: Mapping[str, str]
    l2: bool = False

    @property
    def ratio(self) -> float | None:
        """Bytes of the naive algorithm to those of the tiled one (flash2, or decode by group)."""
        tiled = self.results.get("decode" if self.shape.rows == 1 else "flash2")
        naive = self.results.get("naive")
        return naive.hbm / tiled.hbm if naive and tiled else None

    @property
    def max_abs_error(self) -> float | None:
        """Over all algorithms that were computed."""
        errors = [each.error for each in self.results.values() if each.error is not None]
        return max(errors) if errors else None


def default_algorithms(shape: Shape, backward: bool = False) -> tuple[str, ...]:
    """Decoding's for one query row, prefill's otherwise."""
    return (DECODE if shape.rows == 1 else PREFILL) + (BACKWARD if backward else ())


def simulate(
    shape: Shape,
    gpu: GPU,
    algorithms: Sequence[str] | None = None,
    tile: TileSize | None = None,
    *,
    values: Values | None = None,
    l2: bool = False,
    backward: bool = False,
    seed: int = 0,
    **options: Any,
) -> Simulation:
    """Runs each algorithm; `tile` None lets each choose, `values` None computes what takes well under a second.

    `options` are the schedules' own: mask, dropout, init, stats, splits, block_size. UsageError where a tile does not fit,
    naming the largest that does; of the default algorithms only the tiled one must fit, the others are left out and say why.
    """
    names = tuple(algorithms) if algorithms else default_algorithms(shape, backward)
    chosen: dict[str, tuple[Schedule, TileSize]] = {}
    left_out: dict[str, str] = {}
    gpu.rate(shape.dtype.name)  # before anything is counted
    for name in names:
        schedule = get_schedule(name, **{"multiprocessors": gpu.multiprocessors, **options})
        try:
            chosen[name] = schedule, _tile_for(schedule, shape, tile, gpu)
        except UsageError as error:
            if algorithms or name in ("flash2", "decode"):
                raise
            left_out[name] = str(error).removeprefix(f"{name}: ")
    mode = _affordable(shape, chosen) if values is None else values
    if mode is not Values.NONE and _heads(shape, mode) * shape.rows * shape.seq > MOST_PAIRS:
        raise UsageError(f"{shape.rows} x {shape.seq} scores a head are too many to compute: use --count-only")
    problem = make_problem(shape, mode, seed)
    results = {name: _run(schedule, shape, gpu, size, problem, l2) for name, (schedule, size) in chosen.items()}
    return Simulation(shape, gpu, mode, results, left_out, l2)


def _tile_for(schedule: Schedule, shape: Shape, tile: TileSize | None, gpu: GPU) -> TileSize:
    if tile is None:
        tile = schedule.auto_tile(shape, gpu)
        schedule.check(shape, tile)
        return tile
    schedule.check(shape, tile)
    need = schedule.on_chip(shape, tile)
    if need.fits(gpu):
        return tile
    short = "SRAM" if need.sram > gpu.sram else "registers"
    wanted, have = (need.sram, gpu.sram) if short == "SRAM" else (need.registers, gpu.registers)
    largest = largest_square(schedule, shape, gpu)
    fitting = f"the largest that fits is {largest}x{largest}" if largest else "no tile fits"
    raise TileSizeError(
        f"{schedule.name}: tile {tile} needs {wanted} bytes of {short}, {gpu.name} has {have} a block; {fitting}"
    )


def _heads(shape: Shape, mode: Values) -> int:
    return shape.all_heads if mode is Values.ALL else shape.group


def _affordable(shape: Shape, chosen: Mapping[str, tuple[Schedule, TileSize]]) -> Values:
    """ALL heads, ONE, or NONE: the most that takes well under a second."""
    steps = sum(schedule.steps(shape, tile) for schedule, tile in chosen.values())
    for mode in (Values.ALL, Values.ONE):
        heads = _heads(shape, mode)
        pairs = heads * shape.rows * shape.seq
        cheap = 4 * pairs * shape.head_dim * len(chosen) <= VALUE_FLOPS and pairs <= VALUE_PAIRS
        if cheap and steps * heads // shape.group <= VALUE_STEPS:
            return mode
    return Values.NONE


def count(schedule: Schedule, shape: Shape, tile: TileSize) -> tuple[Counts, bool]:
    """Without values, on a machine without limits -> counts, and whether the loop itself ran."""
    if schedule.steps(shape, tile) > LOOP_STEPS:
        return schedule.closed_form(shape, tile), False
    machine = Machine()
    schedule.run(machine, Problem(shape, Values.NONE), tile)
    return machine.finish(), True


def _run(schedule: Schedule, shape: Shape, gpu: GPU, tile: TileSize, problem: Problem, l2: bool) -> Result:  # fmt: skip
    cache = gpu.l2 if l2 else None
    if l2 and cache is None:
        raise UsageError(f"{gpu.name} has no L2 in its preset: leave out --l2 or choose another GPU")
    error, same_bits = None, None
    steps = schedule.steps(shape, tile)
    if cache and steps * shape.all_kv_heads > CACHE_STEPS:
        raise UsageError(f"{schedule.name}: {steps * shape.all_kv_heads} tile steps are too many for an L2 that is simulated; "
                         "use a larger tile, fewer heads or a shorter sequence")  # fmt: skip
    if problem.values is Values.NONE and cache is None:
        counts, looped = count(schedule, shape, tile)
    else:
        machine = Machine(gpu.sram, gpu.registers, cache, problem.values)
        outputs = schedule.run(machine, problem, tile)
        counts, looped = machine.finish(), True
        if outputs:
            error = problem.error(outputs)
            if tile.keys == TILE and schedule.name in ("flash2", "decode", "decode-per-head", "paged"):
                same_bits = bool(np.array_equal(outputs["O"], problem.runtime))
    bound = lower_bound(counts.total.hbm, counts.flops, gpu, shape.dtype.name)
    return Result(schedule.name, tile, counts, bound, looped, schedule.backward, error, same_bits)


def as_dict(simulation: Simulation) -> dict[str, Any]:
    """The object that --json prints; sizes in bytes, time in seconds."""

    def moved(each: Moved) -> dict[str, int]:
        return {
            "hbm_read_bytes": each.hbm_read, "hbm_write_bytes": each.hbm_write,
            "sram_read_bytes": each.sram_read, "sram_write_bytes": each.sram_write,
        }  # fmt: skip

    def algorithm(result: Result) -> dict[str, Any]:
        total = result.counts.total
        return {
            "hbm_read_bytes": total.hbm_read,
            "hbm_write_bytes": total.hbm_write,
            "hbm_bytes": total.hbm,
            "sram_peak_bytes": result.counts.sram_peak,
            "flops": result.counts.flops,
            "intensity": result.bound.intensity,
            "bound": result.bound.kind,
            "time_s": result.bound.seconds,
            "per_tensor": {name: moved(each) for name, each in result.counts.per_tensor().items()},
        }

    return {
        "gpu": simulation.gpu.name,
        "shape": simulation.shape.as_dict(),
        "algorithms": {name: algorithm(result) for name, result in simulation.results.items()},
        "ratio_naive_to_tiled": simulation.ratio,
        "max_abs_error": simulation.max_abs_error,
    }
