"""Traces of requests: when each came, how long its prompt and its output were, and which prompts begin alike.

Three kinds of file: CSV with a timestamp, context tokens and generated tokens (the Azure LLM inference traces; other names
of the columns are known, and any can be given), the same without arrivals, and JSON lines with the ids of a prompt's
blocks (the Mooncake traces: milliseconds, blocks of 512 tokens, the last one perhaps not full). A file is read whole and
checked before anything is replayed.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from nanokv.errors import NanoKVError, UsageError
from nanokv.files import read_text

HASH_BLOCK = 512  # tokens that an id of Mooncake's traces names
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Headers as they are known, without case, spaces and signs: Azure; Vidur; BurstGPT; Mooncake's names in a CSV.
KNOWN: Mapping[str, tuple[str, ...]] = {
    "arrival": ("timestamp", "arrivedat", "arrival", "arrivaltime"),
    "prompt": ("contexttokens", "numprefilltokens", "requesttokens", "inputlength", "prompttokens", "inputtokens"),
    "output": ("generatedtokens", "numdecodetokens", "responsetokens", "outputlength", "outputtokens", "completiontokens"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """`arrival` in seconds after the first request, tokens of prompt and output. `prefix` names the prompt's blocks, each
    with all that stands before it: two requests share as much as the beginnings of these are equal."""

    arrival: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def cached(self) -> int:
        """Tokens whose K and V are there when it ends: the last one of the output is never fed."""
        return self.prompt + max(self.output, 1) - 1


@dataclass(frozen=True)
class Sharing:
    """Blocks of prompts that a trace names, and how many of them are different, each with all that stands before it."""

    blocks: int
    unique: int

    @property
    def hit_rate(self) -> float:
        """The part of the blocks that a cache which never evicts finds."""
        return 1 - self.unique / self.blocks


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. `hash_block` is the tokens of a block that the file names, None where it names none."""

    name: str
    requests: tuple[Request, ...]
    hash_block: int | None = None
    timed: bool = True  # whether the file has arrivals

    def sharing(self) -> Sharing | None:
        """None where no blocks are named."""
        nodes = [node for request in self.requests for node in request.prefix]
        return Sharing(len(nodes), len(set(nodes))) if nodes else None


def read_trace(path: Path, columns: Mapping[str, str] | None = None, hash_block: int = HASH_BLOCK) -> Trace:
    """Reads a trace; `columns` names the columns of a CSV (arrival, prompt, output) that are not known by themselves.

    NanoKVError names the file, the line and the field for anything that is missing, negative or no number, and for a file
    without requests. UsageError for columns that the file does not have.
    """
    text = read_text(path, NanoKVError).removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        if columns:
            raise UsageError(f"{path} is JSON lines: --columns is for CSV")
        requests, timed = _read_json_lines(text, path, hash_block), True
    else:
        requests, timed = _read_csv(text, path, columns or {})
    if not requests:
        raise NanoKVError(f"{path} holds no requests")
    first = min(request.arrival for request in requests)
    shifted = (replace(request, arrival=request.arrival - first) for request in requests)
    named = hash_block if any(request.prefix for request in requests) else None
    return Trace(path.name, tuple(sorted(shifted, key=lambda request: request.arrival)), named, timed)


def _read_csv(text: str, path: Path, columns: Mapping[str, str]) -> tuple[list[Request], bool]:
    """Requests as they stand in the file, and whether it has arrivals."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    requests = []
    try:
        at = _find_columns(next(rows, []), path, columns)
        for cells in rows:
            where = f"{path}, line {rows.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            found = {field: cells[column] if column < len(cells) else "" for field, (_, column) in at.items()}
            arrival = _seconds(found["arrival"], f"{where}: {at['arrival'][0]}") if "arrival" in at else 0.0
            prompt, output = (_whole(found[field], f"{where}: {at[field][0]}") for field in ("prompt", "output"))
            requests.append(_request(arrival, prompt, output, (), where))
    except csv.Error as error:
        raise NanoKVError(f"{path}, line {rows.line_num} is not CSV: {error}") from error
    return requests, "arrival" in at


def _find_columns(header: list[str], path: Path, given: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Where arrival (which may be missing), prompt and output stand: field -> (name of the column, its place)."""
    names = [name.strip() for name in header]
    plain = ["".join(letter for letter in name.lower() if letter.isalnum()) for name in names]
    found = {}
    for field, known in KNOWN.items():
        if field in given:
            if given[field] not in names:
                raise UsageError(f"{path} has no column {given[field]!r}: it has {', '.join(names) or 'none'}")
            places = [names.index(given[field])]
        else:
            places = [place for place, name in enumerate(plain) if name in known]
        if len(places) > 1:
            raise NanoKVError(
                f"{path}: {' and '.join(names[place] for place in places)} may both be the {field}: name it with --columns"
            )
        if places:
            found[field] = (names[places[0]], places[0])
        elif field != "arrival":
            shown = ", ".join(names) if any(names) else "no columns"
            raise NanoKVError(f"{path} has no column for the {field} tokens ({shown}): name it with --columns {field}=NAME")
    return found


