"""What is simulated: the shape of one attention call, how it is cut into tiles, and which tiles a row may skip.

Symbols: S keys, N query rows, Hq query heads, Hkv key-value heads, G = Hq / Hkv, D head width, Br query rows and Bc keys
a tile. Query row r sits at position S - N + r (masks align bottom-right), so N = S is prefill and N = 1 is decode.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanokv.errors import UsageError
from nanokv.kv.tile import Visibility
from sim.formats import COMPUTE, FLOAT16, Format
from sim.memory import Range

LIMIT = 1 << 40  # beyond this a size is a mistake
MOST_TILES = 1 << 22  # rows or keys of tiles that a closed form goes through


@dataclass(frozen=True)
class Shape:
    """One attention call; `dtype` is how Q, O, scores and gradients are stored, `kv_dtype` how K and V are; only these carry
    scales beside their elements.

    UsageError names the field that is out of range or does not go with another.
    """

    seq: int
    heads: int = 32
    head_dim: int = 128
    q_len: int | None = None
    kv_heads: int | None = None
    batch: int = 1
    causal: bool = True
    window: int | None = None
    dtype: Format = FLOAT16
    kv_dtype: Format | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_len", self.seq if self.q_len is None else self.q_len)
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.dtype)
        object.__setattr__(self, "dtype", self.dtype.bare)
        for name in ("seq", "q_len", "heads", "kv_heads", "head_dim", "batch", "window"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LIMIT:
                raise UsageError(f"{name} must be between 1 and {LIMIT}, not {value}")
        if self.heads % self.num_kv_heads:
            raise UsageError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.rows > self.seq:
            raise UsageError(f"q_len {self.q_len} is more than seq {self.seq}: the queries' own keys are part of seq")
        if self.window is not None and not self.causal:
            raise UsageError("a window needs causal attention: it counts back from the query's own position")
        if self.dtype.name not in COMPUTE:
            raise UsageError(f"dtype {self.dtype.name} is for stored K and V only: choose one of {', '.join(COMPUTE)}")

    @property
    def rows(self) -> int:
        """N"""
        assert self.q_len is not None
        return self.q_len

    @property
    def num_kv_heads(self) -> int:
        """Hkv"""
        assert self.kv_heads is not None
        return self.kv_heads

    @property
    def kv(self) -> Format:
        """How K and V are stored."""
        assert self.kv_dtype is not None
        return self.kv_dtype

    @property
    def group(self) -> int:
        """G"""
        return self.heads // self.num_kv_heads

    @property
    def all_kv_heads(self) -> int:
        """Key-value heads over the whole batch."""
        return self.batch * self.num_kv_heads

    @property
    def all_heads(self) -> int:
        """Query heads over the whole batch."""
        return self.batch * self.heads

    @property
    def visibility(self) -> Visibility:
        """What a row may see; without causality every row is taken to sit at the last position."""
        return Visibility(window=self.window)

    def positions(self, rows: Range) -> np.ndarray:
        """[stop - start] int64: where these query rows sit, for `visibility`."""
        if not self.causal:
            return np.full(rows[1] - rows[0], self.seq - 1)
        return np.arange(*rows) + (self.seq - self.rows)

    def key_range(self, rows: Range) -> Range:
        """The keys that at least one of these query rows may see."""
        if not self.causal:
            return 0, self.seq
        start = self.seq - self.rows
        first = 0 if self.window is None else max(0, start + rows[0] - self.window + 1)
        return first, start + rows[1]

    def visible_pairs(self) -> int:
        """Query-key pairs of one head that attention needs: what no exact algorithm can do without."""
        if not self.causal:
            return self.rows * self.seq
        last = self.seq  # the last row sees this many keys, the one before it one less, ...
        if self.window is None:
            return self.rows * last - self.rows * (self.rows - 1) // 2
        window = min(self.window, self.seq)
        capped = min(self.rows, max(0, last - window + 1))  # rows that see a full window
        rest = self.rows - capped
        return capped * window + rest * (self.seq - self.rows + 1) + rest * (rest - 1) // 2

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain values."""
        return {
            "seq": self.seq, "q_len": self.rows, "heads": self.heads, "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "batch": self.batch, "causal": self.causal, "window": self.window,
            "dtype": self.dtype.name, "kv_dtype": self.kv.name,
        }  # fmt: skip


