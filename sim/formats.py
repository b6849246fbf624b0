"""How elements are stored in device memory: bits an element, and the scales that quantised ones carry beside them.

A cache's formats are those of the runtime's codecs (nanokv.kv.codec) under the same names, byte for byte, but for fp8, which
here has one scale for everything, as the runtime's has with a KV scale and vLLM's by default; `fp8_scaled` is its other one.
"""

from dataclasses import dataclass, replace

from nanokv.errors import UsageError


@dataclass(frozen=True)
class Format:
    """`bits` an element; `scale_bits` of scales (and minima) for each `group` elements of a row, 0 = the whole row.

    A row is one token of one head. Keys of int4 have their groups along tokens instead: a whole group of 32 tokens has the
    bytes that its rows have here where 32 divides the row, and fewer where a row ends in a part of a group.
    """

    name: str
    bits: int
    scale_bits: int = 0
    group: int = 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row's elements, a last odd nibble filled up; its scales are scale_bytes()."""
        return -(-columns * self.bits // 8)

    def scale_bytes(self, columns: int) -> int:
        """Bytes of one row's scales."""
        groups = -(-columns // self.group) if self.group else 1
        return groups * self.scale_bits // 8

    @property
    def bare(self) -> "Format":
        """The elements alone: Q, O, scores and gradients have one scale a tensor, which is no stream of bytes."""
        return replace(self, scale_bits=0, group=0)


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format("float32", 32),
        Format("float16", 16),
        Format("bfloat16", 16),
        Format("fp8_e4m3", 8),  # one scale a tensor (vLLM), not a stream
        Format("fp8_scaled", 8, scale_bits=32),  # a float32 scale for each token and head
        Format("int8", 8, scale_bits=32),  # the same
        Format("int4", 4, scale_bits=64, group=32),  # a float32 minimum and span for each 32 elements (KIVI's group)
    )
}
PACKED_WEIGHTS = Format("int4", 4, scale_bits=32, group=32)  # a float16 scale and minimum, 20 bytes (ggml-common.h: q4_1)
FLOAT32, FLOAT16, BYTE = FORMATS["float32"], FORMATS["float16"], Format("byte", 8)
COMPUTE = ("float32", "float16", "bfloat16", "fp8_e4m3", "int8")  # what a matrix unit multiplies

_ALIASES = {
    "fp32": "float32", "f32": "float32", "torch.float32": "float32", "bf16": "bfloat16", "torch.bfloat16": "bfloat16",
    "fp16": "float16", "f16": "float16", "half": "float16", "torch.float16": "float16", "fp8": "fp8_e4m3",
}  # fmt: skip


def of_weights(form: Format) -> Format:
    """How a matrix of this name is stored: packed weights have half-precision scales, where a cache has float32 ones."""
    return PACKED_WEIGHTS if form.name == PACKED_WEIGHTS.name else form


def get_format(name: str) -> Format:
    """A format by its name or a usual short one; UsageError when there is none."""
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in FORMATS:
        raise UsageError(f"unknown dtype {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[key]
