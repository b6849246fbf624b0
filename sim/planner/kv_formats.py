"""In which form K and V are stored: the simulator's formats, and llama.cpp's two block formats."""

from collections.abc import Mapping

from nanokv.errors import UsageError
from sim.formats import FORMATS, Format, get_format
from sim.planner.layers import Layer

# ggml-common.h: a block of 32 elements with one float16 scale, 34 and 18 bytes.
BLOCKS: Mapping[str, Format] = {
    "q8_0": Format("q8_0", 8, scale_bits=16, group=32),
    "q4_0": Format("q4_0", 4, scale_bits=16, group=32),
}


def kv_format(name: str) -> Format:
    """A format by its name or a usual short one; UsageError names them all."""
    key = name.strip().lower()
    if key in BLOCKS:
        return BLOCKS[key]
    try:
        return get_format(key)
    except UsageError:
        raise UsageError(f"unknown KV dtype {name!r}: choose one of {', '.join((*FORMATS, *BLOCKS))}") from None


def vector_bytes(form: Format, dim: int) -> int:
    """Bytes of one head's key or value of `dim` elements for one token, scales included.

    llama.cpp keeps whole blocks: a head that they do not divide is a UsageError, as it is an error there.
    """
    if dim == 0:
        return 0
    if form.name in BLOCKS and dim % form.group:
        raise UsageError(f"{form.name} stores blocks of {form.group} elements, which do not divide a head of {dim}")
    return form.row_bytes(dim) + form.scale_bytes(dim)


def token_bytes(layer: Layer, form: Format) -> int:
    """Bytes of K and V that one token takes in one layer."""
    return layer.kv_heads * (vector_bytes(form, layer.head_dim_k) + vector_bytes(form, layer.head_dim_v))
