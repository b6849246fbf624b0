"""The documentation's Python runs and prints what it says; its links and commands lead somewhere."""

import doctest
import re
import shlex

import pytest
from click.testing import CliRunner

from nanokv.commands.generate import generate
from tests.support import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_print_what_they_say(page):
    if ">>>" not in page.read_text(encoding="utf-8"):
        return
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_modules_exist(page):
    for name in re.findall(r"python -m (benchmarks\.\w+|weights\.\w+)", page.read_text(encoding="utf-8")):
        assert (ROOT / (name.replace(".", "/") + ".py")).exists(), name


def test_the_test_map_names_tests_that_exist():
    text = (ROOT / "docs" / "test_map.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        for file in re.findall(r"[\w/]+\.py", line):
            assert (ROOT / "tests" / file).exists(), file
    files = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"\b([a-z0-9]+(?:_[a-z0-9]+){3,})(?=[…,;.| ]|$)", text, re.M):
        assert name in files, name


def test_the_face_names_what_it_has():
    import nanokv

    assert set(nanokv.__all__) == {"load", *nanokv._MODULE_OF}
    for name in nanokv.__all__:
        assert getattr(nanokv, name) is not None


def console_blocks():
    """(page, command, what it prints) of every console block of the documentation."""
    for page in PAGES:
        for command, output in re.findall(
            r"```console\n\$ (python cli\.py generate [^\n]*)\n(.*?)```", page.read_text("utf-8"), re.S
        ):
            yield page.name, command, output


@pytest.mark.parametrize(("page", "command", "output"), list(console_blocks()))
def test_commands_print_what_the_page_shows(page, command, output):
    result = CliRunner().invoke(generate, shlex.split(command)[3:])
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == [line.rstrip() for line in output.splitlines()]
