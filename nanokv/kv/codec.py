"""How keys and values are stored: every codec turns K and V of some tokens into planes of bytes, and back.

A codec is a pair of pure functions. Encoding looks at one token (or one whole group of tokens) at a time, so what is
stored does not depend on how the work was split. Nothing else in nanokv knows how K and V are stored.

Scales are kept, never their inverses: the inverse of a small one overflows. What is kept of a group is its largest
magnitude (or its lowest value and its span), and codes are fractions of it, so that a group of zeros or of one value
comes back exactly.

Symbols: N tokens, H key-value heads, D head width, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nanokv.backend import Array, Backend, module_of
from nanokv.errors import UsageError
from nanokv.kernels import layout

GROUP = 32  # KIVI's group: tokens of one key channel, or channels of one value token


@dataclass(frozen=True)
class Plane:
    """One array of a codec's: `shape` of one entry, and how many tokens an entry is for."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    tokens: int = 1


class Codec(Protocol):
    """`lossless`: what is read is what was written, without copying. `own_tile`: a query sees its own tile's keys and
    values in full precision and those of earlier tiles decoded, so a tile is encoded when it is complete. `dtype` is that
    of the arithmetic."""

    @property
    def name(self) -> str: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def own_tile(self) -> bool: ...
    @property
    def dtype(self) -> Any: ...

    def planes(self, heads: int, dim: int) -> tuple[list[Plane], list[Plane]]:
        """The planes of keys and of values."""
        ...

    def encode(self, k: Array, v: Array) -> tuple[list[Array], list[Array]]:
        """k, v [N, H, D] -> entries of every plane, in order."""
        ...

    def decode(self, k: Sequence[Array], v: Sequence[Array], dim: int) -> tuple[Array, Array]:
        """The planes' entries of whole groups of tokens, [..., entries, *shape] -> k, v [..., N, H, D]."""
        ...


@dataclass(frozen=True)
class FloatCodec:
    """A floating-point format: float32, float64, float16 or bfloat16, rounded to nearest even.

    A value beyond float16's 65504 becomes its largest value, not infinity. `dtype` is that of the arithmetic.
    """

    name: str
    stored: Any
    dtype: Any
    own_tile: bool = False

    @property
    def lossless(self) -> bool:
        return np.dtype(self.stored) == np.dtype(self.dtype)

    def planes(self, heads: int, dim: int) -> tuple[list[Plane], list[Plane]]:
        return [Plane("k", self.stored, (heads, dim))], [Plane("v", self.stored, (heads, dim))]

    def encode(self, k: Array, v: Array) -> tuple[list[Array], list[Array]]:
        return [self._store(k)], [self._store(v)]

    def _store(self, x: Array) -> Array:
        if self.stored is np.float16:
            limit = np.finfo(np.float16).max
            x = module_of(x).clip(x, -limit, limit)
        return x.astype(self.stored)

    def decode(self, k: Sequence[Array], v: Sequence[Array], dim: int) -> tuple[Array, Array]:
        return k[0].astype(self.dtype), v[0].astype(self.dtype)


