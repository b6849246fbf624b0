"""`simulate`: the bytes that attention moves through SRAM and HBM, naive beside tiled."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanokv.commands.options import writable
from nanokv.errors import UsageError

if TYPE_CHECKING:
    from sim.gpus import GPU
    from sim.run import Simulation
    from sim.shape import Shape, TileSize


@click.command()
@click.argument("axes", nargs=-1, metavar="[AXIS=VALUES]...")
@click.option("--tile", default="auto", show_default=True, help="128, 64x128 (query rows x keys), or auto: each chooses.")
@click.option("--gpu", "gpu_name", default="a100-80", show_default=True, help="A preset (--list-gpus) or a FILE.toml.")
@click.option("--seq", default="1024", show_default=True, help="Keys: the context, this step's tokens included.")
@click.option("--q-len", help="Query rows; 1 is decoding.  [default: seq, which is prefill]")
@click.option("--heads", default=32, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=int, help="Key-value heads.  [default: as many as query heads]")
@click.option("--head-dim", default=128, show_default=True, help="Elements of a head.")
@click.option("--batch", default=1, show_default=True, help="Sequences.")
@click.option("--causal/--no-causal", default=True, show_default=True, help="Whether later keys are hidden.")
@click.option("--window", type=int, help="Only the last WINDOW keys are seen, the query's own included.")
@click.option("--dtype", default="float16", show_default=True, help="Of Q, O, scores: float32, float16, bfloat16, fp8, int8.")
@click.option("--kv-dtype", help="Of K and V, fp8_scaled and int4 too; scales are counted apart.  [default: as --dtype]")
@click.option("--algorithm", "algorithms", multiple=True, help="Only this one; may be repeated.  [default: all that apply]")
@click.option("--backward", is_flag=True, help="The backward passes too.")
@click.option("--mask", is_flag=True, help="naive: masking is a kernel of its own.")
@click.option("--dropout", is_flag=True, help="naive: dropout is a kernel of its own.")
@click.option("--init/--no-init", default=True, help="flash1: count the writes of the first zeros.  [default: init]")
@click.option("--stats/--no-stats", default=True, help="flash1: count the row statistics l and m.  [default: stats]")
@click.option("--splits", type=int, help="split-kv: parts of the keys.  [default: what fills the multiprocessors]")
@click.option("--block-size", default=16, show_default=True, help="paged: tokens in a block.")
@click.option("--l2", is_flag=True, help="Simulate the L2 (least recently used): HBM bytes are those behind it.")
@click.option("--execute", is_flag=True, help="Compute the values of every head, however long it takes.")
@click.option("--count-only", is_flag=True, help="Compute no values.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random values.")
@click.option("--model", type=click.Path(path_type=Path), help="A forward step of this model: a config.json or its directory.")
@click.option("--weights-dtype", help="--model: how weights are stored.  [default: as --dtype]")
@click.option("--sweep", is_flag=True, help="Cross the AXES, such as tile=16..512 seq=1k..1m (doubling) or dtype=float16,int8.")
@click.option("--workers", help="--sweep: processes, or the address of a Dask scheduler.  [default: this process]")
@click.option("--per-tensor", is_flag=True, help="Every tensor's bytes.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the roofline and bytes against tile and sequence.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; a list for a sweep.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--list-gpus", is_flag=True, help="Print the presets with their sources.")
def simulate(
    axes: tuple[str, ...],
    tile: str,
    gpu_name: str,
    seq: str,
    q_len: str | None,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    batch: int,
    causal: bool,
    window: int | None,
    dtype: str,
    kv_dtype: str | None,
    algorithms: tuple[str, ...],
    backward: bool,
    mask: bool,
    dropout: bool,
    init: bool,
    stats: bool,
    splits: int | None,
    block_size: int,
    l2: bool,
    execute: bool,
    count_only: bool,
    seed: int,
    model: Path | None,
    weights_dtype: str | None,
    sweep: bool,
    workers: str | None,
    per_tensor: bool,
    plot: Path | None,
    as_json: bool,
    as_csv: bool,
    list_gpus: bool,
) -> None:
    """Count the bytes that attention algorithms move through SRAM and HBM, and what that costs at least.

    Small shapes are computed while they are counted, and the output is held against the runtime's. Larger ones are counted
    only; the answer says so. Times are lower bounds, not predictions.
    """  # fmt: skip
    from sim.formats import get_format
    from sim.gpus import get_gpu
    from sim.shape import Shape, parse_count, parse_tile

    if list_gpus:
        _list_gpus()
        return
    _agree(axes, sweep, execute, count_only, as_json, as_csv, model)
    gpu = get_gpu(gpu_name)
    kv_format = get_format(kv_dtype) if kv_dtype else None
    rows = parse_count(q_len, "--q-len") if q_len else None
    keys = parse_count(seq, "--seq")
    shape = Shape(keys, heads, head_dim, rows, kv_heads, batch, causal, window, get_format(dtype), kv_format)
    size = parse_tile(tile)
    options = {"mask": mask, "dropout": dropout, "init": init, "stats": stats, "splits": splits, "block_size": block_size}
    if model:
        _simulate_model(model, gpu, shape, weights_dtype or dtype, algorithms, as_json)
    elif sweep:
        _sweep(axes, shape, gpu, size, algorithms, {**options, "l2": l2, "backward": backward}, workers, as_json, as_csv)
    else:
        from sim.memory import Values
        from sim.run import simulate as run

        if plot:
            from sim.plot import require_matplotlib

            require_matplotlib()
            writable(plot)
        values = Values.NONE if count_only else Values.ALL if execute else None
        found = run(shape, gpu, algorithms, size, values=values, l2=l2, backward=backward, seed=seed, **options)
        if plot:
            from sim.plot import draw

            draw(found, plot, options)
        _print(found, per_tensor, as_json, as_csv)


WITH_MODEL = {"model", "gpu_name", "seq", "batch", "dtype", "kv_dtype", "weights_dtype", "algorithms", "as_json"}
NOT_WITH_SWEEP = {"plot", "model", "execute", "seed", "per_tensor", "weights_dtype"}


def _agree(axes: tuple[str, ...], sweep: bool, execute: bool, count_only: bool, as_json: bool, as_csv: bool,
           model: Path | None) -> None:  # fmt: skip
    """UsageError for options that contradict each other, or that would be passed over in silence."""
    if axes and not sweep:
        raise UsageError(f"{axes[0]!r} is an axis of a sweep: add --sweep, or give a single value by its option")
    if sweep and not axes:
        raise UsageError("--sweep needs axes such as tile=16..512 seq=1k..1m")
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE or name in ("sweep", "axes"):
            continue
        if sweep and name in NOT_WITH_SWEEP:
            raise UsageError(f"--sweep does not go with {option.opts[0]}: it counts points of attention")
        if model and name not in WITH_MODEL:
            raise UsageError(f"--model does not go with {option.opts[0]}: it is for a single attention call")
        if (name, sweep) == ("workers", False):
            raise UsageError("--workers is for --sweep")
        if (name, model) == ("weights_dtype", None):
            raise UsageError("--weights-dtype is for --model")
    if execute and count_only:
        raise UsageError("--execute and --count-only contradict each other")
    if as_json and as_csv:
        raise UsageError("--json and --csv contradict each other")


def _list_gpus() -> None:
    from sim.report import gpu_sources, gpu_table, print_report

    click.echo("dense peak rates in tera-operations a second; the sources follow")
    print_report(gpu_table())
    click.echo(gpu_sources())


def _print(found: "Simulation", per_tensor: bool, as_json: bool, as_csv: bool) -> None:
    from sim.report import csv_rows, print_report, simulation_report, to_csv
    from sim.run import as_dict

    if as_json:
        click.echo(json.dumps(as_dict(found)))
    elif as_csv:
        click.echo(to_csv(csv_rows(found)), nl=False)
    else:
        print_report(simulation_report(found, per_tensor))


def _simulate_model(path: Path, gpu: "GPU", shape: "Shape", weights: str,
                    algorithms: tuple[str, ...], as_json: bool) -> None:  # fmt: skip
    from sim.formats import get_format, of_weights
    from sim.report import model_report, print_report
    from sim.transformer import read_decoder, simulate_model, steps_as_dict

    if set(algorithms) - {"naive"}:
        raise UsageError("--model runs tiled attention; --algorithm naive runs the separate kernels instead")
    decoder = read_decoder(path)
    form = of_weights(get_format(weights))
    steps = simulate_model(decoder, gpu, shape, form, naive=bool(algorithms))
    if as_json:
        click.echo(json.dumps(steps_as_dict(decoder, gpu, shape, steps)))
    else:
        print_report(model_report(decoder, gpu, shape, form.name, steps))


def _sweep(axes: tuple[str, ...], shape: "Shape", gpu: "GPU", tile: "TileSize | None", algorithms: tuple[str, ...],
           options: dict[str, Any], workers: str | None, as_json: bool, as_csv: bool) -> None:  # fmt: skip
    from rich.console import Console
    from rich.progress import Progress

    from sim.report import print_report, sweep_table, to_csv
    from sim.sweep import points, run_points

    made = points(axes, shape, gpu, tile, algorithms, options)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{len(made)} points", total=len(made))
        rows = run_points(made, workers, lambda: progress.advance(task))
    if as_json:
        click.echo(json.dumps(rows))
    elif as_csv:
        click.echo(to_csv(rows), nl=False)
    else:
        print_report(sweep_table(rows, list(made[0].labels)))
