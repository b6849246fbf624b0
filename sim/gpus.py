"""The GPUs that the simulator knows: what each level of memory holds and how fast it can possibly be.

Every figure is the vendor's peak for dense data: nothing here is measured, so a time computed from it is a lower bound.
Vendors' sheets print the rate with 2:1 sparsity, which is twice the dense one, and for GeForce cards a rate that
accumulates in half precision; neither is used. KB and MB of on-chip memory are powers of two. Device memory is what the
driver reports in all (nvidia-smi, rocm-smi): the "GB" of a card's name are GiB, less what the driver and ECC keep. A process
sees a little less still: CUDA gives it 23.5 to 23.65 of an RTX 4090's 23.99 GiB.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nanokv.errors import UsageError
from sim.formats import FORMATS

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB, TERA = 10**9, 10**12
REGISTERS = 65536 * 4  # 65,536 registers of 32 bits a thread block (CUDA's and HIP's device property regsPerBlock)


@dataclass(frozen=True)
class GPU:
    """One GPU. Bytes, bytes a second and operations a second; a rate that is missing was not found in a source.

    `sram` is what one thread block may allocate, `sram_total` what all multiprocessors have together; `registers` (bytes a
    thread block) is None where accumulators are not charged to a level of their own.
    """

    name: str
    memory: int
    bandwidth: int
    sram: int
    multiprocessors: int
    sram_total: int
    l2: int | None
    rates: Mapping[str, float] = field(hash=False)
    source: str = ""
    registers: int | None = REGISTERS
    sram_bandwidth: int | None = None
    host_bandwidth: int | None = None

    def rate(self, dtype: str) -> float:
        """Dense operations a second with operands of `dtype`; UsageError where no source states one."""
        if dtype not in self.rates:
            raise UsageError(f"{self.name} has no {dtype} rate: it has {', '.join(self.rates)}; --gpu FILE.toml sets others")
        return self.rates[dtype]


def _rates(half: float, *, bfloat16: bool = True, float32: float | None = None, fp8: float | None = None,
           int8: float | None = None) -> dict[str, float]:  # fmt: skip
    """Rates in tera-operations a second -> by dtype."""
    tera = {"float16": half, "bfloat16": half if bfloat16 else None, "float32": float32, "fp8_e4m3": fp8, "int8": int8}
    return {name: rate * TERA for name, rate in tera.items() if rate is not None}


# Shared memory: NVIDIA CCCL, cuda/devices arch_traits.h: a multiprocessor has 64 KB (sm_75), 164 (sm_80), 100 (sm_86,
# sm_89) or 228 (sm_90, sm_100), and one block may take 64, 163, 99 or 227 of it.
_SM75, _SM80, _SM86, _SM90 = (64, 64), (164, 163), (100, 99), (228, 227)
_NVIDIA = "NVIDIA data sheet; shared memory from CCCL arch_traits.h"
_GEFORCE = " (16-bit operands, accumulated in float32); shared memory from CCCL arch_traits.h"
# float32: the vector units' rate, two operations a clock for each of a multiprocessor's lanes; tests recompute every one from
# lanes and boost clock. B200 has none: NVIDIA's papers give 75 and 80. GeForce: fp8 and int8 were not looked up.
_AIC = "AIConfigurator systems/*.yaml (bandwidth, bf16, fp8, int8); " + _NVIDIA
# Totals as nvidia-smi prints them: modal-labs/modal-client #2797 (A100, H100, L4, L40S, T4), vLLM #7553 (RTX 4090),
# noonghunna/club-3090 #741 (RTX 3090), public logs of H200 and B200; rocm-smi's 206,141,652,992 bytes: ROCm #4750 (MI300X).


def _gpu(name: str, memory: int, bandwidth: int, sms: int, shared: tuple[int, int], l2_mb: int, rates: dict[str, float],
         source: str, **more: Any) -> GPU:  # fmt: skip
    """Bandwidth in GB/s, shared memory in KB (a multiprocessor, a block), L2 in MB."""
    total, block = shared
    return GPU(name, memory, bandwidth * GB, block * KIB, sms, sms * total * KIB, l2_mb * MIB, rates, source, **more)


_A100 = _rates(312, float32=19.5, int8=624)
_HOPPER = _rates(989.4, float32=67, fp8=1979, int8=1979)

PRESETS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40", 40 * GIB, 1555, 108, _SM80, 40, _A100, _NVIDIA + " (A100 SXM 40 GB)"),
        _gpu("a100-80", 80 * GIB, 2039, 108, _SM80, 40, _A100, _AIC + " (A100 SXM 80 GB; the PCIe card has 1935 GB/s)"),
        _gpu("h100", 81_559 * MIB, 3350, 132, _SM90, 50, _HOPPER, _AIC + " (H100 SXM; the PCIe card has 2000 GB/s, 756 TF)"),
        _gpu("h200", 143_771 * MIB, 4800, 132, _SM90, 50, _HOPPER, _AIC + " (H200 SXM)"),
        _gpu("b200", 183_359 * MIB, 8000, 148, _SM90, 126, _rates(2250, fp8=4500, int8=4500),
             _AIC + "; bandwidth is NVIDIA's 8 TB/s (AIConfigurator and the HGX sheet have 7700); no float32 rate: NVIDIA's"
             " papers disagree"),
        _gpu("l4", 23_034 * MIB, 300, 58, _SM86, 48, _rates(121, float32=30.3, fp8=242.5, int8=242.5), _NVIDIA + " (L4)"),
        _gpu("l40s", 46_068 * MIB, 864, 142, _SM86, 96, _rates(362.05, float32=91.6, fp8=733, int8=733), _AIC + " (L40S)"),
        _gpu("rtx-4090", 24_564 * MIB, 1008, 128, _SM86, 72, _rates(165.2, float32=82.6),
             "NVIDIA Ada architecture paper" + _GEFORCE),
        _gpu("rtx-3090", 24_576 * MIB, 936, 82, _SM86, 6, _rates(71, float32=35.6),
             "NVIDIA GA102 architecture paper" + _GEFORCE),
        _gpu("t4", 15_360 * MIB, 320, 40, _SM75, 4, _rates(65, bfloat16=False, float32=8.1, int8=130),
             _NVIDIA + " (T4; no bfloat16)"),
        _gpu("mi300x", 196_592 * MIB, 5300, 304, (64, 64), 32, _rates(1307.4, float32=163.4, fp8=2614.9, int8=2614.9),
             "AMD MI300X data sheet; ROCm GPU specifications (64 KB LDS a compute unit, L2 4 MB in each of 8 dies); the"
             " 256 MB Infinity Cache behind the L2 is not modelled"),
        GPU("a100-paper", 40 * GB, 1500 * GB, 192 * KIB, 108, 108 * 192 * KIB, None, _rates(312, float32=19.5),
            "FlashAttention, arXiv 2205.14135, figure 1 and section 2.1: 192 KB of SRAM for each of 108 multiprocessors at"
            " 19 TB/s together, HBM 1.5 TB/s, DRAM 12.8 GB/s; 312 TF from section 3 of arXiv 2307.08691",
            registers=None, sram_bandwidth=19_000 * GB, host_bandwidth=12_800_000_000),
    )
}  # fmt: skip


_ALIASES = {"a100": "a100-80", "a100-sxm-80": "a100-80", "h100-sxm": "h100", "h100-80": "h100", "h200-sxm": "h200",
            "4090": "rtx-4090", "rtx4090": "rtx-4090", "3090": "rtx-3090", "rtx3090": "rtx-3090"}  # fmt: skip


def get_gpu(name: str) -> GPU:
    """A preset by its name, in any case, or a GPU of one's own from a .toml file; UsageError names what is wrong."""
    if name.lower().endswith(".toml"):
        return read_gpu(Path(name))
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key not in PRESETS:
        near = get_close_matches(key, PRESETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"unknown GPU {name!r}: {hint}choose one of {', '.join(PRESETS)}, or give a FILE.toml")
    return PRESETS[key]


