"""`verify`: what a kernel made of the vectors, judged."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(directory: Path, results: tuple[Path, ...], as_json: bool) -> None:
    """Judge a kernel's outputs against the vectors in DIRECTORY; exit code 1 if any is wrong or missing.

    RESULTS, one safetensors file or several, hold one tensor a case, 000.out, 001.out, … (and 000.lse, …, the natural
    log-sum-exp, where the kernel gives it). Where the outputs are wrong in a known way, the fault is named.
    """
    from nanokv.oracle.vectors import verify as judge_files

    report = judge_files(directory, *results)
    click.echo(json.dumps(report.as_dict()) if as_json else str(report))
    if not report.passed:
        click.get_current_context().exit(1)
