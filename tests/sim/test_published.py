"""Published figures: each row of docs/simulator.md's table, with its source, is a test; and the page has the table."""

import pytest

from benchmarks.simulator_figures import GROUPS, Figure, all_figures, flash_figure_2, markdown, unveiled_table_1
from sim.shape import Shape
from tests.support import ROOT

FIGURES = all_figures()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.what} {figure.unit}")
def test_a_published_figure(figure: Figure) -> None:
    assert figure.holds, f"{figure.what} ({figure.source}): ours {figure.ours}, theirs {figure.theirs}"


def test_none_is_missing() -> None:
    """What each source has: 16 peak memories, 28 operations and bytes, 5 rows of 3 parts, 8 of figure 2 and the rest."""
    sizes = {title: len(list(group())) for title, group in GROUPS.items()}
    assert sizes["FlashAttention's peak memory"] == 16
    assert sizes["LLM Inference Unveiled, table 1"] == 28
    assert sizes["GenZ's golden rows"] == 15
    assert all(figure.source for figure in FIGURES)


def test_a_difference_always_has_a_reason() -> None:
    differing = [figure for figure in FIGURES if figure.ours != figure.theirs and figure.low > 0]
    assert all(figure.why for figure in differing)
    assert sum(figure.ours != figure.theirs for figure in unveiled_table_1()) == 6


def test_where_table_1_is_wrong_ours_follows_from_the_shapes() -> None:
    """A residual add reads two [R, E] and writes one; RMSNorm reads and writes one and reads E weights, four operations."""
    rows, width, half = 2048, 4096, 2
    found = {(figure.what, figure.unit): figure.ours for figure in unveiled_table_1()}
    assert found["prefill add", "bytes"] == 3 * rows * width * half
    assert found["decode add", "bytes"] == 3 * width * half
    assert found["prefill norm", "bytes"] == 2 * rows * width * half + width * half
    assert found["decode norm", "bytes"] == 3 * width * half
    assert found["prefill norm", "operations"] == 4 * rows * width


def test_figure_2_lies_inside_the_bracket_of_the_switches() -> None:
    """4.4 GB (NeurIPS version and arXiv v2) between 4.03 (nothing but operands) and 4.65 (Algorithms 1 and 4 to the letter)."""
    low, _, high, *_ = (figure.ours for figure in flash_figure_2())
    assert low == pytest.approx(4.027, abs=1e-3)
    assert high == pytest.approx(4.647, abs=1e-3)
    assert low < 4.4 < high


def test_the_figure_that_does_not_match_is_not_used() -> None:
    """The paper's GFLOPs (66.6 and 75.2) are not those of batch 64 x 16 heads: six products there are 824.6."""
    shape = Shape(1024, heads=16, head_dim=64, batch=64, causal=False)
    from sim.schedules import get_schedule
    from sim.shape import TileSize

    flops = sum(get_schedule(name).closed_form(shape, TileSize(128, 128)).flops for name in ("naive", "naive-backward"))
    assert flops / 1e9 == pytest.approx(824.6, abs=0.1)


def test_the_page_has_the_table_that_the_script_makes() -> None:
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    assert markdown() in page