_KEYS = {  # key in the file -> (field, bytes or operations in one unit)
    "memory_gb": ("memory", GB),
    "bandwidth_gb_per_s": ("bandwidth", GB),
    "sram_kb_per_block": ("sram", KIB),
    "multiprocessors": ("multiprocessors", 1),
    "sram_kb_per_multiprocessor": ("sram_total", KIB),
    "l2_mb": ("l2", MIB),
    "registers_kb_per_block": ("registers", KIB),
}
_REQUIRED = ("memory_gb", "bandwidth_gb_per_s", "sram_kb_per_block")


def read_gpu(path: Path) -> GPU:
    """A GPU from a TOML file: the keys of _KEYS, `name`, `source`, and a table [tera_ops] of rates by dtype.

    UsageError names the key that is missing, unknown or not a positive number.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read GPU file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"GPU file {path} is not TOML: {error}") from error
    rates = raw.pop("tera_ops", None)
    name, source = raw.pop("name", path.stem), raw.pop("source", str(path.name))
    unknown = sorted(set(raw) - set(_KEYS))
    if unknown:
        raise UsageError(f"GPU file {path}: unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}, name, source, [tera_ops]")
    for key in _REQUIRED:
        if key not in raw:
            raise UsageError(f"GPU file {path} has no {key!r}")
    values: dict[str, Any] = {place: _whole(path, key, raw[key], unit) for key, (place, unit) in _KEYS.items() if key in raw}
    sms = values.setdefault("multiprocessors", 1)
    if values.get("sram_total", values["sram"]) < values["sram"]:
        raise UsageError(f"GPU file {path}: sram_kb_per_multiprocessor is less than sram_kb_per_block")
    values["sram_total"] = sms * values.get("sram_total", values["sram"])
    if not isinstance(rates, dict) or not rates:
        raise UsageError(f"GPU file {path} has no table [tera_ops] with a rate such as float16 = 312")
    for dtype in rates:
        if dtype not in FORMATS:
            raise UsageError(f"GPU file {path}: unknown dtype {dtype!r} in [tera_ops]; known are {', '.join(FORMATS)}")
    tera = {dtype: _number(path, dtype, rate) * TERA for dtype, rate in rates.items()}
    return GPU(str(name), l2=values.pop("l2", None), rates=tera, source=str(source), **values)


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise UsageError(f"GPU file {path}: {key} {value!r} is not a positive number")
    return float(value)


def _whole(path: Path, key: str, value: Any, unit: int) -> int:
    whole = round(_number(path, key, value) * unit)
    if whole < 1:
        raise UsageError(f"GPU file {path}: {key} {value!r} is less than one")
    return whole
