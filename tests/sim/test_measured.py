"""NVIDIA AIConfigurator's measured attention latencies (A100, H100, L40S; bfloat16, head_dim 128) against our bounds.

The constants of the estimate and the page's table are held against the data too."""

import numpy as np
import pytest

from benchmarks.simulator_figures import DECODE_FILE, GPUS, PREFILL_FILE, Measured, measured, measured_markdown, rows_of
from sim.check import judge
from sim.gpus import get_gpu
from sim.roofline import ESTIMATES, minimum_bytes
from tests.support import ROOT, data


@pytest.fixture(scope="module")
def found() -> dict[str, Measured]:
    directory = data(f"measured/{DECODE_FILE}").parent
    return {each.gpu: each for each in measured(directory)}


@pytest.mark.parametrize("gpu", ["a100-80", "h100"])
def test_no_row_of_a100_or_h100_beats_a_bound(found: dict[str, Measured], gpu: str) -> None:
    """With or without the rule about L2: 0 of 5,431 and 5,435 decode rows, 0 of 5,457 prefill rows each."""
    assert found[gpu].decode > 5000
    assert found[gpu].prefill > 5000
    assert (found[gpu].decode_impossible, found[gpu].cold, found[gpu].prefill_impossible) == (0, 0, 0)


def test_l40s_beats_the_bound_only_where_its_l2_holds_the_cache(found: dict[str, Measured]) -> None:
    """734 of 5,432 decode rows are up to 2.95 times too fast for HBM alone; every one of them fits in the 96 MB L2."""
    l40s = found["l40s"]
    assert l40s.cold == 734
    assert l40s.decode_impossible == 0
    assert l40s.prefill_impossible == 0
    rows = rows_of(data(f"measured/{DECODE_FILE}"), "L40S")
    cold = judge(iter(rows), get_gpu("l40s"), cold=True).impossible
    assert max(minimum_bytes(each.row.shape) for each in cold) <= (get_gpu("l40s").l2 or 0)
    assert max(each.factor for each in cold) == pytest.approx(2.95, abs=0.01)


def test_charging_k_and_v_to_every_query_head_makes_many_rows_impossible(found: dict[str, Measured]) -> None:
    """So the test above can tell a right count from a wrong one."""
    assert all(each.as_mha >= 0.30 for each in found.values())


def test_leaving_out_the_values_is_found(found: dict[str, Measured]) -> None:
    """AIConfigurator issue 1379: a kernel timed with keys only looks too fast for the bytes of K and V."""
    assert all(each.keys_only > 300 for each in found.values())


@pytest.mark.parametrize("gpu", sorted(ESTIMATES))
def test_the_estimate_holds_on_rows_that_were_not_fitted(found: dict[str, Measured], gpu: str) -> None:
    """Random halves of the rows above 100 MB: at most 15% median error on the other half; the constants are the fit's."""
    fit = found[gpu].fit
    assert fit.held_out_error <= 0.15
    assert ESTIMATES[gpu].t0 == pytest.approx(fit.t0, abs=0.05e-6)
    assert ESTIMATES[gpu].efficiency == pytest.approx(fit.efficiency, abs=5e-4)
    assert ESTIMATES[gpu].held_out_error == pytest.approx(fit.held_out_error, abs=5e-4)


def test_another_half_gives_nearly_the_same_fit() -> None:
    from sim.roofline import fit_estimate

    for label, name in GPUS.items():
        rows = rows_of(data(f"measured/{DECODE_FILE}"), label)
        nbytes = np.array([minimum_bytes(row.shape) for row in rows])
        seconds = np.array([row.seconds for row in rows])
        large = nbytes > 100e6
        fits = [fit_estimate(nbytes[large], seconds[large], get_gpu(name).bandwidth, seed) for seed in range(5)]
        assert all(fit.held_out_error <= 0.15 for fit in fits)
        assert max(fit.efficiency for fit in fits) - min(fit.efficiency for fit in fits) < 0.03


def test_prefill_rows_are_judged_by_their_visible_pairs() -> None:
    """Charging the whole square instead of its causal half makes rows impossible: the bound is near enough to tell."""
    from dataclasses import replace

    rows = rows_of(data(f"measured/{PREFILL_FILE}"), "H100-SXM")
    square = (replace(row, shape=replace(row.shape, causal=False)) for row in rows)
    assert judge(iter(rows), get_gpu("h100")).impossible == []
    assert len(judge(square, get_gpu("h100")).impossible) > 0


def test_the_page_has_the_table_of_the_data(found: dict[str, Measured]) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    assert measured_markdown(list(found.values())) in page
