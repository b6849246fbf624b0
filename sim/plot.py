"""Three pictures: the roofline with the algorithms on it, bytes against tile size (the shape of FlashAttention's figure 2,
middle) and bytes against sequence length. Needs matplotlib (the plot extra)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nanokv.errors import NanoKVError, UsageError
from sim.report import queries
from sim.run import Simulation, count
from sim.schedules import get_schedule
from sim.schedules.base import TileSizeError
from sim.shape import Shape, TileSize

TILES = (16, 32, 64, 128, 256, 512)
SEQUENCES = tuple(1 << power for power in range(8, 21))
MARKERS = "os^Dvp*hX<"  # one for each algorithm
HOLLOW: dict[str, Any] = {"fillstyle": "none", "markersize": 9}  # algorithms that cost the same lie on each other


def require_matplotlib() -> None:
    """NanoKVError where the plot extra is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NanoKVError("--plot needs matplotlib: pip install 'nanokv[plot]'") from error


def draw(simulation: Simulation, path: Path, options: dict[str, Any]) -> None:
    """Writes the three panels to a PNG, PDF or SVG file; UsageError where it cannot, and nothing is left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    shape, gpu = simulation.shape, simulation.gpu
    figure.suptitle(
        f"{gpu.name}, {queries(shape)}, batch {shape.batch}, {shape.heads}/{shape.num_kv_heads} heads "
        f"of {shape.head_dim}, {shape.dtype.name}{', causal' if shape.causal else ''}"
    )
    _roofline(left, simulation)
    _against_tile(middle, simulation, options)
    _against_sequence(right, simulation, options)
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error}") from error


def _roofline(axes: Any, simulation: Simulation) -> None:
    gpu, rate = simulation.gpu, simulation.gpu.rate(simulation.shape.dtype.name)
    found = [each.bound.intensity for each in simulation.results.values()]
    ridge = rate / gpu.bandwidth
    low, high = min(0.25, *found) / 2, max(ridge * 4, *found) * 2
    grid = np.geomspace(low, high, 200)
    axes.loglog(grid, np.minimum(rate, grid * gpu.bandwidth) / 1e12, color="black")
    for marker, result in zip(MARKERS, simulation.results.values(), strict=False):
        reached = result.counts.flops / result.bound.seconds / 1e12
        axes.loglog([result.bound.intensity], [reached], marker, label=result.name, **HOLLOW)
    axes.axvline(ridge, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate(f"{ridge:.0f} FLOP/B", (ridge, axes.get_ylim()[0]), rotation=90, xytext=(-12, 6), textcoords="offset points",
                  color="grey", fontsize=8)  # fmt: skip
    axes.set(xlabel="FLOP a byte of HBM", ylabel="TFLOP/s at most", title="roofline")
    _finish(axes)


def _against_tile(axes: Any, simulation: Simulation, options: dict[str, Any]) -> None:
    """A line ends where tiles no longer fit. Two points say nothing of a shape: bytes are on a linear axis."""

    def at(name: str, size: int) -> int:
        rows = min(size, simulation.shape.head_dim) if name.startswith("flash1") else size  # Algorithm 1: Br = min(Bc, D)
        return _bytes(simulation, name, simulation.shape, TileSize(rows, size), options)

    _lines(axes, simulation, TILES, at)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TILES, [str(size) for size in TILES])
    axes.set(xlabel="keys a tile, and as many rows (flash1: at most D)", title="HBM bytes against tile size", ylim=(0, None))
    _finish(axes)


def _against_sequence(axes: Any, simulation: Simulation, options: dict[str, Any]) -> None:
    def at(name: str, seq: int) -> int:
        decode = simulation.shape.rows == 1
        shape = replace(simulation.shape, seq=seq, q_len=1 if decode else seq)
        return _bytes(simulation, name, shape, simulation.results[name].tile, options)

    _lines(axes, simulation, SEQUENCES, at)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="sequence length", title="HBM bytes against sequence length")
    _finish(axes)


def _lines(axes: Any, simulation: Simulation, values: Sequence[int], at: Callable[[str, int], int]) -> None:
    for marker, name in zip(MARKERS, simulation.results, strict=False):
        points = []
        for value in values:
            try:
                points.append((value, at(name, value) / 1e9))
            except UsageError:  # a tile that does not fit, or that blocks of the cache do not divide
                continue
        if points:
            axes.plot(*zip(*points, strict=True), f"{marker}-", label=name, **HOLLOW)
    axes.set_ylabel("GB")


def _bytes(simulation: Simulation, name: str, shape: Shape, tile: TileSize, options: dict[str, Any]) -> int:
    gpu = simulation.gpu
    schedule = get_schedule(name, **{"multiprocessors": gpu.multiprocessors, **options})
    schedule.check(shape, tile)
    if not schedule.on_chip(shape, tile).fits(gpu):
        raise TileSizeError(f"{name}: tile {tile} does not fit")
    return count(schedule, shape, tile)[0].total.hbm


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
