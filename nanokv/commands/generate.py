"""`generate`: prompts in, text out, streaming."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from nanokv.commands.options import Computing, block_size_for, cache_options, model_options, sampling_options
from nanokv.errors import UsageError

if TYPE_CHECKING:
    from nanokv.generate import Generation, Options
    from nanokv.kv.spec import CacheSpec
    from nanokv.model import Model

NOTES = {"context": "the model has no position for another token", "interrupted": "interrupted"}


@click.command()
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@model_options
@click.option("--kv-heads", type=int, help="Average the model's key-value heads down to this many; it was not trained so.")
@click.option(
    "--chat", is_flag=True, help="Each PROMPT is a message, put into the model's chat template; the answer is printed."
)
@click.option("--system", help="With --chat: what the model is told before the conversation.")
@click.option("--file", "files", multiple=True, type=click.Path(), help="Read a prompt from a file; may be repeated.")
@sampling_options
@click.option("--stop", multiple=True, help="End the text before this string; escapes such as \\n count; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@click.option("--logprobs", default=0, metavar="K", help="With --json: log-probabilities of the K best tokens of each step.")
@click.option(
    "--n", "copies", default=1, show_default=True, help="Sample this many continuations; the prompt is computed once."
)
@click.option("--beams", type=int, help="Search for the most likely text with this many beams that share their blocks.")
@click.option("--length-penalty", type=float, help="With --beams: rank by log-probability / length^penalty; default 1.")
@click.option(
    "--cache",
    type=click.Choice(["contiguous", "paged", "none"]),
    help="Where keys and values live: one array (the default for one prompt), blocks of a shared pool (for several), "
    "or nowhere, so that everything is recomputed.",
)
@cache_options
@click.option("--stats", is_flag=True, help="End with speed, memory and bandwidth.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt.")
@click.option("--no-stream", is_flag=True, help="Print the text when it is complete.")
def generate(
    prompts: tuple[str, ...],
    source: str,
    computing: Computing,
    files: tuple[str, ...],
    stats: bool,
    as_json: bool,
    no_stream: bool,
    stop: tuple[str, ...],
    copies: int,
    beams: int | None,
    length_penalty: float | None,
    cache: str | None,
    block_size: int | None,
    kv_heads: int | None,
    chat: bool,
    system: str | None,
    **options: Any,
) -> None:
    """Continue each PROMPT.

    Without a PROMPT or --file, one prompt is read from standard input. The prompt is printed before its continuation; with
    --json, "text" is the continuation alone. Several prompts run together.
    """  # fmt: skip
    from nanokv.model import make_options
    from nanokv.numerics import FAST

    if system is not None and not chat:
        raise UsageError("--system goes with --chat")
    searching = beams is not None
    together = len(prompts) + len(files) > 1 or copies != 1 or searching
    if (copies != 1 or searching) and cache not in (None, "paged"):
        raise UsageError(f"--n and --beams share blocks: they need --cache paged, not {cache}")
    if copies < 1:
        raise UsageError(f"n {copies} is out of range: it must be at least 1")
    if copies != 1 and searching:
        raise UsageError("--n samples and --beams searches: use one of them")
    if length_penalty is not None and not searching:
        raise UsageError("--length-penalty ranks beams: it needs --beams")
    options["cache"] = cache or ("paged" if together else "contiguous")
    if block_size is not None and options["cache"] != "paged":
        raise UsageError(f"--block-size needs --cache paged, not {options['cache']}")
    options["block_size"] = block_size_for(options["kv_dtype"], block_size)
    checked, spec = make_options(stop=tuple(unescape(text) for text in stop), **options)
    texts = gather(prompts, files)
    model = computing.load(source)
    if kv_heads is not None:
        model = model.with_kv_heads(kv_heads)
        click.echo(f"note: heads averaged to {kv_heads}; the model was not trained this way", err=True)
    if model.backend.name == "cupy" and model.numerics is FAST and computing.numerics is None:
        click.echo("note: on CuPy the numerics are fast: cached and uncached agree within rounding", err=True)
    prompts_ids = [encode(model, text, chat, system) for text in texts]
    shown = [""] * len(texts) if chat else texts
    if beams is not None:
        penalty = 1.0 if length_penalty is None else length_penalty
        for ids, text in zip(prompts_ids, shown, strict=True):
            search(model, ids, text, checked, spec, beams, penalty, as_json, stats)
    elif together and spec.kind == "paged":
        run_together(model, prompts_ids, shown, checked, spec, copies, as_json, stats)
    else:
        runs = [model.start(ids, checked, spec) for ids in prompts_ids]
        run_alone(runs, shown, as_json, no_stream, stats)


def encode(model: "Model", text: str, chat: bool, system: str | None) -> list[int]:
    """The ids of a prompt, or of the conversation that it begins."""
    if not chat:
        return model.encode(text)
    from nanokv.chat import encode_chat

    told = [] if system is None else [{"role": "system", "content": system}]
    return encode_chat(model, [*told, {"role": "user", "content": text}])


def run_alone(runs: list["Generation"], texts: list[str], as_json: bool, no_stream: bool, stats: bool) -> None:
    """One prompt after the other, streaming."""
    for number, run in enumerate(runs):
        if number and not as_json:
            click.echo()
        play(run, texts[number], as_json, no_stream)
        if stats:
            show_table(stats_rows(run), err=as_json)
        if run.finish_reason == "interrupted":
            sys.exit(130)


def run_together(
    model: "Model",
    ids: list[list[int]],
    shown: list[str],
    options: "Options",
    spec: "CacheSpec",
    copies: int,
    as_json: bool,
    stats: bool,
) -> None:
    """All prompts, and all copies of each, in one engine; printed in order when they are complete, `shown` before each."""
    from nanokv.engine import engine_for

    engine = engine_for(model, spec, [len(prompt) for prompt in ids], options, copies)
    runs = [(text, run) for text, prompt in zip(shown, ids, strict=True) for run in engine.add(prompt, options, copies)]
    try:
        for _ in engine.stream():
            pass
    except KeyboardInterrupt:
        for _, run in runs:
            if run.finish_reason is None:
                engine.cancel(run)
    for number, (text, run) in enumerate(runs):
        if number and not as_json:
            click.echo()
        click.echo(json.dumps(run.to_dict()) if as_json else text + run.text)
        if run.finish_reason in NOTES:
            click.echo(f"[ended: {NOTES[run.finish_reason]}]", err=True)
    if stats:
        show_table(engine.report(), err=as_json)
    if any(run.finish_reason == "interrupted" for _, run in runs):
        sys.exit(130)


def search(
    model: "Model",
    prompt: list[int],
    text: str,
    options: "Options",
    spec: "CacheSpec",
    beams: int,
    length_penalty: float,
    as_json: bool,
    stats: bool,
) -> None:
    """Beam search: the best text after `text`, or with --json all beams."""
    from nanokv.beam import beam_search

    try:
        found = beam_search(model, prompt, options, spec, beams, length_penalty)
    except KeyboardInterrupt:
        click.echo("[ended: interrupted; a beam search has no text before its end]", err=True)
        sys.exit(130)
    if as_json:
        best = {"model": model.name, "prompt_tokens": prompt, "beams": [vars(beam) for beam in found.beams]}
        click.echo(json.dumps(best))
    else:
        click.echo(text + found.beams[0].text)
    if stats:
        show_table(found.report(), err=as_json)


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


def show_table(rows: list[tuple[str, str]], err: bool) -> None:
    """The small table of --stats."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
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
    kept = f"{run.cache_tokens} tokens, {run.cache_bytes:,} bytes, {run.cache_token_bytes:,.0f} a token"
    rows.append(("KV cache", f"{run.cache.kind}, {run.cache.kv_dtype or model.dtype}: {kept}"))
    without = f"without a cache {spent.tokens_uncached:,}, about {spent.uncached_s:.2f} s"
    rows.append(("recomputing", f"{spent.tokens_computed:,} tokens computed; {without}"))
    rows.append(("numerics", f"{model.numerics.contract} by {model.kernels} kernels, {model.dtype}"))
    return rows