@dataclass(frozen=True)
class ScaledCodec:
    """One scale for each token and head: int8 (127 steps either side) or fp8 e4m3 (largest value 448).

    With `scale`, fp8 as vLLM stores it by default: one given number for the whole tensor, no plane of scales; a value
    beyond 448 times the scale saturates, it never becomes NaN.
    """

    name: str
    stored: Any
    top: float
    dtype: Any
    scale: float | None = None
    lossless: bool = False
    own_tile: bool = False

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < self.scale < np.inf:
            raise UsageError(f"scale {self.scale} of KV format {self.name} is out of range: it must be positive and finite")

    def planes(self, heads: int, dim: int) -> tuple[list[Plane], list[Plane]]:
        def of(name: str) -> list[Plane]:
            codes = Plane(name, self.stored, (heads, dim))
            return [codes] if self.scale is not None else [codes, Plane(f"{name}_scale", np.float32, (heads,))]

        return of("k"), of("v")

    def encode(self, k: Array, v: Array) -> tuple[list[Array], list[Array]]:
        return self._encode(k), self._encode(v)

    def _encode(self, x: Array) -> list[Array]:
        xp = module_of(x)
        if self.scale is not None:
            return [xp.clip(x / x.dtype.type(self.scale), -self.top, self.top).astype(self.stored)]
        largest = xp.abs(x).max(axis=-1)  # [N, H]
        largest = largest.astype(np.float32)
        fraction = x / xp.where(largest == 0, np.float32(1), largest)[..., None]
        codes = xp.clip(fraction * x.dtype.type(self.top), -self.top, self.top)  # a subnormal divisor can overshoot
        if self.stored is np.int8:
            codes = xp.rint(codes)
        return [codes.astype(self.stored), largest]

    def decode(self, k: Sequence[Array], v: Sequence[Array], dim: int) -> tuple[Array, Array]:
        return self._decode(k), self._decode(v)

    def _decode(self, planes: Sequence[Array]) -> Array:
        x = planes[0].astype(self.dtype)
        if self.scale is not None:
            return x * x.dtype.type(self.scale)
        x /= x.dtype.type(self.top)  # the largest code becomes exactly 1
        x *= planes[1].astype(self.dtype)[..., None]
        return x


