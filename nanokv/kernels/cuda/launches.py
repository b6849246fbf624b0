"""Every kernel as a function of arrays on the card: grid, block, shared memory and arguments, and nothing else.

Results go where they are told, scratch memory is given: nothing is allocated, copied or waited for. What a call moves
through memory and multiplies is said in traffic.py.

Symbols: R rows, K inputs, N outputs, Hq query heads, H key-value heads, D head width, T = 128 keys a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nanokv.backend import Array
from nanokv.errors import UsageError
from nanokv.kernels.cuda.program import FEW_ROWS, FORMS
from nanokv.kernels.matrix import FORMATS

PANEL = SEGMENT = 64
FEW = 32  # rows up to which linear reads W once for every eight rows and shares segments out
FEW_WARPS, MANY_ROWS = 4, 128
TILE = THREADS = 128
WIDEST_HEAD = 256
FLAT = 256  # threads of a block of an elementwise kernel
CODE_GROUP = 32  # of int4 keys and values
MOST_TOKENS = 1 << 24  # of a vocabulary: float32 counts no further
_GELU = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(2 * np.sqrt(2 / np.pi) * 0.044715)
_i = np.int32


class Device(Protocol):
    """A card, or what stands for one."""

    def launch(
        self, kernel: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        """Queues a kernel by its name in program.KERNELS. Arguments: arrays and typed NumPy scalars."""
        ...

    def address(self, array: Array) -> int:
        """Where an array's first element lies in the card's memory."""
        ...


class PackedPlanes(Protocol):
    """What kernels need of a packed matrix: nanokv.kernels.matrix.Matrix has it, in host memory, and arrays.CardMatrix."""

    @property
    def form(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def codes(self) -> Array: ...
    @property
    def scales(self) -> Array | None: ...
    @property
    def lows(self) -> Array | None: ...


def plane_addresses(device: Device, matrix: PackedPlanes) -> list[np.int64]:
    """Of codes [P, K, 64] (int4: words of eight inputs), scales and lows [P, G, 64]; 0 for a plane that is not there."""
    return [np.int64(0 if each is None else device.address(each)) for each in (matrix.codes, matrix.scales, matrix.lows)]


def kind_of(matrix: PackedPlanes) -> str:
    """The sources' name of its format."""
    return FORMS[FORMATS.index(matrix.form)]


