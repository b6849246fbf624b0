"""The CUDA sources as text, what they offer, and how they are compiled. Imports nothing but the standard library.

A source is given whole, its own includes in their places, so that a compiler needs no path and a cache of compiled code,
which goes by the text, sees an edit of a header. Names are C++'s: a template's arguments are part of a kernel's name.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
# Nothing is contracted that the source does not say; division, square root and subnormal numbers are IEEE's by default.
OPTIONS = ("--std=c++17", "--fmad=false")

FORMS = ("Float32", "Bf16", "Fp16", "Int8", "Int4", "Int8Row")  # in the order of nanokv.kernels.matrix.FORMATS
FEW_ROWS = (1, 4, 8)  # rows that one block of linear_segments takes
QUERIES = (8, 16)  # queries that one block of attention takes
KERNELS: dict[str, tuple[str, ...]] = {
    "linear.cu": (
        *(f"linear_segments<{form}, {rows}>" for form in FORMS for rows in FEW_ROWS),
        *(f"linear_rows<{form}>" for form in FORMS),
        *(f"embed_rows<{form}>" for form in FORMS),
        "linear_sum",
    ),
    "attention.cu": (
        "attend_tiles<8>",
        *(f"attend_rows<{queries}>" for queries in QUERIES),
        "combine_tiles",
    ),
    "rows.cu": ("layer_norm", "rms_norm", "gelu_new", "gelu_erf", "swiglu", "rotate", "embed", "add"),
    "cache.cu": (*(f"append<{codec}>" for codec in range(6)), "append_keys_int4", "append_values_int4", "copy_unit"),
    "softmax.cu": ("softmax",),
    "choose.cu": ("argmax", "sample", "mark_seen"),
}
FILES = {kernel: file for file, kernels in KERNELS.items() for kernel in kernels}


def source(file: str, folder: Path = HERE) -> str:
    """The text of a source with its own headers in it; line numbers stay those of the files."""
    done: set[str] = set()

    def expanded(name: str) -> str:
        if name in done:
            return ""
        done.add(name)
        out = []
        for number, line in enumerate((folder / name).read_text(encoding="utf-8").splitlines(), start=1):
            include = re.fullmatch(r'#include "(.+)"', line)
            if include:
                out.append(f'#line 1 "{include[1]}"\n{expanded(include[1])}\n#line {number + 1} "{name}"')
            elif line != "#pragma once":
                out.append(line)
        return "\n".join(out)

    return f'#line 1 "{file}"\n{expanded(file)}\n'


def first_error(log: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\berror\b", line)), lines[0] if lines else "the compiler said nothing")