@dataclass(frozen=True)
class TileSize:
    """Br query rows by Bc keys."""

    rows: int
    keys: int

    def __post_init__(self) -> None:
        for value in (self.rows, self.keys):
            if not 1 <= value <= LIMIT:
                raise UsageError(f"a tile has at least 1 row and 1 key and at most {LIMIT}, not {value}")

    def __str__(self) -> str:
        return f"{self.rows}x{self.keys}"


def parse_tile(text: str) -> TileSize | None:
    """ "128" and "64x128" (query rows x keys) -> TileSize; "auto" -> None: each algorithm chooses."""
    if text.strip().lower() == "auto":
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise UsageError(f"tile {text!r} is not a size such as 128, 64x128 (query rows x keys) or auto")
    sizes = [int(part) for part in parts]
    return TileSize(sizes[0], sizes[-1])


def parse_count(text: str, what: str) -> int:
    """ "4096" or "4k" (4 x 1024; m and g likewise) -> int; UsageError names `what` it was for."""
    digits, suffix = (text[:-1], text[-1].lower()) if text[-1:].lower() in ("k", "m", "g") else (text, "")
    if not digits.isascii() or not digits.isdigit():
        raise UsageError(f"{what}: {text!r} is not a whole number such as 4096 or 4k")
    return int(digits) << {"": 0, "k": 10, "m": 20, "g": 30}[suffix]


def tile_count(length: int, size: int) -> int:
    """How many tiles of `size` cover `length`; UsageError where they are too many to go through one by one."""
    count = -(-length // size)
    if count > MOST_TILES:
        raise UsageError(f"{length} in tiles of {size} are {count} tiles, more than {MOST_TILES}: use a larger tile")
    return count


def row_tiles(shape: Shape, tile: TileSize) -> Iterator[Range]:
    """The query rows of each tile."""
    for start in range(0, shape.rows, tile.rows):
        yield start, min(start + tile.rows, shape.rows)


def key_tiles(shape: Shape, tile: TileSize, rows: Range | None = None) -> Iterator[Range]:
    """The key tiles, aligned to position 0: those that some of `rows` may see, or all."""
    first, last = (0, shape.seq) if rows is None else shape.key_range(rows)
    for start in range(first // tile.keys * tile.keys, last, tile.keys):
        yield start, min(start + tile.keys, shape.seq)


def hidden(shape: Shape, rows: Range, keys: Range) -> np.ndarray | None:
    """[rows, keys] bool: which keys a row may not see; None where it may see all."""
    seen = shape.visibility.sees(shape.positions(rows)[:, None], np.arange(*keys)[None])
    return None if seen.all() else ~seen


@dataclass(frozen=True)
class Spans:
    """How much of K one head's row tiles touch: the closed form of a loop over row_tiles() and key_tiles(rows)."""

    keys: int  # sum of keys loaded, a row tile at a time
    pairs: int  # sum of rows x keys: the products done
    row_visits: int  # sum of rows, once for each key tile they meet
    visits: int = field(default=0)  # tile pairs


def spans(shape: Shape, tile: TileSize) -> Spans:
    """Over every row tile, without looping over key tiles: the cost is one number a row tile."""
    last_rows = shape.rows - (tile_count(shape.rows, tile.rows) - 1) * tile.rows
    starts = np.arange(0, shape.rows, tile.rows)
    stops = np.minimum(starts + tile.rows, shape.rows)
    offset = shape.seq - shape.rows
    last = offset + stops if shape.causal else np.full(len(stops), shape.seq)
    first = np.zeros_like(last) if shape.window is None else np.maximum(0, offset + starts - shape.window + 1)
    first_tile, end_tile = first // tile.keys, -(-last // tile.keys)
    keys = np.minimum(end_tile * tile.keys, shape.seq) - first_tile * tile.keys
    visits = end_tile - first_tile

    def by_rows(each: np.ndarray) -> int:
        """The sum of rows x each; all tiles but the last have the same rows. Rows x keys can pass 64 bits."""
        return tile.rows * int(each[:-1].sum()) + last_rows * int(each[-1])

    return Spans(int(keys.sum()), by_rows(keys), by_rows(visits), int(visits.sum()))