@dataclass(frozen=True)
class KiviCodec:
    """int4 in KIVI's way (Liu et al. 2024, arXiv 2402.02750): keys in groups of 32 tokens of one channel, values in groups
    of 32 channels of one token, each with its lowest value and span; a group never spans two heads, the last one of a
    head whose width is no multiple of 32 is shorter.

    KIVI keeps the newest tokens in full precision, at most 128, until they fill a group. Here the rule is one of positions
    alone: a query at position q sees the key at p in full precision if p // 128 = q // 128, else decoded.
    """

    dtype: Any
    name: str = "int4"
    lossless: bool = False
    own_tile: bool = True

    def planes(self, heads: int, dim: int) -> tuple[list[Plane], list[Plane]]:
        packed, groups = -(-dim // 2), -(-dim // GROUP)
        keys = [
            Plane("k", np.uint8, (heads, packed)),
            Plane("k_low", np.float32, (heads, dim), GROUP),
            Plane("k_span", np.float32, (heads, dim), GROUP),
        ]
        values = [
            Plane("v", np.uint8, (heads, packed)),
            Plane("v_low", np.float32, (heads, groups)),
            Plane("v_span", np.float32, (heads, groups)),
        ]
        return keys, values

    def encode(self, k: Array, v: Array) -> tuple[list[Array], list[Array]]:
        xp = module_of(k)
        heads, dim = k.shape[1:]
        grouped = k.reshape(-1, GROUP, heads, dim)  # [G, 32, H, D]
        low, span = _low_and_span(grouped.min(axis=1), grouped.max(axis=1))
        keys = [_pack(_codes(grouped, low[:, None], span[:, None]).reshape(k.shape)), low, span]
        edges = range(0, dim, GROUP)
        least = xp.stack([v[..., d : d + GROUP].min(axis=-1) for d in edges], axis=-1)  # [N, H, G]
        low, span = _low_and_span(least, xp.stack([v[..., d : d + GROUP].max(axis=-1) for d in edges], axis=-1))
        values = [_pack(_codes(v, _spread(low, dim), _spread(span, dim))), low, span]
        return [keys[0], *(a.astype(np.float32) for a in keys[1:])], [values[0], *(a.astype(np.float32) for a in values[1:])]

    def decode(self, k: Sequence[Array], v: Sequence[Array], dim: int) -> tuple[Array, Array]:
        xp = module_of(k[0])
        low, span = (xp.repeat(a, GROUP, axis=-3).astype(self.dtype) for a in k[1:])
        keys = self._restore(_unpack(k[0], dim), low, span)
        low, span = (_spread(a, dim).astype(self.dtype) for a in v[1:])
        return keys, self._restore(_unpack(v[0], dim), low, span)

    def _restore(self, codes: Array, low: Array, span: Array) -> Array:
        fraction = codes.astype(self.dtype) / np.dtype(self.dtype).type(15)
        return low + fraction * span


def _low_and_span(least: Array, most: Array) -> tuple[Array, Array]:
    """A zero is stored as +0: which sign a minimum of both has is each library's choice."""
    low = least + 0
    return low, most - low + 0


def _codes(x: Array, low: Array, span: Array) -> Array:
    """x as fifteenths of its group's span above its lowest value, to nearest: 0 .. 15 in uint8."""
    xp = module_of(x)
    fraction = (x - low) / xp.where(span == 0, x.dtype.type(1), span)
    return xp.clip(xp.rint(fraction * x.dtype.type(15)), 0, 15).astype(np.uint8)


def _spread(groups: Array, dim: int) -> Array:
    """[..., G] -> [..., D]: each group's number for each of its channels."""
    return module_of(groups).repeat(groups, GROUP, axis=-1)[..., :dim]


def _pack(codes: Array) -> Array:
    """[..., D] of 0 .. 15 -> [..., ceil(D / 2)]: the even channel in the low half of a byte."""
    xp = module_of(codes)
    if codes.shape[-1] % 2:
        codes = xp.concatenate([codes, codes[..., :1] * np.uint8(0)], axis=-1)
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _unpack(packed: Array, dim: int) -> Array:
    """[..., ceil(D / 2)] -> [..., D]"""
    halves = module_of(packed).stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return halves.reshape(*packed.shape[:-1], -1)[..., :dim]


CODECS = ("float32", "float16", "bfloat16", "int8", "fp8", "int4")


def get_codec(name: str | None, dtype: Any, backend: Backend, scale: float | None = None) -> Codec:
    """The codec called `name` for arithmetic in `dtype`; None stores K and V as they are computed.

    `scale` is fp8's one number for the whole tensor. Raises UsageError for an unknown name, a scale elsewhere, and for
    formats that the array library lacks, unless the card's kernels are to read and write them.
    """
    if scale is not None and name != "fp8":
        raise UsageError("a KV scale goes with fp8 only: the other formats keep their own")
    if name in ("bfloat16", "fp8"):
        if backend.name == "cupy" and not backend.kernels:
            raise UsageError(
                f"KV format {name} is not available on cupy, which has no such type: use float16 or int8, or --numerics exact, "
                "whose kernels read and write it"
            )
        import ml_dtypes

        if name == "bfloat16":
            return FloatCodec(name, ml_dtypes.bfloat16, dtype)
        return ScaledCodec(name, ml_dtypes.float8_e4m3fn, 448.0, dtype, scale)
    if name == "int8":
        return ScaledCodec(name, np.int8, 127.0, dtype)
    if name == "int4":
        return KiviCodec(dtype)
    formats = {None: dtype, "float32": np.float32, "float64": np.float64, "float16": np.float16}
    if name not in formats:
        raise UsageError(f"unknown KV format {name!r}: choose one of {', '.join(CODECS)}")
    stored = np.dtype(formats[name]).type
    return FloatCodec(name or np.dtype(dtype).name, stored, dtype)


def codec_number(codec: Codec) -> int:
    """The kernels' number of a codec. UsageError for one that they do not know."""
    if isinstance(codec, KiviCodec):
        return layout.INT4
    if isinstance(codec, ScaledCodec):
        if codec.name == "int8":
            return layout.INT8
        return layout.FP8 if codec.scale is None else layout.FP8_FIXED
    names = {"float32": layout.FLOAT32, "float16": layout.FLOAT16, "bfloat16": layout.BFLOAT16}
    if isinstance(codec, FloatCodec) and codec.name in names:
        return names[codec.name]
    raise UsageError(f"the compiled kernels do not read KV format {codec.name}: use --kernels numpy")