def segments_of(inputs: int) -> int:
    return -(-inputs // SEGMENT)


def sums_shape(rows: int, matrix: PackedPlanes) -> tuple[int, int, int]:
    """The scratch that linear() needs for a few rows: [S, R, N]; nothing for many."""
    return (segments_of(matrix.shape[1]), rows, matrix.shape[0]) if rows <= FEW else (0, 0, 0)


def linear(device: Device, x: Array, matrix: PackedPlanes, bias: Array | None, out: Array, sums: Array) -> None:
    """x [R, K] -> out [R, N]; sums as sums_shape() says. Without a bias any array stands in its place."""
    rows, (outputs, inputs) = len(x), matrix.shape
    panels, planes = -(-outputs // PANEL), plane_addresses(device, matrix)
    biased = (out if bias is None else bias, _i(bias is not None))
    if rows > FEW:
        shared = 4 * 32 * (MANY_ROWS + 4 + PANEL)
        arguments = [x, *planes, *biased, out, _i(rows), _i(inputs), _i(outputs)]
        device.launch(f"linear_rows<{kind_of(matrix)}>", (panels, -(-rows // MANY_ROWS)), (16, 16), shared, arguments)
        return
    each = next((count for count in FEW_ROWS if count >= rows), FEW_ROWS[-1])
    segments = segments_of(inputs)
    grid = panels, -(-segments // FEW_WARPS), -(-rows // each)
    arguments = [x, *planes, sums, _i(rows), _i(inputs), _i(outputs)]
    device.launch(
        f"linear_segments<{kind_of(matrix)}, {each}>", grid, (32, FEW_WARPS), 4 * FEW_WARPS * each * SEGMENT, arguments
    )
    arguments = [sums, *biased, out, _i(segments), _i(rows), _i(outputs)]
    device.launch("linear_sum", (-(-rows * outputs // FLAT),), (FLAT,), 0, arguments)


def embed_rows(device: Device, tokens: Array, matrix: PackedPlanes, out: Array) -> None:
    """tokens [R] int32 -> their decoded rows of a matrix [V, E], out [R, E]"""
    rows, width = out.shape
    arguments = [tokens, *plane_addresses(device, matrix), out, _i(rows), _i(width)]
    device.launch(f"embed_rows<{kind_of(matrix)}>", (-(-rows * -(-width // 8) // FLAT),), (FLAT,), 0, arguments)


def attention_words(queries: int, dim: int) -> int:
    """Shared memory of attend_tiles in words (Memory::words in attention.cu)."""
    return queries * (dim + TILE + 2) + TILE + max(TILE * 33, 2 * queries * dim)


def queries_of(dim: int) -> int:
    """Queries a block of attend_rows: 16 where they and their outputs fit in the 48 KB that every card gives a block."""
    if dim > WIDEST_HEAD:
        raise UsageError(
            f"heads {dim} wide do not fit the attention kernels, which take up to {WIDEST_HEAD}: use --numerics fast"
        )
    return 16 if dim <= 128 else 8


@dataclass(frozen=True)
class Tables:
    """attention.cu's tables on the card. `most`: rows of the longest run that attend_tiles is given."""

    positions: Array  # [R] int32
    runs: Array  # [n, 6] int64
    tiles: Array  # [N, 5] int32
    sources: Array  # [s, 7] int64
    units: Array  # [N, T / unit_size] int32
    owner: Array  # [N] int32, -1: not for attend_tiles
    run_of: Array  # [R] int32, -1: not for combine_tiles
    pieces: Array  # [p, 2] int32
    unit_size: int
    most: int


@dataclass(frozen=True)
class Choice:
    """How the next token of each row is chosen, on the card (nanokv/card_sampling.py makes it from SamplingParams)."""

    seen: Array  # [R, ceil(V / 32)] uint32: a bit for each token that occurred
    settings: Array  # [R, 4] float32: temperature, top-p, min-p, repetition penalty
    top_k: Array  # [R] int32
    uniform: Array  # [R] float32, each row's uniform number in 0 .. 1


def attend(
    device: Device,
    q: Array,
    q_sinks: Array,
    tables: Tables,
    kv_heads: int,
    fixed: float,
    scale: float,
    out: Array,
    partial: tuple[Array, ...],
    stride: int | None = None,
) -> None:
    """q, q_sinks [R, Hq, D] with rows `stride` elements apart, out [R, Hq, D].

    Runs of a few rows by attend_tiles and combine_tiles, whose partial results m, l [N, most, Hq] and o [N, most, Hq, D] are
    scratch; the rows of `pieces` by attend_rows.
    """
    heads, dim = q.shape[1:]
    queries, group = queries_of(dim), heads // kv_heads
    common = tables.units, _i(tables.unit_size), np.float32(fixed), np.float32(scale)
    shape = _i(heads), _i(kv_heads), _i(dim), _i(stride or heads * dim)
    places = q, q_sinks, tables.positions, tables.runs, tables.tiles, tables.sources
    if tables.most:
        grid = len(tables.tiles), kv_heads, -(-tables.most * group // 8)
        arguments = [*places, tables.owner, *common, *partial, *shape, _i(tables.most)]
        device.launch("attend_tiles<8>", grid, (THREADS,), 4 * attention_words(8, dim), arguments)
        arguments = [*partial, tables.runs, tables.run_of, out, _i(heads), _i(dim), _i(tables.most)]
        device.launch("combine_tiles", (len(q), heads), (THREADS,), 4 * 2 * THREADS, arguments)
    if len(tables.pieces):
        shared = 4 * (attention_words(queries, dim) + queries * (dim + 4))
        arguments = [*places, tables.pieces, *common, out, *shape]
        device.launch(f"attend_rows<{queries}>", (len(tables.pieces), kv_heads), (THREADS,), shared, arguments)


def layer_norm(device: Device, x: Array, weight: Array, bias: Array, eps: float, out: Array) -> None:
    """x, out [R, K]"""
    rows, width = x.shape
    arguments = [x, weight, bias, np.float32(eps), np.float32(1 / width), out, _i(rows), _i(width)]
    device.launch("layer_norm", (-(-rows // 4),), (32, 4), 0, arguments)


def rms_norm(device: Device, x: Array, weight: Array, eps: float, out: Array, stride: int | None = None) -> None:
    """x [R, K] or [R, H, K] with rows `stride` elements apart -> out of the same shape, without gaps."""
    rows, heads, width = (len(x), 1, x.shape[1]) if x.ndim == 2 else x.shape
    arguments = [
        x,
        weight,
        np.float32(eps),
        np.float32(1 / width),
        out,
        _i(rows),
        _i(heads),
        _i(width),
        _i(stride or heads * width),
    ]
    device.launch("rms_norm", (-(-rows * heads // 4),), (32, 4), 0, arguments)


def gelu_new(device: Device, x: Array, out: Array) -> None:
    """x, out [R, K]"""
    device.launch("gelu_new", (-(-x.size // FLAT),), (FLAT,), 0, [x, out, *_GELU, _i(x.size)])


def gelu_erf(device: Device, x: Array, out: Array) -> None:
    """x, out [R, K]"""
    device.launch("gelu_erf", (-(-x.size // FLAT),), (FLAT,), 0, [x, out, _i(x.size)])


def swiglu(device: Device, gate_up: Array, out: Array) -> None:
    """gate_up [R, 2 I] -> out [R, I]"""
    device.launch("swiglu", (-(-out.size // FLAT),), (FLAT,), 0, [gate_up, out, _i(len(out)), _i(out.shape[1])])


def rotate(device: Device, x: Array, cos: Array, sin: Array, adjacent: bool, out: Array, stride: int | None = None) -> None:
    """x [R, H, D] with rows `stride` elements apart, cos, sin [R, D / 2] -> out [R, H, D]"""
    rows, heads, dim = x.shape
    arguments = [x, cos, sin, _i(adjacent), out, _i(rows), _i(heads), _i(dim), _i(stride or heads * dim)]
    device.launch("rotate", (-(-x.size // 2 // FLAT),), (FLAT,), 0, arguments)


def embed(device: Device, tokens: Array, table: Array, positions: Array, places: Array | None, out: Array) -> None:
    """tokens, positions [R] int32, table [V, E], places [., E] or None -> out [R, E]"""
    rows, width = out.shape
    arguments = [
        tokens,
        table,
        positions,
        table if places is None else places,
        _i(places is not None),
        out,
        _i(rows),
        _i(width),
    ]
    device.launch("embed", (-(-out.size // FLAT),), (FLAT,), 0, arguments)


def add(device: Device, x: Array, y: Array) -> None:
    """x += y, any shape"""
    device.launch("add", (-(-x.size // FLAT),), (FLAT,), 0, [x, y, _i(x.size)])


def argmax(device: Device, logits: Array, tokens: Array) -> None:
    """logits [R, V] -> tokens [R] int32"""
    device.launch("argmax", (len(logits),), (1024,), 4 * 64, [logits, tokens, _i(logits.shape[1])])


def softmax(device: Device, x: Array, out: Array) -> None:
    """x, out [R, V]"""
    device.launch("softmax", (len(x),), (1024,), 4 * 64, [x, out, _i(x.shape[1])])


def sample(device: Device, logits: Array, choice: Choice, weights: Array, tokens: Array) -> None:
    """logits [R, V] -> tokens [R] int32; weights [R, V] is scratch. UsageError for a vocabulary above 2^24."""
    rows, vocab = logits.shape
    if vocab > MOST_TOKENS:
        raise UsageError(f"a vocabulary of {vocab} is more than the sampling kernel counts, which is {MOST_TOKENS}")
    tables = choice.seen, choice.settings, choice.top_k, choice.uniform
    device.launch("sample", (rows,), (1024,), 4 * 5 * 32, [logits, *tables, weights, tokens, _i(vocab)])


def mark_seen(device: Device, tokens: Array, seen: Array, vocab: int) -> None:
    """The bits of tokens [R] int32 in seen [R, ceil(V / 32)] uint32."""
    device.launch("mark_seen", (-(-len(tokens) // FLAT),), (FLAT,), 0, [tokens, seen, _i(len(tokens)), _i(vocab)])


def append(
    device: Device,
    x: Array,
    slots: Array,
    codec: int,
    codes: Array,
    scales: Array | None,
    fixed: float,
    stride: int | None = None,
) -> None:
    """x [R, H, D] with rows `stride` elements apart into the slots [R] int32 of planes in the KV format `codec`, a number of
    nanokv.kernels.layout."""
    rows, heads, dim = x.shape
    planes = codes, codes if scales is None else scales
    arguments = [x, _i(stride or heads * dim), slots, *planes, np.float32(fixed), _i(rows), _i(heads), _i(dim)]
    device.launch(f"append<{codec}>", (-(-rows * heads // 4),), (32, 4), 0, arguments)


def append_int4(device: Device, x: Array, slots: Array, planes: Sequence[Array], keys: bool, stride: int | None = None) -> None:
    """As append(), in int4: `planes` are codes, lows and spans. Keys come in whole groups of 32 tokens of consecutive slots,
    of which the first slot is looked up."""
    rows, heads, dim = x.shape
    arguments = [x, _i(stride or heads * dim), slots, *planes, _i(rows), _i(heads), _i(dim)]
    if keys:
        if rows % CODE_GROUP:
            raise UsageError(f"{rows} keys are no whole groups of {CODE_GROUP}, which int4 takes")
        pairs = rows // CODE_GROUP * heads * -(-dim // 2)
        device.launch("append_keys_int4", (-(-pairs // FLAT),), (FLAT,), 0, arguments)
    else:
        device.launch("append_values_int4", (-(-rows * heads // 4),), (32, 4), 0, arguments)


def copy_unit(device: Device, plane: Array, source: int, target: int) -> None:
    """plane [L, U, ...]: everything of unit `source` into unit `target`, all layers."""
    layers, units = plane.shape[:2]
    size = plane.nbytes // (layers * units)
    arguments = [plane, np.int64(plane.nbytes // layers), np.int64(size), _i(source), _i(target)]
    device.launch("copy_unit", (-(-size // FLAT), layers), (FLAT,), 0, arguments)
