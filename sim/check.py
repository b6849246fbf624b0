"""Measured attention latencies that no hardware could have produced.

A kernel must bring K and V from HBM and multiply what it may see, so it takes at least bytes / bandwidth and at least
operations / rate. A latency below that was measured on something else: keys without values, fewer heads, another card. A
benchmark that repeats one call finds what its L2 kept from the call before, so of a row's bytes all but the L2's capacity
are charged to HBM, and a row whose bytes all fit in L2 is set aside and counted; `cold` says that caches were flushed.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nanokv.errors import NanoKVError, UsageError
from sim.formats import Format
from sim.gpus import GPU
from sim.roofline import minimum_bytes, minimum_flops
from sim.shape import Shape

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
DECODE_LENGTH, PREFILL_LENGTH = ("kv_len", "context"), ("seq", "seq_len")


@dataclass(frozen=True)
class Columns:
    """Which column holds what. `length` is the keys a query sees; None looks for kv_len (decode) or seq (prefill)."""

    time: str = "us"
    unit: str = "us"
    batch: str = "batch"
    heads: str = "q_heads"
    kv_heads: str = "kv_heads"
    length: str | None = None
    head_dim: str = "head_dim"


@dataclass(frozen=True)
class Row:
    """A measurement: its line in the file, its shape and seconds."""

    line: int
    shape: Shape
    seconds: float


@dataclass(frozen=True)
class Impossible:
    """A row faster than its bound of `seconds`; `limit` is "memory" or "compute"."""

    row: Row
    seconds: float
    limit: str

    @property
    def factor(self) -> float:
        """How many times faster than possible."""
        return self.seconds / self.row.seconds


@dataclass(frozen=True)
class Verdict:
    """`rows` were judged and `set_aside` not, since their bytes fit in L2."""

    rows: int
    set_aside: int
    impossible: list[Impossible]


def judge(rows: Iterator[Row], gpu: GPU, *, cold: bool = False, per_query_head: bool = False) -> Verdict:
    """Every row against its two bounds. `per_query_head` charges K and V to each query head (to see a check fail)."""
    rate_of: dict[str, float] = {}
    held = 0 if cold or gpu.l2 is None else gpu.l2
    judged = set_aside = 0
    impossible = []
    for row in rows:
        dtype = row.shape.dtype.name
        rate = rate_of.setdefault(dtype, gpu.rate(dtype))
        nbytes = minimum_bytes(row.shape, per_query_head=per_query_head)
        compute = minimum_flops(row.shape) / rate
        memory = max(0, nbytes - held) / gpu.bandwidth
        fits = held > 0 and nbytes <= held
        set_aside += fits
        judged += not fits
        bound = max(memory, compute)
        if row.seconds < bound:
            impossible.append(Impossible(row, bound, "memory" if memory >= compute else "compute"))
    return Verdict(judged, set_aside, impossible)


def read_rows(path: Path, columns: Columns, *, causal: bool, head_dim: int, dtype: Format, kv_dtype: Format | None = None,
              only: Mapping[str, str] | None = None) -> Iterator[Row]:  # fmt: skip
    """The rows of a CSV whose columns equal `only`; decode where its length column is kv_len, prefill where it is seq.

    UsageError for a column or value that is not there, NanoKVError for a file or a row that cannot be read: it names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file, strict=True)
            names = [name.strip() for name in table.fieldnames or []]
            table.fieldnames = names
            length, decode = _length_column(path, names, columns)
            for name in (columns.time, columns.batch, columns.heads, columns.kv_heads, *(only or {})):
                if name not in names:
                    raise UsageError(f"{path} has no column {name!r}; it has {', '.join(names) or 'none'}")
            for raw in table:
                if any((raw[name] or "").strip() != value for name, value in (only or {}).items()):
                    continue
                yield _row(path, table.line_num, raw, columns, length, decode, causal, head_dim, dtype, kv_dtype)
    except OSError as error:
        raise NanoKVError(f"cannot read {path}: {error.strerror or error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise NanoKVError(f"{path} is not a CSV file: {error}") from error


def _length_column(path: Path, names: list[str], columns: Columns) -> tuple[str, bool]:
    """The column with the keys, and whether a row is decoding."""
    candidates = (*DECODE_LENGTH, *PREFILL_LENGTH) if columns.length is None else (columns.length,)
    for name in candidates:
        if name in names:
            return name, name not in PREFILL_LENGTH
    raise UsageError(f"{path} has no column {' or '.join(candidates)}; it has {', '.join(names) or 'none'}")


def _row(path: Path, line: int, raw: Mapping[str, str], columns: Columns, length: str, decode: bool, causal: bool,
         head_dim: int, dtype: Format, kv_dtype: Format | None) -> Row:  # fmt: skip
    seconds = _number(path, line, raw, columns.time) * UNITS[columns.unit]
    if not 0 < seconds < float("inf"):
        raise NanoKVError(f"{path} line {line}: {columns.time} {raw[columns.time]!r} is not a positive time")
    batch, heads, kv_heads, seq = (
        _whole(path, line, raw, name) for name in (columns.batch, columns.heads, columns.kv_heads, length)
    )
    width = _whole(path, line, raw, columns.head_dim) if columns.head_dim in raw else head_dim
    try:
        shape = Shape(seq, heads, width, 1 if decode else seq, kv_heads, batch, causal or decode, None, dtype, kv_dtype)
    except UsageError as error:
        raise NanoKVError(f"{path} line {line}: {error}") from error
    return Row(line, shape, seconds)


def _number(path: Path, line: int, raw: Mapping[str, str], name: str) -> float:
    try:
        return float(raw[name])
    except (TypeError, ValueError) as error:
        raise NanoKVError(f"{path} line {line}: {name} {raw[name]!r} is not a number") from error


def _whole(path: Path, line: int, raw: Mapping[str, str], name: str) -> int:
    value = _number(path, line, raw, name)
    if not value.is_integer() or value < 1:
        raise NanoKVError(f"{path} line {line}: {name} {raw[name]!r} is not a whole number above 0")
    return int(value)


def worst(verdict: Verdict, limit: int) -> list[Impossible]:
    """The rows that are the most times faster than possible."""
    return list(islice(sorted(verdict.impossible, key=lambda each: -each.factor), limit))


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """For --json: seconds, and the line of the file."""
    return {
        "rows": verdict.rows,
        "set_aside": verdict.set_aside,
        "impossible": [
            {"line": each.row.line, **each.row.shape.as_dict(), "measured_s": each.row.seconds, "bound_s": each.seconds,
             "limit": each.limit, "factor": each.factor}
            for each in verdict.impossible
        ],
    }  # fmt: skip
