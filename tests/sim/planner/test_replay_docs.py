"""docs/planner.md shows what `replay` prints for the public traces, and their published figures beside what it computes."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import settings

from benchmarks.planner_figures import PAPER, main, table, trace_figures, useful_shares, useful_table
from nanokv.commands.replay import replay
from tests.support import EVERYDAY, ROOT, data

PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```console\n\$ (python cli\.py replay (?:.*\\\n)*.*)\n((?:.*\n)*?)```", PAGE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces and configs as the page names them."""
    monkeypatch.chdir(tmp_path)
    Path("traces").symlink_to(data("traces"))
    assert CliRunner().invoke(main, ["--write-configs", "configs"]).exit_code == 0


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 3


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_the_page_shows_what_a_command_prints(command: str, output: str) -> None:
    result = CliRunner().invoke(replay, shlex.split(command.replace("\\\n", " "))[3:])
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.rstrip().splitlines()] == output.rstrip().splitlines()


def test_the_traces_figures_are_met_and_on_the_page() -> None:
    rows = list(trace_figures(data("traces")))
    assert all(row.met for row in rows)
    assert "\n".join(table(rows)) in PAGE


def test_the_order_of_the_paper_holds_on_other_traffic() -> None:
    """Which is best does not depend on the trace; how good it is does. Paging wastes less than a block a request. A part of
    the trace tells nearly what all of it does: memory is full from beginning to end."""
    shares = useful_shares(data("traces"), 400)
    assert [policy.kind for policy, _ in PAPER] == ["max", "pow2", "oracle", "paged"]
    for column in zip(*shares, strict=True):
        assert list(column) == sorted(column)
        assert column[-1] > 96.3
    for (policy, printed), row in zip(PAPER, shares, strict=True):
        shown = re.search(rf"\| {policy.label} \| {printed}% \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)% \|", PAGE)
        assert shown is not None
        assert row == pytest.approx([float(share) for share in shown.groups()], abs=5)


@pytest.mark.slow
@pytest.mark.skipif(settings.default.max_examples == EVERYDAY, reason="minutes: run with --hypothesis-profile thorough")
def test_the_useful_shares_of_the_whole_trace_are_on_the_page() -> None:
    assert "\n".join(useful_table(data("traces"))) in PAGE
