"""`generate`: prompts in, text out, streaming."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from nanokv.commands.options import model_options
from nanokv.errors import UsageError

if TYPE_CHECKING:
    from nanokv.generate import Generation

NOTES = {"context": "the model has no position for another token", "interrupted": "interrupted"}


@click.command()
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@model_options
@click.option("--file", "files", multiple=True, type=click.Path(), help="Read a prompt from a file; may be repeated.")
@click.option("--max-tokens", default=64, show_default=True, help="Tokens to generate at most.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the most likely token; higher is more varied.")
@click.option("--top-k", default=0, show_default=True, help="Draw from the K most likely tokens only; 0 is off.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the fewest tokens that reach this probability.")
@click.option("--min-p", default=0.0, show_default=True, help="Drop tokens less likely than this share of the best one.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1, tokens that occurred become less likely.")
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--stop", multiple=True, help="End the text before this string; escapes such as \\n count; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@click.option("--logprobs", default=0, metavar="K", help="With --json: log-probabilities of the K best tokens of each step.")
@click.option(
    "--cache",
    default="contiguous",
    show_default=True,
    type=click.Choice(["contiguous", "none"]),
    help="Where keys and values live; none recomputes everything at every token.",
)
@click.option("--stats", is_flag=True, help="End with speed, memory and bandwidth.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt.")
@click.option("--no-stream", is_flag=True, help="Print the text when it is complete.")
def generate(
    prompts: tuple[str, ...],
    source: str,
    numerics: str | None,
    dtype: str,
    backend: str,
    files: tuple[str, ...],
    stats: bool,
    as_json: bool,
    no_stream: bool,
    stop: tuple[str, ...],
    **options: Any,
) -> None:
    """Continue each PROMPT.

    Without a PROMPT or --file, one prompt is read from standard input. The prompt is printed before its continuation; with
    --json, "text" is the continuation alone.
    """  # fmt: skip
    import nanokv
    from nanokv.generate import Generation
    from nanokv.model import make_options

    checked, spec = make_options(stop=tuple(unescape(text) for text in stop), **options)
    texts = gather(prompts, files)
    model = nanokv.load(source, dtype=dtype, backend=backend, numerics=numerics)
    if model.backend.name == "cupy" and numerics is None:
        click.echo("note: on CuPy the numerics are fast: cached and uncached agree within rounding", err=True)
    runs = [Generation(model, model.encode(text), checked, spec) for text in texts]
    for number, run in enumerate(runs):
        if number and not as_json:
            click.echo()
        play(run, texts[number], as_json, no_stream)
        if stats:
            show_stats(run, err=as_json)
        if run.finish_reason == "interrupted":
            sys.exit(130)


def gather(prompts: tuple[str, ...], files: tuple[str, ...]) -> list[str]:
    """The prompts: arguments, then files, else standard input (one prompt, its last line break dropped)."""
    texts = list(prompts)
    for name in files:
        try:
            with open(name, encoding="utf-8") as file:
                texts.append(file.read().removesuffix("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {name}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from error
    if not texts:
        if sys.stdin.isatty():
            raise UsageError("no prompt: give one as an argument, with --file, or on standard input")
        texts.append(sys.stdin.read().removesuffix("\n"))
    if not all(texts):
        raise UsageError("the prompt is empty: give at least one character")
    return texts


def unescape(text: str) -> str:
    """A stop string as typed in a shell: \\n, \\t, \\\\ and \\uXXXX count as what they name."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise UsageError(f"--stop {text!r} has an unfinished escape: write \\\\ for a backslash") from error


def play(run: "Generation", prompt: str, as_json: bool, no_stream: bool) -> None:
    """Runs one generation and prints it; an interrupt ends it with the text so far."""
    live = not (as_json or no_stream)
    if live:
        click.echo(prompt, nl=False)
    try:
        for piece in run:
            if live:
                click.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        rest = run.interrupt()
        if live:
            click.echo(rest, nl=False)
    if as_json:
        click.echo(json.dumps(run.to_dict()))
    else:
        click.echo("" if live else prompt + run.text)
    if run.finish_reason in NOTES:
        click.echo(f"[ended: {NOTES[run.finish_reason]}]", err=True)


def show_stats(run: "Generation", err: bool) -> None:
    """The small table of --stats."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in stats_rows(run):
        table.add_row(name, value)
    Console(stderr=err, highlight=False).print(table)


def stats_rows(run: "Generation") -> list[tuple[str, str]]:
    """Name and value of each line of --stats."""
    from nanokv.cost import cost

    spent, model = cost(run), run.model
    rows = [
        ("ended", str(run.finish_reason)),
        ("prefill", f"{len(run.prompt_tokens)} tokens, {spent.prefill_tokens_per_s:,.0f} tokens/s"),
    ]
    if spent.decode_ms is not None:
        rows.append(
            ("decode", f"{len(run.tokens) - 1} tokens, {1e3 / spent.decode_ms:,.1f} tokens/s, {spent.decode_ms:.2f} ms a token")
        )
        if spent.bandwidth_share is not None:
            share = f"{spent.bandwidth_share:.0%} of the {spent.read_gb_per_s:.1f} GB/s that this machine reads"
            rows.append(("memory traffic", f"{spent.decode_gb_per_s:.1f} GB/s, {share}"))
    rows.append(("KV cache", f"{run.cache.kind}, {run.cache_tokens} tokens, {run.cache_bytes:,} bytes"))
    without = f"without a cache {spent.tokens_uncached:,}, about {spent.uncached_s:.2f} s"
    rows.append(("recomputing", f"{spent.tokens_computed:,} tokens computed; {without}"))
    rows.append(("numerics", f"{model.numerics}, {model.dtype}, {model.backend.name}"))
    return rows
