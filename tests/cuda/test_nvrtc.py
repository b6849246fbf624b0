"""The CUDA sources compiled by NVRTC for real cards (no card, no driver needed), and what the compiler says of each kernel.

Every day three kernels for one architecture; in the thorough profile all kernels for all architectures.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from nanokv.kernels.cuda.program import KERNELS, OPTIONS, first_error, source
from tests.support import EVERYDAY

ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100")
EVERY_DAY = {"linear.cu": ["linear_segments<Int4, 8>"], "attention.cu": ["attend_tiles<8>"], "choose.cu": ["sample"]}
BLOCKS = {"linear_segments": 128, "linear_rows": 256, "attend_tiles": 128, "attend_rows": 128, "combine_tiles": 128,
          "layer_norm": 128, "rms_norm": 128, "append": 128, "append_values_int4": 128, "softmax": 1024, "argmax": 1024,
          "sample": 1024}  # fmt: skip
SPILLS = 128  # bytes a thread, stored and loaded: ptxas gives up a register or two to fit one more block on a multiprocessor
REGISTERS = 65536  # of a multiprocessor, on every card since sm_75
THOROUGH = settings.default.max_examples > EVERYDAY


def usable() -> None:
    """Skips, with the reason, where NVRTC is missing."""
    pytest.importorskip("cupy", exc_type=ImportError, reason="not run: CuPy is not installed")
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # the loader of the library promises no type
        pytest.skip(f"not run: NVRTC is not installed ({str(error).splitlines()[0][:80]})")


def compile_for(file: str, architecture: str, names: Sequence[str]) -> tuple[bytes, str, dict[str, str]]:
    """compiled_text() of a source; RuntimeError with the first error."""
    try:
        return compiled_text(file, source(file), architecture, names)
    except RuntimeError as error:
        raise RuntimeError(f"{file} for {architecture}: {first_error(str(error))}") from error


def compiled_text(file: str, text: str, architecture: str, names: Sequence[str]) -> tuple[bytes, str, dict[str, str]]:
    """Compiled by NVRTC, which takes no card: cubin, the compiler's log, and each kernel's name in it.

    RuntimeError with the log where the text is wrong or the architecture unknown.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, file, (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(nvrtc.getProgramLog(program)) from error
        lowered = {name: nvrtc.getLoweredName(program, name) for name in names}
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program), lowered
    finally:
        nvrtc.destroyProgram(program)


def report(log: str) -> dict[str, tuple[int, int]]:
    """ptxas's report: registers a thread and bytes of spills, by kernel (mangled)."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
        found[part.split("'")[0]] = int(re.search(r"Used (\d+) registers", part)[1]), spills
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ARCHITECTURES if THOROUGH else ["sm_90"])
@pytest.mark.parametrize("file", list(KERNELS if THOROUGH else EVERY_DAY))
def test_every_kernel_compiles_and_fits_a_card(file, architecture):
    usable()
    names = KERNELS[file] if THOROUGH else EVERY_DAY[file]
    cubin, log, lowered = compile_for(file, architecture, names)
    assert cubin[:4] == b"\x7fELF"
    found = report(log)
    assert set(lowered.values()) <= found.keys()  # kernels that are no templates are always there
    for name in names:
        registers, spills = found[lowered[name]]
        assert spills <= SPILLS, f"{name} spills {spills} bytes of registers"
        assert registers * BLOCKS.get(name.split("<")[0], 256) <= REGISTERS, f"{name}: {registers} registers a thread"


@pytest.mark.filterwarnings("ignore")
def test_a_mistake_in_a_source_is_named():
    usable()
    with pytest.raises(RuntimeError, match=r"choose.cu for sm_80: .*error"):
        compile_for("choose.cu", "sm_80", ["no_such_kernel"])


def test_the_first_error_of_a_log():
    assert first_error("a.cu(3): warning: w\na.cu(7): error: e\n2 errors") == "a.cu(7): error: e"
    assert first_error("") == "the compiler said nothing"


def test_a_source_is_whole_and_nothing_is_contracted():
    for file in KERNELS:
        text = source(file)
        assert '#include "' not in text
        assert text.count("exp_negative(float x)") == 1
    assert "--fmad=false" in OPTIONS


def test_sources_pass_nvcc_where_it_is_installed(tmp_path: Path):
    """The host compiler's front end reads them too: nvcc, where a toolkit is at hand, in the thorough profile."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or not THOROUGH:
        pytest.skip("not run: no nvcc, or not the thorough profile")
    for file in KERNELS:
        (tmp_path / file).write_text(source(file), encoding="utf-8")
        command = [
            nvcc,
            "-std=c++17",
            "--fmad=false",
            "-arch=sm_90",
            "-ptx",
            str(tmp_path / file),
            "-o",
            str(tmp_path / "out.ptx"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:1000]
