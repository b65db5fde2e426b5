"""The `tilewise` command: one Typer application, one module per command.

A command's module is imported only when it is run, so `tilewise --help` stays quick. What was typed wrong and what a
TilewiseError says is one sentence on stderr and exit code 2; nothing else is caught.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from tilewise.errors import TilewiseError

app = typer.Typer(
    name="tilewise",
    help="Measure tensor programs, learn which tile is fastest, and make a small tensor framework fast for real.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    from tilewise.cli import commands

    commands.register(app)
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "120")  # a log has no width, and tables need some
    command = typer.main.get_command(app)
    _flags_take_no_value(command)
    try:
        code = command.main(prog_name="tilewise", standalone_mode=False)
        sys.stdout.flush()
    except TilewiseError as error:
        _leave(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _leave("interrupted", 130)
    except BrokenPipeError:  # `tilewise ... | head`: whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _leave(_typed_wrong(error), int(getattr(error, "exit_code", 2)))
    sys.exit(code if isinstance(code, int) else 0)


def _flags_take_no_value(command: Any) -> None:
    """Help names the type of what follows an option; nothing follows a flag."""
    for child in getattr(command, "commands", {}).values():
        _flags_take_no_value(child)
    help_option = command.get_help_option(typer.Context(command))
    command.get_help_option = lambda _: help_option
    for parameter in [*command.params, help_option]:
        if getattr(parameter, "is_flag", False) and hasattr(parameter, "display_type_rich"):
            parameter.display_type_rich = lambda **_: None


def _typed_wrong(error: Any) -> str:
    """The parser's complaint and where to look; empty where it has shown the help instead."""
    said, context = str(error.format_message()).strip().rstrip("."), getattr(error, "ctx", None)
    where = f"`{context.command_path} --help`" if context is not None else "`tilewise --help`"
    return f"{said}; {where} lists what there is." if said else ""


def _leave(sentence: str, code: int) -> None:
    if sentence:
        typer.echo(f"tilewise: {sentence}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
