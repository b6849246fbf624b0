"""How elements are stored in device memory: bits an element, and the scales that quantised ones carry beside them."""

from dataclasses import dataclass

from nanokv.errors import UsageError


@dataclass(frozen=True)
class Format:
    """`bits` an element; `scale_bits` of scales (and zero points) for each `group` elements of a row, 0 = the whole row.

    A row is one token of one head: scales never span tokens, so a token can be appended without touching the others.
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


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format("float32", 32),
        Format("float16", 16),
        Format("bfloat16", 16),
        Format("fp8_e4m3", 8),  # one scale a tensor (vLLM), not a stream
        Format("int8", 8, scale_bits=32),  # a float32 scale for each token and head
        Format("int4", 4, scale_bits=32, group=32),  # a float16 scale and minimum for each 32 elements (KIVI's group)
    )
}
FLOAT32, FLOAT16, BYTE = FORMATS["float32"], FORMATS["float16"], Format("byte", 8)
COMPUTE = ("float32", "float16", "bfloat16", "fp8_e4m3", "int8")  # what a matrix unit multiplies

_ALIASES = {
    "fp32": "float32", "f32": "float32", "torch.float32": "float32", "bf16": "bfloat16", "torch.bfloat16": "bfloat16",
    "fp16": "float16", "f16": "float16", "half": "float16", "torch.float16": "float16", "fp8": "fp8_e4m3",
}  # fmt: skip


def get_format(name: str) -> Format:
    """A format by its name or a usual short one; UsageError when there is none."""
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in FORMATS:
        raise UsageError(f"unknown dtype {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[key]
