"""`replay`: a request trace through the runtime's block pool and admission rules, and through what came before paging."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanokv.commands.deployment import Deployment, deployment_options
from nanokv.commands.options import writable
from nanokv.errors import NanoKVError, UsageError

if TYPE_CHECKING:
    from sim.planner.server import Outcome, Policy, Server
    from sim.planner.traces import Trace

FIELDS = ("arrival", "prompt", "output")
WORTH_A_PROCESS = 5000  # requests: fewer are replayed in the time that a process takes to begin


class Columns(click.ParamType):
    """arrival=NAME,prompt=NAME,output=NAME, or some of them."""

    name = "columns"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        """Text -> field: name of its column."""
        if isinstance(value, dict):
            return value
        found = {}
        for pair in value.split(","):
            field, equals, name = (part.strip() for part in pair.partition("="))
            if field not in FIELDS or not equals or not name or field in found:
                self.fail(f"{value!r} is not like prompt=NAME,output=NAME (fields: {', '.join(FIELDS)})", param, ctx)
            found[field] = name
        return found


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--config", required=True, metavar="CONFIG", help="The model: as for `size`.")
@click.option("--gpu", "gpu_name", required=True, help="A preset such as h100 or rtx-4090, or a FILE.toml.")
@click.option(
    "--policy",
    "kinds",
    multiple=True,
    type=click.Choice(["max", "pow2", "oracle", "paged"]),
    help="Reserve the model's length, the output to a power of two, the exact length; or blocks.  [default: all]",
)
@click.option(
    "--block-size",
    "block_sizes",
    multiple=True,
    type=click.IntRange(1),
    default=(16, 256),
    show_default=True,
    help="paged: tokens in a block; may be repeated.",
)
@click.option(
    "--prefix/--no-prefix",
    "prefix",
    default=None,
    help="paged: only with, or only without prefix reuse.  [default: both where the trace names prefixes]",
)
@click.option(
    "--allocator",
    default="buddy",
    show_default=True,
    type=click.Choice(["buddy", "first-fit"]),
    help="How reservations find their place.",
)
@click.option(
    "--rate", type=float, help="Requests a second on average: arrivals move together or apart.  [default: the file's]"
)
@click.option("--poisson", is_flag=True, help="Arrivals at random at --rate, in place of the file's.")
@click.option("--seed", default=0, show_default=True, help="Of --poisson.")
@click.option("--requests", type=click.IntRange(1), help="Only the first so many.")
@click.option("--columns", type=Columns(), help="Columns of a CSV, such as arrival=t,prompt=in,output=out.")
@click.option("--hash-block", default=512, show_default=True, type=click.IntRange(1), help="JSONL: tokens that an id names.")
@click.option("--max-model-len", type=click.IntRange(1), help="Tokens of a request at most.  [default: the model's positions]")
@click.option("--max-batch-tokens", default=8192, show_default=True, type=click.IntRange(1), help="Tokens of a step at most.")
@click.option("--max-sequences", default=256, show_default=True, type=click.IntRange(1), help="Running at most.")
@deployment_options
@click.option("--jobs", type=click.IntRange(1), help="Policies that are replayed at once.  [default: one a core]")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw memory and requests over time into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with series over time.")
def replay(
    trace: Path,
    config: str,
    gpu_name: str,
    kinds: tuple[str, ...],
    block_sizes: tuple[int, ...],
    prefix: bool | None,
    allocator: str,
    rate: float | None,
    poisson: bool,
    seed: int,
    requests: int | None,
    columns: dict[str, str] | None,
    hash_block: int,
    max_model_len: int | None,
    max_batch_tokens: int,
    max_sequences: int,
    deployment: Deployment,
    jobs: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """What a request trace makes of a model's KV memory: how much is used, reserved, wasted, shared.

    TRACE is a CSV of arrivals, prompt and output lengths (the Azure traces' names of columns and others are known), or JSON
    lines with the ids of prompt blocks (Mooncake's). Each policy replays all of it. Time is a lower bound: the weights and
    K and V are read, or the tokens multiplied, as fast as the GPU can at best.
    """
    from sim.gpus import get_gpu
    from sim.planner.replay import Limits
    from sim.planner.server import POLICIES, build_server, policies

    if plot:
        from nanokv.commands.bench import require_matplotlib

        require_matplotlib()
        writable(plot)
    gpu = get_gpu(gpu_name)
    model = deployment.model(config)
    length = max_model_len or model.geometry.max_positions
    if length is None:
        raise UsageError(f"{model.name} names no number of positions: give --max-model-len")
    budget = deployment.budget(model, gpu_name)
    assert budget is not None
    limits = Limits(max_batch_tokens, max_sequences, length)
    server = build_server(model, gpu, deployment.form(model), budget, limits, deployment.tensor_parallel,
                          kv_bytes=deployment.kv_memory, dtype=deployment.weights_dtype)  # fmt: skip
    found = _read(trace, columns, hash_block, requests, rate, poisson, seed)
    if prefix and found.hash_block is None:
        raise UsageError(f"{trace} names no prefixes: leave out --prefix")
    reuse = (False, True) if prefix is None and found.hash_block else (bool(prefix),)
    outcomes = _run(found, server, policies(kinds or POLICIES, block_sizes, reuse, allocator), jobs)
    if plot:
        from sim.planner.replay_report import draw

        draw(outcomes, plot)
    _print(found, server, outcomes, as_json)


def _read(trace: Path, columns: dict[str, str] | None, hash_block: int, requests: int | None, rate: float | None,
          random: bool, seed: int) -> "Trace":  # fmt: skip
    from sim.planner.traces import first_requests, paced, poisson, read_trace

    found = first_requests(read_trace(trace, columns, hash_block), requests)
    if random and rate is None:
        raise UsageError("--poisson needs --rate")
    if not found.timed and not random:
        raise UsageError(
            f"{trace} has no arrivals: give --poisson and --rate, or name their column with --columns arrival=NAME"
        )
    if rate is None:
        return found
    return poisson(found, rate, seed) if random else paced(found, rate)


def _run(trace: "Trace", server: "Server", policies: "list[Policy]", jobs: int | None) -> "list[Outcome]":
    from rich.console import Console
    from rich.progress import Progress

    from sim.planner.server import replay_all

    if jobs is None:
        jobs = (os.cpu_count() or 1) if len(trace.requests) >= WORTH_A_PROCESS else 1
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{len(policies)} policies", total=len(policies) * len(trace.requests))
        outcomes = replay_all(trace, server, policies, lambda count: progress.advance(task, count), jobs)
    if not any(outcome.counts.finished for outcome in outcomes):
        refused = max((outcome.counts for outcome in outcomes), key=lambda counts: counts.too_large)
        raise NanoKVError(
            f"no request of {trace.name} fits: {refused.too_long:,} are longer than {server.limits.length:,} tokens and "
            f"{refused.too_large:,} larger than the {server.slots:,} tokens of memory"
        )
    return outcomes


def _print(trace: "Trace", server: "Server", outcomes: "list[Outcome]", as_json: bool) -> None:
    from sim.planner.replay_report import as_dict, replay_report
    from sim.report import print_report

    if as_json:
        click.echo(json.dumps(as_dict(trace, server, outcomes)))
    else:
        print_report(replay_report(trace, server, outcomes))
