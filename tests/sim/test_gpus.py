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
        989.4e12,
        1979e12,
        227 * KIB,
    )
    assert (l40s.bandwidth, l40s.l2, l40s.rate("float16")) == (864 * 10**9, 96 << 20, 362.05e12)
    paper = get_gpu("a100-paper")
    assert (paper.sram, paper.bandwidth, paper.sram_bandwidth, paper.host_bandwidth) == (
        192 * KIB,
        15 * 10**11,
        19 * 10**12,
        128 * 10**8,
    )


@pytest.mark.parametrize(
    ("name", "lanes", "gigahertz", "products", "boost"),
    [
        ("a100-40", 64, 1.41, 1024, 1.41),
        ("a100-80", 64, 1.41, 1024, 1.41),
        ("a100-paper", 64, 1.41, 1024, 1.41),
        ("h100", 128, 1.98, 2048, 1.83),
        ("h200", 128, 1.98, 2048, 1.83),
        ("l4", 128, 2.04, 512, 2.04),
        ("l40s", 128, 2.52, 512, 2.49),
        ("rtx-4090", 128, 2.52, 256, 2.52),
        ("rtx-3090", 128, 1.695, 256, 1.695),
        ("t4", 64, 1.59, 512, 1.59),
        ("mi300x", 128, 2.1, 1024, 2.1),
    ],
)
def test_rates_follow_from_units_and_clock(name: str, lanes: int, gigahertz: float, products: int, boost: float) -> None:
    """Two operations a clock for each float32 lane and 16-bit product of a multiprocessor; two or three digits are printed."""
    gpu = get_gpu(name)
    assert gpu.rate("float32") == pytest.approx(2 * lanes * gpu.multiprocessors * gigahertz * 1e9, rel=1e-2)
    assert gpu.rate("float16") == pytest.approx(2 * products * gpu.multiprocessors * boost * 1e9, rel=1e-2)


def test_eight_bits_are_twice_sixteen() -> None:
    for gpu in PRESETS.values():
        for name in {"fp8_e4m3", "int8"} & set(gpu.rates):
            assert gpu.rates[name] == pytest.approx(2 * gpu.rates["float16"], rel=0.02)  # L40S: 733 to 2 x 362.05


@pytest.mark.parametrize(
    ("name", "bandwidth", "shared", "block", "l2"),
    [
        ("a100-40", 1555, 164, 163, 40), ("a100-80", 2039, 164, 163, 40), ("h100", 3350, 228, 227, 50),
        ("h200", 4800, 228, 227, 50), ("b200", 8000, 228, 227, 126), ("l4", 300, 100, 99, 48), ("l40s", 864, 100, 99, 96),
        ("rtx-4090", 1008, 100, 99, 72), ("rtx-3090", 936, 100, 99, 6), ("t4", 320, 64, 64, 4), ("mi300x", 5300, 64, 64, 32),
    ],
)  # fmt: skip
def test_bandwidth_and_on_chip_memory(name: str, bandwidth: int, shared: int, block: int, l2: int) -> None:
    """The vendors' data sheets and CCCL's arch_traits.h, as the table that the presets were written from has them."""
    gpu = get_gpu(name)
    assert (gpu.bandwidth, gpu.sram, gpu.l2) == (bandwidth * 10**9, block * KIB, l2 << 20)
    assert gpu.sram_total == gpu.multiprocessors * shared * KIB
    assert gpu.registers == 256 * KIB
    assert get_gpu("a100-paper").registers is None


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
        (("sram_kb_per_block = 99", "sram_kb_per_block = 101"), "is less than sram_kb_per_block"),
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
