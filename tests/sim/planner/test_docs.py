"""docs/planner.md shows what the commands print and what the script of figures computes, to the letter."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.planner_figures import figures, main, table
from nanokv.commands.size import size
from tests.support import ROOT

PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```console\n\$ (python cli\.py size (?:.*\\\n)*.*)\n((?:.*\n)*?)```", PAGE)


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["--write-configs", "configs"]).exit_code == 0


def test_there_are_five_questions() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_the_page_shows_what_a_command_prints(command: str, output: str) -> None:
    result = CliRunner().invoke(size, shlex.split(command.replace("\\\n", " "))[3:])
    assert result.exit_code == 0
    assert result.output.rstrip() == output.rstrip()


def test_every_figure_is_met_and_on_the_page() -> None:
    rows = list(figures())
    assert all(row.met for row in rows)
    assert "\n".join(table(rows)) in PAGE
    assert CliRunner().invoke(main, []).exit_code == 0