def _read_json_lines(text: str, path: Path, hash_block: int) -> list[Request]:
    requests: list[Request] = []
    tree: dict[tuple[int, int], int] = {}  # (node of the block before, id) -> node
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        where = f"{path}, line {line}"
        row = _object(content, where)
        arrival = _seconds(row.get("timestamp"), f"{where}: timestamp") / 1000
        prompt, output = (_whole(row.get(name), f"{where}: {name}") for name in ("input_length", "output_length"))
        node, prefix = -1, []
        for each in _hash_ids(row.get("hash_ids"), prompt, hash_block, where):
            node = tree.setdefault((node, each), len(tree))
            prefix.append(node)
        requests.append(_request(arrival, prompt, output, tuple(prefix), where))
    return requests


def _object(content: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise NanoKVError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise NanoKVError(f"{where} is not a JSON object")
    return row


def _hash_ids(value: Any, prompt: int, hash_block: int, where: str) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise NanoKVError(f"{where}: hash_ids is not a list of whole numbers")
    if len(value) != -(-prompt // hash_block):
        raise NanoKVError(
            f"{where}: {len(value)} hash_ids for a prompt of {prompt} tokens, which is {-(-prompt // hash_block)} blocks of "
            f"{hash_block}: --hash-block sets the tokens of a block"
        )
    return value


def _request(arrival: float, prompt: int, output: int, prefix: tuple[int, ...], where: str) -> Request:
    if prompt == 0:
        raise NanoKVError(f"{where}: the prompt has 0 tokens: a request needs at least one")
    return Request(arrival, prompt, output, prefix)


def _whole(value: Any, what: str) -> int:
    """A number of tokens."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise NanoKVError(f"{what} is missing")
    try:
        count = int(value) if isinstance(value, str) else value
    except ValueError:
        count = None
    if type(count) is not int:
        raise NanoKVError(f"{what} {value!r} is not a whole number")
    if count < 0:
        raise NanoKVError(f"{what} {count} is negative")
    return count


def _seconds(value: Any, what: str) -> float:
    """A number as it stands, a date as seconds since 1970 (to the microsecond)."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise NanoKVError(f"{what} is missing")
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        number = _date(value, what)
    if not math.isfinite(number):
        raise NanoKVError(f"{what} {value!r} is not a time")
    return number


def _date(value: Any, what: str) -> float:
    try:
        date = datetime.fromisoformat(value.strip())
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        return (date - EPOCH) / timedelta(seconds=1)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise NanoKVError(f"{what} {value!r} is neither a number nor a date") from None


def paced(trace: Trace, rate: float) -> Trace:
    """The same arrivals, nearer together or further apart: `rate` requests a second on average."""
    _positive(rate)
    last = trace.requests[-1].arrival
    if last == 0:
        raise UsageError(f"all requests of {trace.name} arrive at once: a rate cannot spread them, --poisson can")
    factor = (len(trace.requests) - 1) / last / rate
    return replace(trace, requests=tuple(replace(each, arrival=each.arrival * factor) for each in trace.requests))


def poisson(trace: Trace, rate: float, seed: int) -> Trace:
    """The same requests in the same order as a Poisson process of `rate` a second, which a seed fixes."""
    _positive(rate)
    times = np.random.default_rng(seed).exponential(1 / rate, len(trace.requests)).cumsum().tolist()
    pairs: Iterator[tuple[Request, float]] = zip(trace.requests, times, strict=True)
    return replace(trace, requests=tuple(replace(each, arrival=time - times[0]) for each, time in pairs), timed=True)


def _positive(rate: float) -> None:
    if not (rate > 0 and math.isfinite(rate)):
        raise UsageError(f"rate {rate} is out of range: it must be above 0")


def first_requests(trace: Trace, count: int | None) -> Trace:
    """The first `count` to arrive; all where it is None."""
    return replace(trace, requests=trace.requests[:count])
