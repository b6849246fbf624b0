"""Options that several commands share."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nanokv.errors import UsageError

if TYPE_CHECKING:
    from nanokv.model import Model

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class Computing:
    """What the options say of how a model computes: arguments of nanokv.load, None where nothing was said."""

    dtype: str
    backend: str
    numerics: str | None
    kernels: str
    weights: str | None
    threads: int | None

    def load(self, source: str) -> "Model":
        """The model called `source`: errors as nanokv.load's."""
        import nanokv

        return nanokv.load(source, **asdict(self))


def model_options(function: Callable) -> Callable:
    """--model, as the argument `source`, and --kernels, --weights, --threads, --numerics, --dtype and --backend, gathered into
    the argument `computing`."""

    @functools.wraps(function)
    def gathered(**options: Any) -> Any:
        own = {field.name: options.pop(field.name) for field in fields(Computing)}
        return function(computing=Computing(**own), **options)

    decorated: Callable = gathered
    for option in (
        click.option("--backend", type=click.Choice(["auto", "numpy", "cupy"]), default="auto", show_default=True,
                     help="Array library; auto takes CuPy when a GPU answers."),
        click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True,
                     help="Precision of weights and arithmetic."),
        click.option("--numerics", type=click.Choice(["exact", "fast"]),
                     help="exact (default on NumPy): cached equals uncached bit for bit; fast: whole-matrix products."),
        click.option("--threads", type=click.IntRange(1), help="Threads of the compiled kernels; default: the physical cores."),
        click.option("--weights", type=click.Choice(["float32", "bf16", "fp16", "int8", "int8-row", "int4"]),
                     help="Keep matrices of weights in this format; default: as a GGUF file has them, else float32."),
        click.option("--kernels", type=click.Choice(["auto", "numpy", "compiled"]), default="auto", show_default=True,
                     help="What computes exactly: compiled (numba; the same bits on every machine) or numpy."),
        click.option("--model", "source", default="default", show_default=True, metavar="NAME|PATH|HUB-ID",
                     help="The model: default (ships with nanokv), smollm2 (after `pull`), a directory, a GGUF or llama2.c "
                     "file, or a hub id such as gpt2."),
    ):  # fmt: skip
        decorated = option(decorated)
    return decorated


def sampling_options(function: F) -> F:
    """How many tokens, and how each is chosen."""
    for option in (
        click.option("--seed", type=int, help="The same seed gives the same text."),
        click.option(
            "--repetition-penalty", default=1.0, show_default=True, help="Above 1, tokens that occurred become less likely."
        ),
        click.option(
            "--min-p", default=0.0, show_default=True, help="Drop tokens less likely than this share of the best one."
        ),
        click.option(
            "--top-p", default=1.0, show_default=True, help="Draw from the fewest tokens that reach this probability."
        ),
        click.option("--top-k", default=0, show_default=True, help="Draw from the K most likely tokens only; 0 is off."),
        click.option(
            "--temperature", default=0.0, show_default=True, help="0 takes the most likely token; higher is more varied."
        ),
        click.option("--max-tokens", default=64, show_default=True, help="Tokens to generate at most."),
    ):
        function = option(function)
    return function


def cache_options(function: F) -> F:
    """What the cache keeps and how; --cache itself is generate's."""
    for option in (
        click.option(
            "--kv-scale", type=float, help="With fp8: one scale for everything instead of one for each token and head."
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(["float32", "float16", "bfloat16", "int8", "fp8", "int4"]),
            help="Store keys and values in this format; default: as they are computed.",
        ),
        click.option(
            "--sinks", type=int, help="With --window: keep the first S tokens too, and write on without end (StreamingLLM)."
        ),
        click.option(
            "--window", type=int, help="Each token sees only the last W tokens, itself included; older ones are dropped."
        ),
        click.option("--block-size", type=int, help="Tokens a block of the paged cache; default 16, or 32 with int4."),
    ):
        function = option(function)
    return function


def block_size_for(kv_dtype: str | None, given: int | None) -> int:
    """Tokens a block: as --block-size says, else 16, and 32 with int4, whose groups are that long."""
    return (32 if kv_dtype == "int4" else 16) if given is None else given


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
