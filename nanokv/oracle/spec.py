"""What one case asks of a kernel: shapes, layout, formats, masks. A Spec is a few numbers and names; case.py turns it into
arrays, always the same ones.

Symbols: B sequences, R rows (query tokens), S tokens of K and V, Hq query heads, Hkv key-value heads, D head width.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from nanokv.errors import UsageError
from nanokv.kv.tile import TILE
from nanokv.oracle.formats import COMPUTED, SCALED, STORED, format_of

PAGED = ("vllm", "flashinfer-nhd", "flashinfer-hnd")
LAYOUTS = ("contiguous", "hf", *PAGED)
SCALES = ("tensor", "head", "token")
UNUSED = ("nan", "large")
ROPES = ("halves", "pairs")
LOGITS = ("diffuse", "offset", "equal")
FEATURES = ("window", "sinks", "alibi", "softcap", "scale", "rope", "full")
MOST_SCORES = 1 << 28  # 2 GB of float64


@dataclass(frozen=True)
class Spec:
    """`lengths`: for each sequence (query tokens, tokens of K and V, the query's own included). Query row r of a sequence
    is at position kv_len - q_len + r: causal masks align bottom-right. A row at a negative position sees nothing.

    `kv_dtype` None stores K and V in `dtype`. `scales` is the granularity of int8's and fp8's. `window` counts the query's
    own key; the first `sinks` keys stay visible; with `streaming` ALiBi counts positions inside the cache. `softcap` c makes
    a score c tanh(score / c). `scale` None is 1/sqrt(D). `rope`: the kernel itself rotates q and k, with `rope_theta`.
    `unused` memory holds NaN or large finite numbers. `logits`: `offset` shifts all scores of a row by about 100, `equal`
    makes them nearly equal (docs/oracle.md says which faults need which).
    """

    lengths: tuple[tuple[int, int], ...] = ((4, 4),)
    layout: str = "contiguous"
    dtype: str = "float32"
    kv_dtype: str | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    streaming: bool = False
    alibi: bool = False
    softcap: float | None = None
    scale: float | None = None
    rope: str | None = None
    rope_theta: float = 10000.0
    scales: str = "head"
    unused: str = "nan"
    logits: str = "diffuse"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, format_of(getattr(self, name)).name)
        object.__setattr__(self, "lengths", tuple((int(q), int(kv)) for q, kv in self.lengths))
        for name, value, allowed in (
            ("layout", self.layout, LAYOUTS), ("dtype", self.dtype, COMPUTED), ("kv_dtype", self.stored, STORED),
            ("scales", self.scales, SCALES), ("unused", self.unused, UNUSED), ("logits", self.logits, LOGITS),
            ("rope", self.rope or ROPES[0], ROPES),
        ):  # fmt: skip
            if value not in allowed:
                raise UsageError(f"{name} {value!r} is unknown: choose one of {', '.join(allowed)}")
        for name in ("num_heads", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} is out of range: it must be at least 1")
        self._check_numbers()
        self._check_pairs()

    def _check_numbers(self) -> None:
        if not self.lengths or any(q < 0 or kv < 0 for q, kv in self.lengths) or not any(q for q, _ in self.lengths):
            raise UsageError(f"lengths {self.lengths} are out of range: (query, key) tokens, 0 or more, with a query somewhere")
        if any(q * kv * self.num_heads > MOST_SCORES for q, kv in self.lengths):
            raise UsageError(f"lengths {self.lengths} are too long: the reference holds a sequence's whole score matrix")
        for name in ("softcap", "scale", "rope_theta"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} {value} is out of range: it must be positive and finite")
        if self.window is not None and self.window < 1:
            raise UsageError(f"window {self.window} is out of range: it must be at least 1, the query's own key")
        if self.sinks < 0:
            raise UsageError(f"sinks {self.sinks} is out of range: it must be 0 or more")

    def _check_pairs(self) -> None:
        wrong = (
            (self.num_heads % self.num_kv_heads, f"{self.num_heads} heads are no multiple of {self.num_kv_heads} kv heads"),
            (self.paged and TILE % self.block_size, f"block size {self.block_size} does not divide {TILE}"),
            (self.window is None and (self.sinks or self.streaming), "sinks need a window"),
            (self.window is not None and not self.causal, "a window needs causal"),
            (self.streaming and not self.alibi, "streaming counts ALiBi's positions inside the cache: it needs alibi"),
            (self.alibi and self.softcap, "alibi and softcap do not go together: kernels differ in their order"),
            (self.rope and self.head_dim % 2, f"head_dim {self.head_dim} is odd: rope turns pairs"),
            (self.layout == "hf" and self.unused == "nan", "layout hf masks its padding, and 0 * NaN is NaN: unused='large'"),
        )
        for bad, why in wrong:
            if bad:
                raise UsageError(f"no such case: {why}")

    @property
    def paged(self) -> bool:
        return self.layout in PAGED

    @property
    def stored(self) -> str:
        """The format of K and V."""
        return self.kv_dtype or self.dtype

    @property
    def scaled(self) -> bool:
        return self.stored in SCALED

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rows(self) -> int:
        return sum(q for q, _ in self.lengths)

    @property
    def size(self) -> int:
        """Multiplications of the scores: what makes one failing case smaller than another."""
        return sum(max(1, q * kv) for q, kv in self.lengths) * self.num_heads * self.head_dim

    def features(self) -> set[str]:
        """What the case asks beyond plain causal attention."""
        values = {
            "window": self.window is not None, "sinks": self.sinks > 0, "alibi": self.alibi, "softcap": self.softcap,
            "scale": self.scale is not None, "rope": self.rope, "full": not self.causal,
        }  # fmt: skip
        return {name for name in FEATURES if values[name]}

    def title(self) -> str:
        """One line: what differs from the ordinary."""
        lengths = " ".join(f"{q}/{kv}" for q, kv in self.lengths)
        parts = [
            f"{self.layout}",
            f"q/kv tokens {lengths}",
            f"heads {self.num_heads}/{self.num_kv_heads}",
            f"D {self.head_dim}",
        ]
        if self.paged:
            parts.append(f"blocks of {self.block_size}")
        parts.append(self.dtype + (f", kv {self.kv_dtype}" if self.kv_dtype else ""))
        extra = {name: getattr(self, name) for name in ("window", "sinks", "softcap", "scale", "rope") if getattr(self, name)}
        parts += [f"{name} {value}" for name, value in extra.items()]
        flags = {"alibi": self.alibi, "streaming": self.streaming, "not causal": not self.causal}
        parts += [name for name, on in flags.items() if on]
        if self.unused == "nan" and self.layout != "hf":
            parts.append("unused memory NaN")
        if self.logits != "diffuse":
            parts.append(f"{self.logits} logits")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lengths": [list(each) for each in self.lengths]}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Spec":
        """Raises UsageError for names that no Spec has."""
        unknown = set(values) - {field.name for field in fields(Spec)}
        if unknown:
            raise UsageError(f"unknown fields of a case: {', '.join(sorted(unknown))}")
        try:
            return Spec(**{**values, "lengths": tuple(tuple(each) for each in values["lengths"])})
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not a case: {error}") from None
