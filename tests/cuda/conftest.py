"""CuPy's place taken by the stand-in, for one test."""

import sys

import pytest

from tests.cuda.machine import compiler
from tests.cuda.stand_in import Meter, install


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """What is asked of the card."""
    compiler()
    found = Meter()
    monkeypatch.setitem(sys.modules, "cupy", install(monkeypatch, found))
    return found
