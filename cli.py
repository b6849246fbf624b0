"""The command line: `python cli.py COMMAND`, or `nanokv COMMAND` once installed."""

import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from nanokv import __version__
from nanokv.commands.bench import bench
from nanokv.commands.chat import chat
from nanokv.commands.check import check
from nanokv.commands.generate import generate
from nanokv.commands.models import models
from nanokv.commands.pull import pull
from nanokv.commands.replay import replay
from nanokv.commands.simulate import simulate
from nanokv.commands.size import size
from nanokv.commands.vectors import vectors
from nanokv.commands.verify import verify
from nanokv.errors import NanoKVError


class Commands(click.Group):
    """Every error that nanokv raises ends in one line and an exit code; `--debug`, anywhere, shows the traceback."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        before = args[: args.index("--")] if "--" in args else args
        debug = "--debug" in before
        if debug:
            args.remove("--debug")
        try:
            return super().main(args, *rest, **options)
        except Exception as error:
            if debug:
                traceback.print_exc()
            if isinstance(error, NanoKVError):
                message, code = str(error), error.exit_code
            else:  # a fault of nanokv, but still not a page of traceback
                message, code = f"unexpected {type(error).__name__}: {error} (--debug shows where)", 1
            click.echo("error: " + " ".join(message.split()), err=True)
            sys.exit(code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nanokv")
def main() -> None:
    """The reference to check a KV cache against: GPT-2 and Llama inference with explicit caches.

    --debug, with any command, shows the traceback of an error.
    """


for command in (generate, chat, pull, models, bench, simulate, check, size, replay, vectors, verify):
    main.add_command(command)

if __name__ == "__main__":
    main()
