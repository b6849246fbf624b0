"""Number formats of other people's kernels: the unit roundoff u of each, and what it loses near zero.

u is half the distance from 1 to the next number (IEEE 754-2019; Higham, *Accuracy and Stability of Numerical Algorithms*,
section 2.1): rounding x gives x (1 + d) with |d| <= u, as long as x is normal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanokv.errors import UsageError


@dataclass(frozen=True)
class Format:
    """`roundoff` is u. `lost` is how far off a number below the normal range may be: its own size where hardware may flush it
    to zero (float32, bfloat16), half a subnormal step where it does not (float16)."""

    name: str
    roundoff: float
    lost: float
    top: float  # largest finite value


def _ml(name: str) -> Any:
    import ml_dtypes  # only the formats that NumPy lacks need it

    return getattr(ml_dtypes, name)


FORMATS = {
    "float64": Format("float64", 2.0**-53, 2.0**-1022, float(np.finfo(np.float64).max)),
    "float32": Format("float32", 2.0**-24, 2.0**-126, float(np.finfo(np.float32).max)),
    "tfloat32": Format("tfloat32", 2.0**-11, 2.0**-126, float(np.finfo(np.float32).max)),
    "float16": Format("float16", 2.0**-11, 2.0**-25, 65504.0),
    "bfloat16": Format("bfloat16", 2.0**-8, 2.0**-126, 3.3895313892515355e38),
    "fp8": Format("fp8", 2.0**-4, 2.0**-10, 448.0),
    "int8": Format("int8", 0.0, 0.5, 127.0),
}
_DTYPES: dict[str, Callable[[], Any]] = {
    "float64": lambda: np.float64,
    "float32": lambda: np.float32,
    "float16": lambda: np.float16,
    "int8": lambda: np.int8,
    "bfloat16": lambda: _ml("bfloat16"),
    "fp8": lambda: _ml("float8_e4m3fn"),
}
ALIASES = {
    "fp64": "float64", "f64": "float64", "fp32": "float32", "f32": "float32", "tf32": "tfloat32", "fp16": "float16",
    "f16": "float16", "half": "float16", "bf16": "bfloat16", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "e4m3": "fp8",
}  # fmt: skip
COMPUTED = ("float64", "float32", "float16", "bfloat16")  # q, and the output
STORED = (*COMPUTED, "int8", "fp8")  # k and v
SCALED = ("int8", "fp8")


def format_of(name: str) -> Format:
    """The format called `name`, or by one of its usual short names. Raises UsageError."""
    found = FORMATS.get(ALIASES.get(name, name))
    if found is None:
        raise UsageError(f"unknown number format {name!r}: choose one of {', '.join(FORMATS)}")
    return found


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype of the format; bfloat16 and fp8 are ml_dtypes' (UsageError where it is not installed)."""
    name = format_of(name).name
    if name not in _DTYPES:
        raise UsageError(f"no array holds {name}: it is a format of products only")
    try:
        return np.dtype(_DTYPES[name]())
    except ImportError:
        raise UsageError(f"arrays of {name} need the package ml_dtypes: pip install ml_dtypes") from None


def embeds(inner: Format, outer: Format) -> bool:
    """Whether every number of `inner` is one of `outer`."""
    return inner.roundoff >= outer.roundoff and inner.top <= outer.top and inner.lost >= outer.lost


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    """float64 -> the format's array, to nearest even; what is too large becomes the largest number, not infinity."""
    top = format_of(name).top
    x = np.clip(x, -top, top)  # NaN stays NaN
    if name == "int8":
        x = np.rint(x)
    return x.astype(dtype_of(name))
