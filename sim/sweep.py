"""Many points: axes such as tile=16..512 and seq=1k..1m, crossed, counted in one process, several, or on a Dask cluster.

A point is a plain description, its rows depend on nothing else, and they come back in the order of the points: so the
result is the same however it was computed.
"""

import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanokv.errors import NanoKVError, UsageError
from sim.formats import get_format
from sim.gpus import GPU, get_gpu
from sim.memory import Values
from sim.report import csv_rows
from sim.run import default_algorithms, simulate
from sim.schedules.base import TileSizeError
from sim.shape import Shape, TileSize, parse_count, parse_tile

NUMBERS = ("seq", "q_len", "heads", "kv_heads", "head_dim", "batch", "window")
AXES = ("tile", "gpu", "dtype", "kv_dtype", *NUMBERS)
MOST_POINTS = 100_000
MOST_WORKERS = 1024


@dataclass(frozen=True)
class Point:
    """One call of simulate(), counted only."""

    shape: Shape
    gpu: GPU
    tile: TileSize | None
    algorithms: tuple[str, ...]
    options: Mapping[str, Any]
    labels: Mapping[str, str]


def parse_axis(text: str) -> tuple[str, list[str]]:
    """ "seq=1k..1m" (doubling) or "dtype=float16,int8" -> (name, values)."""
    name, equals, values = text.partition("=")
    if not equals or name not in AXES:
        raise UsageError(f"sweep {text!r} is not NAME=VALUES with NAME one of {', '.join(AXES)}")
    found = re.fullmatch(r"(\w+)\.\.(\w+)", values)
    if found:
        if name not in (*NUMBERS, "tile"):
            raise UsageError(f"sweep {text!r}: {name} is not a number, list its values with commas")
        low, high = (parse_count(part, f"sweep {text!r}") for part in found.groups())
        if not 1 <= low <= high:
            raise UsageError(f"sweep {text!r}: a range goes from 1 or more up to as much or more")
        return name, [str(low << i) for i in range((high // low).bit_length())]
    parts = [part.strip() for part in values.split(",")]
    if not all(parts):
        raise UsageError(f"sweep {text!r} has an empty value")
    return name, [str(parse_count(part, f"sweep {text!r}")) if name in NUMBERS else part for part in parts]


def points(axes: Sequence[str], shape: Shape, gpu: GPU, tile: TileSize | None, algorithms: Sequence[str],
           options: Mapping[str, Any]) -> list[Point]:  # fmt: skip
    """Every combination of the axes' values, the last axis fastest; what no axis names is as given."""
    parsed = [parse_axis(axis) for axis in axes]
    names = [name for name, _ in parsed]
    if len(set(names)) < len(names):
        raise UsageError(f"sweep names an axis twice: {' '.join(axes)}")
    total = 1
    for _, values in parsed:
        total *= len(values)
    if total > MOST_POINTS:
        raise UsageError(f"{total} points are more than {MOST_POINTS}: give fewer values")
    made = []
    for chosen in itertools.product(*(values for _, values in parsed)):
        labels = dict(zip(names, chosen, strict=True))
        made.append(Point(*_place(labels, shape, gpu, tile), tuple(algorithms), options, labels))
    return made


def _place(labels: Mapping[str, str], shape: Shape, gpu: GPU, tile: TileSize | None) -> tuple[Shape, GPU, TileSize | None]:
    changes: dict[str, Any] = {name: int(value) for name, value in labels.items() if name in NUMBERS}
    changes |= {name: get_format(labels[name]) for name in ("dtype", "kv_dtype") if name in labels}
    # A field that was left to follow another follows its new value.
    given = shape.as_dict()
    for follower, leader in (("q_len", "seq"), ("kv_heads", "heads"), ("kv_dtype", "dtype")):
        if leader in changes and follower not in changes and given[follower] == given[leader]:
            changes[follower] = None
    return (
        replace(shape, **changes),
        get_gpu(labels["gpu"]) if "gpu" in labels else gpu,
        parse_tile(labels["tile"]) if "tile" in labels else tile,
    )


def rows_at(point: Point) -> list[dict[str, Any]]:
    """The CSV rows of one point; an algorithm whose tile does not fit there has none."""
    rows = []
    options = dict(point.options)
    for name in point.algorithms or default_algorithms(point.shape, options.pop("backward", False)):
        try:
            found = simulate(point.shape, point.gpu, [name], point.tile, values=Values.NONE, **options)
        except TileSizeError:
            continue
        rows += csv_rows(found)
    return rows


def run_points(
    made: Sequence[Point], workers: str | None = None, advance: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """The rows of every point in order. `workers`: None or "1" is this process, a number that many by joblib, anything else
    the address of a Dask scheduler. `advance` is called as each point is done."""
    rows: list[dict[str, Any]] = []
    for each in _results(made, workers):
        rows += each
        advance()
    return rows


def _results(made: Sequence[Point], workers: str | None) -> Iterator[list[dict[str, Any]]]:
    if workers is None or workers == "1":
        return map(rows_at, made)
    if workers.isascii() and workers.isdigit():
        if int(workers) < 1:
            raise UsageError("--workers must be at least 1")
        if int(workers) > MOST_WORKERS:
            raise UsageError(f"--workers {workers} is more than {MOST_WORKERS} processes")
        joblib = _extra("joblib")
        return joblib.Parallel(n_jobs=int(workers), return_as="generator")(joblib.delayed(rows_at)(point) for point in made)
    if not re.fullmatch(r"[a-z]+://\S+|[^\s/]+:\d+", workers):
        raise UsageError(f"--workers {workers!r} is neither a number of processes nor an address such as tcp://HOST:PORT")
    return _on_dask(made, workers)


def _on_dask(made: Sequence[Point], address: str) -> Iterator[list[dict[str, Any]]]:
    distributed = _extra("distributed")
    try:
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise NanoKVError(f"no Dask scheduler answers at {address}: give a number of processes or tcp://HOST:PORT") from error
    with client:
        for future in client.map(rows_at, made, pure=False):
            yield future.result()


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NanoKVError(f"--workers needs {module}: pip install 'nanokv[sweep]'") from error
