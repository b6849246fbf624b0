"""`check`: measured attention latencies that no hardware could have produced."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanokv.errors import NanoKVError, UsageError

if TYPE_CHECKING:
    from sim.check import Verdict

SHOWN = 20


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--gpu", "gpu_name", required=True, help="The GPU that is said to have been measured: a preset or a FILE.toml.")
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Only rows with this value; may be repeated.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of Q and O, and of the arithmetic.")
@click.option("--kv-dtype", help="Of K and V.  [default: as --dtype]")
@click.option("--head-dim", default=128, show_default=True, help="Where the file has no such column.")
@click.option("--causal/--no-causal", default=True, show_default=True, help="Whether prefill hid later keys.")
@click.option("--cold", is_flag=True, help="Caches were flushed between runs: charge every byte to HBM.")
@click.option("--time-column", default="us", show_default=True)
@click.option("--unit", default="us", show_default=True, type=click.Choice(["s", "ms", "us", "ns"]), help="Of the time column.")
@click.option("--batch-column", default="batch", show_default=True)
@click.option("--heads-column", default="q_heads", show_default=True)
@click.option("--kv-heads-column", default="kv_heads", show_default=True)
@click.option("--length-column", help="Keys.  [default: kv_len or context for decode rows, seq or seq_len for prefill]")
@click.option("--head-dim-column", default="head_dim", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    file: Path,
    gpu_name: str,
    where: tuple[str, ...],
    dtype: str,
    kv_dtype: str | None,
    head_dim: int,
    causal: bool,
    cold: bool,
    time_column: str,
    unit: str,
    batch_column: str,
    heads_column: str,
    kv_heads_column: str,
    length_column: str | None,
    head_dim_column: str,
    as_json: bool,
) -> None:
    """Find rows of a CSV that are faster than the GPU's bandwidth or arithmetic allows; exit code 1 if there are any.

    A row is decoding when its length column is kv_len or context, or one of your own, and prefill when it is seq or
    seq_len. What an L2 may have kept from an earlier run of the same call is not charged: rows that fit in it are set aside.
    """  # fmt: skip
    from sim.check import Columns, judge, read_rows
    from sim.formats import get_format
    from sim.gpus import get_gpu

    only = {}
    for each in where:
        name, equals, value = each.partition("=")
        if not equals:
            raise UsageError(f"--where {each!r} is not COLUMN=VALUE")
        only[name] = value
    columns = Columns(time_column, unit, batch_column, heads_column, kv_heads_column, length_column, head_dim_column)
    kv_format = get_format(kv_dtype) if kv_dtype else None
    rows = read_rows(file, columns, causal=causal, head_dim=head_dim, dtype=get_format(dtype), kv_dtype=kv_format, only=only)
    verdict = judge(rows, get_gpu(gpu_name), cold=cold)
    if not verdict.rows and not verdict.set_aside:
        raise NanoKVError(f"{file} has no row{' with ' + ' and '.join(where) if where else 's'}: nothing was checked")
    _print(verdict, as_json)
    if verdict.impossible:
        click.get_current_context().exit(1)


def _print(verdict: "Verdict", as_json: bool) -> None:
    from sim.check import as_dict, worst
    from sim.report import impossible_table, print_report

    if as_json:
        click.echo(json.dumps(as_dict(verdict)))
        return
    click.echo(
        f"{verdict.rows} rows checked, {verdict.set_aside} set aside (bytes fit in L2; only operations count), "
        f"{len(verdict.impossible)} faster than possible"
    )
    if verdict.impossible:
        shown = worst(verdict, SHOWN)
        print_report(impossible_table(shown))
        if len(shown) < len(verdict.impossible):
            click.echo(f"the worst {len(shown)} are shown; --json has all")
