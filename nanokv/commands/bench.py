"""`bench`: what the cache saves, and how near decoding comes to the memory's speed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from nanokv.commands.options import Computing, model_options, writable
from nanokv.errors import NanoKVError, UsageError


@click.command()
@model_options
@click.option("--shape", help="Random weights of a published size instead of a model: gpt2, gpt2-medium, gpt2-large, gpt2-xl.")
@click.option(
    "--contexts", default="16,32,64,128,256,510", show_default=True, help="Tokens already known when one more is made."
)
@click.option("--repeat", default=9, show_default=True, type=click.IntRange(1), help="Runs of each; the median counts.")
@click.option("--uncached-limit", default=1024, show_default=True, help="Recompute without a cache up to this context only.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curve into this PNG, PDF or SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    source: str,
    computing: Computing,
    shape: str | None,
    contexts: str,
    repeat: int,
    uncached_limit: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Time a token with and without the cache as the context grows."""  # fmt: skip
    from nanokv.bench import curve, random_model, report

    sizes = parse_contexts(contexts)
    if plot:
        require_matplotlib()
        writable(plot)
    if shape:
        model = random_model(shape, **asdict(computing))
    else:
        model = computing.load(source)
    points = []
    for point in curve(model, sizes, repeat, uncached_limit):
        points.append(point)
        if not as_json:
            again = "" if point.uncached_ms is None else f"{point.uncached_ms:10.2f} ms recomputed"
            click.echo(f"context {point.context:6}: {point.cached_ms:9.2f} ms cached {again}")
    result = report(model, points, min(512, model.config.num_positions - 1))
    if plot:
        draw(result, plot)
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(
        f"{result['model']}, {result['dtype']}, {result['numerics']} by {result['kernels']} kernels, "
        f"{result['threads']} threads, {result['blas']}\n"
        f"decode  {result['decode_ms_per_token']:.2f} ms a token, {result['decode_gb_per_s']:.1f} GB/s, "
        f"{result['share_of_read_bandwidth']:.0%} of the {result['read_gb_per_s']:.1f} GB/s that this machine reads\n"
        f"prefill {result['prefill_tokens_per_s']:,.0f} tokens/s"
    )


def parse_contexts(text: str) -> list[int]:
    """ "16,64" -> [16, 64]"""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--contexts {text!r} is not a list of whole numbers such as 16,64,256") from error


def require_matplotlib() -> None:
    """NanoKVError where the plot extra is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NanoKVError("--plot needs matplotlib: pip install 'nanokv[plot]'") from error


def draw(result: dict[str, Any], path: Path) -> None:
    """Milliseconds a token against context, both ways, on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    points = result["curve"]
    axes.loglog([p["context"] for p in points], [p["cached_ms"] for p in points], "o-", label="cached")
    again = [p for p in points if p["uncached_ms"] is not None]
    axes.loglog([p["context"] for p in again], [p["uncached_ms"] for p in again], "s-", label="recomputed")
    axes.set(
        xlabel="tokens in context",
        ylabel="ms for one more token",
        title=f"{result['model']}, {result['numerics']} by {result['kernels']} kernels",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error}") from error
