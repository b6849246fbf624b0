"""`chat`: a conversation, in which each turn computes only what is new."""

import sys
from typing import TYPE_CHECKING, Any

import click

from nanokv.commands.options import Computing, block_size_for, cache_options, model_options, sampling_options
from nanokv.errors import NanoKVError

if TYPE_CHECKING:
    from nanokv.engine import Engine
    from nanokv.generate import Generation, Options


@click.command()
@model_options
@sampling_options
@cache_options
@click.option("--system", help="What the model is told before the conversation.")
@click.option("--stats", is_flag=True, help="After each answer: what was found in the cache, what was computed, the speed.")
def chat(
    source: str,
    computing: Computing,
    system: str | None,
    stats: bool,
    block_size: int | None,
    **options: Any,
) -> None:
    """Talk with a model that has a chat template. A line is a message; end of input (Ctrl-D) ends, Ctrl-C stops an answer.

    The conversation stays in a paged cache: the blocks of earlier turns are found by their hashes and not computed again.
    """  # fmt: skip
    from nanokv.chat import encode_chat
    from nanokv.engine import Engine
    from nanokv.model import make_options

    options["block_size"] = block_size_for(options["kv_dtype"], block_size)
    checked, spec = make_options(cache="paged", **options)
    model = computing.load(source)
    messages = [] if system is None else [{"role": "system", "content": system}]
    encode_chat(model, [*messages, {"role": "user", "content": "?"}])  # a model that cannot talk is refused at once
    engine = Engine(model, spec, num_blocks=model.blocks_for(spec, model.config.num_positions) + 1)
    while (line := _read()) is not None:
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(engine, encode_chat(model, messages), checked, stats)
        except NanoKVError as error:  # the conversation can go on without this message
            messages.pop()
            click.echo(f"error: {error}", err=True)
            continue
        messages.append({"role": "assistant", "content": answer.text})


def _read() -> str | None:
    """The next line; None at the end of input."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    return line.strip() if line else None


def _answer(engine: "Engine", prompt: list[int], options: "Options", stats: bool) -> "Generation":
    """Streams one answer."""
    from nanokv.commands.generate import NOTES

    before, hits = engine.stats.computed_tokens, engine.stats.prefix_hit_tokens
    run = engine.add(prompt, options)[0]
    try:
        for update in engine.stream():
            click.echo(update.text, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        engine.cancel(run)
    except NanoKVError:
        engine.cancel(run)
        raise
    click.echo()
    if run.finish_reason in NOTES:
        click.echo(f"[ended: {NOTES[run.finish_reason]}]", err=True)
    if stats:
        seconds, steps = run.decode_s, len(run.tokens) - 1
        speed = f", {steps / seconds:,.1f} tokens/s" if steps > 0 and seconds else ""
        reused, computed = engine.stats.prefix_hit_tokens - hits, engine.stats.computed_tokens - before
        click.echo(f"[{reused} of {len(prompt)} prompt tokens found in the cache, {computed} tokens computed{speed}]", err=True)
    return run
