"""docs/planner.md shows what `replay` prints for the public traces, and their published figures beside what it computes."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.planner_figures import PAPER, main, trace_figures, useful_shares
from nanokv.commands.replay import replay
from tests.support import ROOT, data

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


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_the_page_shows_what_a_command_prints(command: str, output: str) -> None:
    result = CliRunner().invoke(replay, shlex.split(command.replace("\\\n", " "))[3:])
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.rstrip().splitlines()] == output.rstrip().splitlines()


def test_the_traces_figures_are_met() -> None:
    assert all(row.met for row in trace_figures(data("traces")))


@pytest.mark.slow
def test_the_tables_are_on_the_page() -> None:
    result = CliRunner().invoke(main, ["--traces", str(data("traces"))])
    assert result.exit_code == 0
    for part in result.stdout.strip().split("\n\n"):
        assert part in PAGE


@pytest.mark.slow
def test_the_order_of_the_paper_holds_on_other_traffic() -> None:
    """Which is best does not depend on the trace; how good it is does. Paging wastes less than a block a request."""
    shares = useful_shares(data("traces"))
    assert [policy.kind for policy, _ in PAPER] == ["max", "pow2", "oracle", "paged"]
    for column in zip(*shares, strict=True):
        assert list(column) == sorted(column)
        assert column[-1] > 96.3
