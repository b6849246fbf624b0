"""`size`: how much KV a model needs, and what fits on a GPU."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanokv.commands.options import writable
from nanokv.errors import ConfigError, UsageError

if TYPE_CHECKING:
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


@click.command()
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")
@click.option("--context", type=click.IntRange(1), help="Tokens of one request.  [default: the model's positions]")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1), help="Requests at once.")
@click.option("--kv-dtype", help="float32, float16, bfloat16, fp8, fp8_scaled, int8, int4, q8_0, q4_0.  [default: the file's]")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens in a block of a paged pool.")
@click.option("--gpu", help="A preset such as h100 or rtx-4090, or a FILE.toml.")
@click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(1), help="GPUs that share the model.")
@click.option(
    "--gpu-memory", type=Bytes(least=1), help="Memory of one GPU, in place of the preset's: what the driver reports is less."
)
@click.option("--utilisation", type=float, help="Share of a GPU's memory that the engine takes.  [default: 0.9, as in vLLM]")
@click.option(
    "--overhead", type=Bytes(), help="Context, activations and graphs on each GPU.  [default: 1.24GB, from a vLLM log]"
)
@click.option("--kv-memory", type=Bytes(), help="Plan for this many bytes of caches a GPU, without weights.")
@click.option("--params", type=click.IntRange(1), help="The parameter count, where the files do not tell.")
@click.option("--weights-dtype", help="Store the weights in this dtype.  [default: as the files have them]")
@click.option("--weights-bytes", type=Bytes(least=1), help="The weights' size, where neither files nor a count tell.")
@click.option(
    "--mla",
    default="latent",
    show_default=True,
    type=click.Choice(["latent", "expanded"]),
    help="MLA as the compressed latent, or as the keys and values that an engine without an MLA kernel keeps.",
)
@click.option("--cross-tokens", type=click.IntRange(0), help="Encoder tokens a request keeps in cross-attention layers.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw KV against context into this PNG, PDF or SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; a list for several CONFIGs.")
def size(
    configs: tuple[str, ...],
    context: int | None,
    batch: int,
    kv_dtype: str | None,
    block_size: int,
    gpu: str | None,
    tensor_parallel: int,
    gpu_memory: int | None,
    utilisation: float | None,
    overhead: int | None,
    kv_memory: int | None,
    params: int | None,
    weights_dtype: str | None,
    weights_bytes: int | None,
    mla: str,
    cross_tokens: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """KV cache of a model, and what fits.

    CONFIG is a Hugging Face config.json, a directory with one, a GGUF file, or a hub id. Several are set side by side.
    """
    from sim.planner.kv_formats import kv_format
    from sim.planner.model import read_model
    from sim.planner.plan import Question, plan
    from sim.planner.report import as_dict, draw, lines, table

    if plot:
        from nanokv.commands.bench import require_matplotlib

        require_matplotlib()
        writable(plot)
    models = [
        read_model(source, weights_dtype=weights_dtype, weights_bytes=weights_bytes, parameters=params,
                   expand_latent=mla == "expanded", cross_tokens=cross_tokens)
        for source in configs
    ]  # fmt: skip
    forms = [kv_format(kv_dtype or model.geometry.dtype) for model in models]
    tokens = context or common_context(models)
    budgets = [gpu_budget(model, gpu, gpu_memory, utilisation, overhead, tensor_parallel) for model in models]
    if kv_memory is not None and any(budgets):
        raise UsageError("--kv-memory is for a plan without a GPU: leave out --gpu and --gpu-memory")
    plans = [
        plan(
            model.geometry,
            Question(tokens, batch, form, block_size, tensor_parallel),
            budget.for_cache if budget else kv_memory,
        )
        for model, form, budget in zip(models, forms, budgets, strict=True)
    ]
    results = [as_dict(model, found, budget, gpu) for model, found, budget in zip(models, plans, budgets, strict=True)]
    if plot:
        draw(models, plans, plot)
    if as_json:
        click.echo(json.dumps(results[0] if len(results) == 1 else results))
    elif len(results) == 1:
        click.echo("\n".join(lines(results[0], models[0], plans[0], budgets[0])))
    else:
        click.echo(f"{batch:,} x {tokens:,} tokens")
        click.echo("\n".join(table(results)))


def common_context(models: "list[Model]") -> int:
    """The positions of the models; UsageError where they differ or a file does not say."""
    positions = {model.geometry.max_positions for model in models}
    if len(positions) == 1 and None not in positions:
        return int(positions.pop() or 0)
    if len(models) > 1:
        raise UsageError("the models have different numbers of positions: give --context")
    raise UsageError(f"{models[0].name} names no number of positions: give --context")


def gpu_budget(
    model: "Model", gpu: str | None, memory: int | None, utilisation: float | None, overhead: int | None, parts: int
) -> "Budget | None":
    """What one GPU has for the caches; None where no GPU was named. ConfigError where the weights' size is not known."""
    from sim.gpus import get_gpu
    from sim.planner.plan import OVERHEAD, UTILISATION, split_budget

    if gpu is None and memory is None:
        return None
    if memory is None:
        memory = get_gpu(gpu or "").memory
    if model.weights is None:
        raise ConfigError(f"{model.name}: the size of the weights is not known ({model.why}): give --params or --weights-bytes")
    return split_budget(
        memory,
        UTILISATION if utilisation is None else utilisation,
        model.weights.total,
        OVERHEAD if overhead is None else overhead,
        parts,
    )
