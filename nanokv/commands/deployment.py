"""The options that `size` and `replay` share: in what form a model is stored, and what a GPU leaves for its caches."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from nanokv.errors import ConfigError

if TYPE_CHECKING:
    from sim.formats import Format
    from sim.planner.model import Model
    from sim.planner.plan import Budget

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


class Bytes(click.ParamType):
    """A number of bytes, at least `least`: 24GB is decimal, 24GiB binary."""

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Text -> bytes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)", value.strip())
        unit = UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None:
            self.fail(f"{value!r} is not a size such as 24GB or 22.5GiB", param, ctx)
        count = int(float(found[1].replace(",", "").replace("_", "")) * unit)
        if count < self.least:
            self.fail(f"{value!r} is less than {self.least} bytes", param, ctx)
        return count


@dataclass(frozen=True)
class Deployment:
    """What the options say; None is what was left out."""

    kv_dtype: str | None
    tensor_parallel: int
    gpu_memory: int | None
    utilisation: float | None
    overhead: int | None
    kv_memory: int | None
    params: int | None
    weights_dtype: str | None
    weights_bytes: int | None
    mla: str

    def model(self, source: str, cross_tokens: int | None = None) -> "Model":
        """What `source` names: errors as read_model's."""
        from sim.planner.model import read_model

        return read_model(
            source, weights_dtype=self.weights_dtype, weights_bytes=self.weights_bytes, parameters=self.params,
            expand_latent=self.mla == "expanded", cross_tokens=cross_tokens,
        )  # fmt: skip

    def form(self, model: "Model") -> "Format":
        """How K and V are stored."""
        from sim.planner.kv_formats import kv_format

        return kv_format(self.kv_dtype or model.geometry.dtype)

    def budget(self, model: "Model", gpu: str | None) -> "Budget | None":
        """What one GPU has for the caches; None where none was named. ConfigError where the weights' size is not known."""
        from sim.gpus import get_gpu
        from sim.planner.plan import OVERHEAD, UTILISATION, split_budget

        memory = self.gpu_memory
        if memory is None:
            if gpu is None:
                return None
            memory = get_gpu(gpu).memory
        if model.weights is None:
            raise ConfigError(
                f"{model.name}: the size of the weights is not known ({model.why}): give --params or --weights-bytes"
            )
        return split_budget(
            memory,
            UTILISATION if self.utilisation is None else self.utilisation,
            model.weights.total,
            OVERHEAD if self.overhead is None else self.overhead,
            self.tensor_parallel,
        )


def deployment_options(function: Callable) -> Callable:
    """The options, gathered into the argument `deployment`."""

    @functools.wraps(function)
    def gathered(**options: Any) -> Any:
        own = {field.name: options.pop(field.name) for field in fields(Deployment)}
        return function(deployment=Deployment(**own), **options)

    decorated: Callable = gathered
    for option in (
        click.option("--mla", default="latent", show_default=True, type=click.Choice(["latent", "expanded"]),
                     help="MLA as the compressed latent, or as the keys and values of an engine without an MLA kernel."),
        click.option("--weights-bytes", type=Bytes(least=1),
                     help="The weights' size, where neither files nor a count tell."),
        click.option("--weights-dtype", help="Store the weights in this dtype.  [default: as the files have them]"),
        click.option("--params", type=click.IntRange(1), help="The parameter count, where the files do not tell."),
        click.option("--kv-memory", type=Bytes(least=1), help="This many bytes of caches a GPU, whatever the weights leave."),
        click.option("--overhead", type=Bytes(),
                     help="Beside weights and caches on each GPU.  [default: 1.69GB, from a vLLM log]"),
        click.option("--utilisation", type=float,
                     help="Share of a GPU's memory that the engine takes.  [default: 0.9, as in vLLM]"),
        click.option("--gpu-memory", type=Bytes(least=1), help="Memory of one GPU, in place of the preset's."),
        click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(1),
                     help="GPUs that share the model."),
        click.option("--kv-dtype",
                     help="float32, float16, bfloat16, fp8, fp8_scaled, int8, int4, q8_0, q4_0.  [default: the file's]"),
    ):  # fmt: skip
        decorated = option(decorated)
    return decorated
