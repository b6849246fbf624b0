"""What a user reads when a kernel cannot be made ready: the compiler's first error, the library that is missing."""

import shutil

import numpy as np
import pytest

from nanokv.errors import BackendError
from nanokv.kernels.cuda import launches
from nanokv.kernels.cuda.card import Card
from nanokv.kernels.cuda.program import HERE, source
from tests.cuda.stand_in import Meter, install
from tests.cuda.test_nvrtc import compiled_text, usable

NO_NVRTC = (
    "CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12: cannot open shared object file: No such file or directory"
)


def card_that_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Card:
    cupy = install(monkeypatch, Meter())

    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(cupy, "RawModule", refuse)
    return Card(cupy)


def message_of(card: Card) -> str:
    with pytest.raises(BackendError) as found:
        launches.softmax(card, np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32))
    assert found.value.__cause__ is not None
    return str(found.value)


def test_a_missing_nvrtc_is_named(monkeypatch):
    message = message_of(card_that_raises(monkeypatch, RuntimeError(NO_NVRTC)))
    assert (
        message
        == f"kernel softmax of softmax.cu cannot be made ready: {NO_NVRTC}; install CUDA's NVRTC, or use --backend numpy"
    )


def test_an_error_without_words_has_its_type(monkeypatch):
    assert "made ready: LookupError;" in message_of(card_that_raises(monkeypatch, LookupError()))


@pytest.mark.filterwarnings("ignore")
def test_the_compilers_first_error_has_the_headers_line(monkeypatch, tmp_path):
    """A real log, as CuPy hands it on: several errors, warnings before them, the mistake in a header."""
    usable()
    from cupy.cuda.compiler import CompileException

    for path in HERE.glob("*.cu*"):
        shutil.copy(path, tmp_path / path.name)
    header = (HERE / "vocab.cuh").read_text(encoding="utf-8")
    broken = header.replace("int lane = threadIdx.x % WARP", "int unused = 0; int lane = threadIdx.y.z % WARP", 1)
    assert broken != header
    (tmp_path / "vocab.cuh").write_text(broken, encoding="utf-8")
    line = broken[: broken.index("threadIdx.y.z")].count("\n") + 1
    text = source("softmax.cu", tmp_path)
    with pytest.raises(RuntimeError) as found:
        compiled_text("softmax.cu", text, "sm_80", ["softmax"])
    log = str(found.value)
    message = message_of(card_that_raises(monkeypatch, CompileException(log, text, "softmax.cu", (), "nvrtc")))
    assert f"made ready: vocab.cuh({line}): error:" in message
    assert "\n" not in message


def test_a_kernel_that_could_not_be_loaded_is_tried_again(monkeypatch):
    """Nothing half-made is kept: once the library is there the same card works."""
    cupy = install(monkeypatch, Meter())
    real, card = cupy.RawModule, Card(cupy)

    def refuse(**_: object) -> None:
        raise RuntimeError(NO_NVRTC)

    monkeypatch.setattr(cupy, "RawModule", refuse)
    message_of(card)
    monkeypatch.setattr(cupy, "RawModule", real)
    x, out = cupy.zeros((1, 4), dtype=np.float32), cupy.zeros((1, 4), dtype=np.float32)
    launches.softmax(card, x, out)
    assert out.get().tolist() == [[0.25] * 4]
