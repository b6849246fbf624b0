"""`models`: what is on this machine."""

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per model.")
def models(as_json: bool) -> None:
    """List the models that are here: the one that ships, those that were pulled, those in the hub's cache."""  # fmt: skip
    from weights.inventory import inventory

    entries = inventory()
    if as_json:
        for entry in entries:
            config = entry.config
            click.echo(json.dumps({
                "model": entry.source, "path": str(entry.where), "bytes": entry.bytes, "license": entry.licence,
                "parameters": config and config.num_parameters, "context": config and config.num_positions,
                "kv_bytes_per_token": entry.kv_bytes_per_token, "problem": entry.problem,
            }))  # fmt: skip
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("size", "parameters", "context", "KV bytes a token"):
        table.add_column(name, justify="right")
    table.add_column("licence")
    for entry in entries:
        size, licence = f"{entry.bytes / 1e6:,.1f} MB", entry.licence or "not said"
        if entry.config is None:
            table.add_row(entry.source, size, "", "", "", "cannot be read")
            continue
        numbers = entry.config.num_parameters, entry.config.num_positions, entry.kv_bytes_per_token
        table.add_row(entry.source, size, *(f"{number:,}" for number in numbers), licence)
    Console(highlight=False, soft_wrap=True).print(table)
    for entry in entries:
        if entry.problem:
            click.echo(f"note: {entry.problem}", err=True)
