"""What people read: every number of a table is the run's own."""

from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.simulator_figures import LLAMA2_7B
from sim.formats import FORMATS
from sim.gpus import get_gpu
from sim.memory import Values
from sim.report import BINARY_UNITS, COUNT_UNITS, both, decimal, duration, model_report, simulation_report
from sim.run import Simulation, simulate
from sim.shape import Shape, TileSize
from sim.transformer import simulate_model

A100 = get_gpu("a100-80")
TILE = TileSize(128, 128)


def text_of(report: object) -> list[str]:
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(report)
    return captured.get().splitlines()


def counted(shape: Shape, gpu: str = "a100-80") -> Simulation:
    return simulate(shape, get_gpu(gpu), tile=TILE, values=Values.NONE)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (8912896, "8.91 MB"), (99.96e9, "100 GB"), (9.996e12, "10.0 TB"),
     (1e30, "1000000000000 EB")],
)  # fmt: skip
def test_decimal_units(number: float, text: str) -> None:
    assert decimal(number) == text


def test_both_units() -> None:
    """164.28 GB = 153 GiB is the trap: GPT-3's cache at batch 64, 544 tokens."""
    assert both(164_282_499_072) == "164 GB = 153.00 GiB"
    assert both(8_912_896) == "8.91 MB = 8.50 MiB"
    assert both(999) == "999 B"
    assert both(1 << 60).endswith(f"1.00 {BINARY_UNITS[-1]}")
    assert decimal(824_633_720_832, COUNT_UNITS) == "825 G"


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.234e-3, "1.23 ms"), (99.96e-6, "100 us"), (0.9996, "1.00 s"), (3e-10, "0.30 ns")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_row_of_an_algorithm() -> None:
    found = counted(Shape(1024, heads=1, head_dim=64))
    (line,) = (line for line in text_of(simulation_report(found)) if line.startswith("flash2"))
    total, naive = found.results["flash2"].counts.total, found.results["naive"].hbm
    assert line.split() == [
        "flash2", "128x128", *decimal(total.hbm_read).split(), *decimal(total.hbm_write).split(), *decimal(total.hbm).split(),
        f"{naive / total.hbm:.2f}x", "48", "KB", *decimal(found.results["flash2"].counts.flops, COUNT_UNITS).split(),
        f"{found.results['flash2'].bound.intensity:.1f}", "memory", *duration(found.results["flash2"].bound.seconds).split(),
    ]  # fmt: skip
    assert naive > 2 * total.hbm


def test_the_rows_of_tensors_have_the_four_directions() -> None:
    """naive re-reads K from the cache: more comes into SRAM than HBM reads; O is written once."""
    lines = text_of(simulation_report(counted(Shape(1024, heads=1, head_dim=64)), per_tensor=True))
    table = lines[lines.index("bytes of each tensor") + 1 :]
    (k,) = (line.split() for line in table[:8] if line.split()[:1] == ["K"])
    assert k == ["K", "131,072", "1,048,576"]
    (s,) = (line.split() for line in table[:8] if line.split()[:1] == ["S"])
    assert s == ["S", "2,097,152", "2,097,152", "4,194,304", "2,097,152"]
    (header,), (o,) = ([line for line in table if word in line][:1] for word in ("HBM written", " O "))
    assert o.rstrip().endswith("131,072")
    assert o.index("131,072") + len("131,072") == header.index("HBM written") + len("HBM written")


def test_what_does_not_fit_in_hbm_is_said_of_it_alone() -> None:
    notes = "\n".join(text_of(simulation_report(counted(Shape(1 << 20)))))
    assert "naive keeps 141 TB = 128.03 TiB in HBM, which has 85.9 GB = 80.00 GiB: it cannot run" in notes
    assert "flash2 keeps" not in notes
    assert "cannot run" not in "\n".join(text_of(simulation_report(counted(Shape(1024)))))


def test_what_is_left_out_is_named_once() -> None:
    notes = "\n".join(text_of(simulation_report(counted(Shape(1024), "l4"))))
    assert "flash1 is left out: tile 128x128 needs" in notes


def test_one_query_is_one_query() -> None:
    assert "\n1 query x 64 keys" in "\n".join(text_of(simulation_report(counted(Shape(64, q_len=1)))))


def test_a_models_tokens_are_those_of_the_batch() -> None:
    shape, half = Shape(512, batch=3), FORMATS["float16"]
    steps = simulate_model(LLAMA2_7B, A100, shape, half)
    text = "\n".join(text_of(model_report(LLAMA2_7B, A100, shape, "float16", steps)))
    for phase, tokens in (("prefill", 3 * 512), ("decode", 3)):
        assert (
            f"{phase}: at least {duration(steps[phase].seconds)}, at most {tokens / steps[phase].seconds:,.0f} tokens/s" in text
        )
    alone = simulate_model(LLAMA2_7B, A100, replace(shape, batch=1), half)
    assert alone["decode"].seconds < steps["decode"].seconds < 1.1 * alone["decode"].seconds  # the weights are read once
