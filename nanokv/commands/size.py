"""`size`: how much KV a model needs, and what fits on a GPU."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanokv.commands.deployment import Deployment, deployment_options
from nanokv.commands.options import writable
from nanokv.errors import UsageError

if TYPE_CHECKING:
    from sim.planner.model import Model


@click.command()
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")
@click.option("--context", type=click.IntRange(1), help="Tokens of one request.  [default: the model's positions]")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1), help="Requests at once.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens in a block of a paged pool.")
@click.option("--gpu", help="A preset such as h100 or rtx-4090, or a FILE.toml.")
@deployment_options
@click.option("--cross-tokens", type=click.IntRange(0), help="Encoder tokens a request keeps in cross-attention layers.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw KV against context into this PNG, PDF or SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; a list for several CONFIGs.")
def size(
    configs: tuple[str, ...],
    context: int | None,
    batch: int,
    block_size: int,
    gpu: str | None,
    deployment: Deployment,
    cross_tokens: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """KV cache of a model, and what fits.

    CONFIG is a Hugging Face config.json, a directory with one, a GGUF file, or a hub id. Several are set side by side.
    """
    from sim.planner.plan import Question, plan
    from sim.planner.report import as_dict, draw, lines, table

    if plot:
        from nanokv.commands.bench import require_matplotlib

        require_matplotlib()
        writable(plot)
    models = [deployment.model(source, cross_tokens) for source in configs]
    forms = [deployment.form(model) for model in models]
    tokens = context or common_context(models)
    budgets = [deployment.budget(model, gpu) for model in models]
    if deployment.kv_memory is not None and any(budgets):
        raise UsageError("--kv-memory is for a plan without a GPU: leave out --gpu and --gpu-memory")
    plans = [
        plan(
            model.geometry,
            Question(tokens, batch, form, block_size, deployment.tensor_parallel),
            budget.for_cache if budget else deployment.kv_memory,
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
