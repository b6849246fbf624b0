"""Presets and GPU files."""

from pathlib import Path

import pytest

from nanokv.errors import UsageError
from sim.gpus import GIB, KIB, PRESETS, get_gpu

NAMES = ["a100-40", "a100-80", "h100", "h200", "b200", "l4", "l40s", "rtx-4090", "rtx-3090", "t4", "mi300x", "a100-paper"]
FILE = """
name = "mine"
memory_gb = 24
bandwidth_gb_per_s = 1000.5
sram_kb_per_block = 99
multiprocessors = 10
sram_kb_per_multiprocessor = 100
l2_mb = 6
[tera_ops]
float16 = 71
float32 = 35.6
"""


def test_every_preset_is_there_and_says_where_it_is_from() -> None:
    assert list(PRESETS) == NAMES
    for gpu in PRESETS.values():
        assert len(gpu.source) > 20
        assert gpu.sram * gpu.multiprocessors <= gpu.sram_total + gpu.multiprocessors * KIB
        assert gpu.rates["float16"] > 0


def test_known_numbers() -> None:
    """NVIDIA data sheets and CCCL: what a block may allocate is 1 KB less than a multiprocessor has, from sm_80 on."""
    a100, h100, l40s = get_gpu("a100-80"), get_gpu("H100"), get_gpu("l40s")
    assert (a100.bandwidth, a100.rate("float16"), a100.sram, a100.memory) == (2039 * 10**9, 312e12, 163 * KIB, 80 * GIB)
    assert round(a100.sram_total / 2**20, 1) == 17.3
    assert (h100.bandwidth, h100.rate("bfloat16"), h100.rate("fp8_e4m3"), h100.sram) == (
        3350 * 10**9,
        989e12,
        1979e12,
        227 * KIB,
    )
    assert (l40s.bandwidth, l40s.l2, l40s.rate("float16")) == (864 * 10**9, 96 << 20, 362e12)
    paper = get_gpu("a100-paper")
    assert (paper.sram, paper.bandwidth, paper.sram_bandwidth, paper.host_bandwidth) == (
        192 * KIB,
        15 * 10**11,
        19 * 10**12,
        128 * 10**8,
    )


def test_memory_is_what_the_driver_reports() -> None:
    """The GB of a card's name are GiB, less what the driver and ECC keep. vLLM's log of an RTX 4090 (25.25 GB seen) and the
    23.64 GiB that PyTorch's messages name lie below the driver's 24,564 MiB, and above 24 * 10^9 bytes."""
    total = {name: PRESETS[name].memory / (1 << 20) for name in NAMES[:-1]}
    assert total == {
        "a100-40": 40_960, "a100-80": 81_920, "h100": 81_559, "h200": 143_771, "b200": 183_359, "l4": 23_034, "l40s": 46_068,
        "rtx-4090": 24_564, "rtx-3090": 24_576, "t4": 15_360, "mi300x": 196_592,
    }  # fmt: skip
    assert 24 * 10**9 < 25.25e9 < 23.64 * GIB < PRESETS["rtx-4090"].memory < 24 * GIB
    named = {"a100-40": 40, "a100-80": 80, "h100": 80, "l4": 24, "l40s": 48, "rtx-4090": 24, "rtx-3090": 24, "t4": 16}
    for name, gib in named.items():
        assert 0.93 * gib * GIB <= PRESETS[name].memory <= gib * GIB, name


def test_a_t4_has_no_bfloat16() -> None:
    with pytest.raises(UsageError, match="t4 has no bfloat16 rate: it has float16"):
        get_gpu("t4").rate("bfloat16")


def test_a_file_gives_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    gpu = get_gpu(str(path))
    assert (gpu.name, gpu.memory, gpu.bandwidth, gpu.sram, gpu.l2) == ("mine", 24 * 10**9, 1000500000000, 99 * KIB, 6 << 20)
    assert gpu.sram_total == 1000 * KIB
    assert gpu.rate("float32") == 35.6e12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memory_gb = 24", ""), "no 'memory_gb'"),
        (("bandwidth_gb_per_s = 1000.5", "bandwidth_gb_per_s = 0"), "bandwidth_gb_per_s 0 is not a positive number"),
        (("l2_mb = 6", "l2_mb = true"), "l2_mb True is not a positive number"),
        (("l2_mb = 6", "l3_mb = 6"), "unknown key 'l3_mb'"),
        (("float16 = 71", "float15 = 71"), "unknown dtype 'float15'"),
        (("float16 = 71", "float16 = nan"), "float16 nan is not a positive number"),
        (("[tera_ops]\nfloat16 = 71\nfloat32 = 35.6\n", ""), r"no table \[tera_ops\]"),
        (('name = "mine"', 'name = "mine'), "is not TOML"),
        (("sram_kb_per_block = 99", "sram_kb_per_block = 1e-6"), "is less than one"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "mine.toml"
    assert change[0] in FILE
    path.write_text(FILE.replace(*change))
    with pytest.raises(UsageError, match=message) as caught:
        get_gpu(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_unknown_name_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot read GPU file nowhere.toml"):
        get_gpu("nowhere.toml")
    with pytest.raises(UsageError, match="unknown GPU 'h10': did you mean h100"):
        get_gpu("h10")
