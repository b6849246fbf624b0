"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from nanokv.errors import UsageError

F = TypeVar("F", bound=Callable)


def model_options(function: F) -> F:
    """--model, --kernels, --weights, --threads, --numerics, --dtype, --backend: what is loaded and how it computes."""
    for option in (
        click.option("--backend", type=click.Choice(["auto", "numpy", "cupy"]), default="auto", show_default=True,
                     help="Array library; auto takes CuPy when a GPU answers."),
        click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True,
                     help="Precision of weights and arithmetic."),
        click.option("--numerics", type=click.Choice(["exact", "fast"]),
                     help="exact (default on NumPy): cached equals uncached bit for bit; fast: whole-matrix products."),
        click.option("--threads", type=click.IntRange(1), help="Threads of the compiled kernels; default: the physical cores."),
        click.option("--weights", type=click.Choice(["float32", "bf16", "fp16", "int8", "int4"]),
                     help="Keep matrices of weights in this format; default: as a GGUF file has them, else float32."),
        click.option("--kernels", type=click.Choice(["auto", "numpy", "compiled"]), default="auto", show_default=True,
                     help="What computes exactly: compiled (numba; the same bits on every machine) or numpy."),
        click.option("--model", "source", default="default", show_default=True, metavar="NAME|DIRECTORY|HUB-ID",
                     help="The model: default (ships with nanokv), a directory, or a hub id such as gpt2."),
    ):  # fmt: skip
        function = option(function)
    return function


def writable(path: Path) -> Path:
    """`path`, or UsageError if a file cannot be written there; checked before the work, not after it."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file")
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path
