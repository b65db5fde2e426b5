"""The `tilewise` command: one Typer application, one module per command.

A command imports its work only when it is run, so `tilewise --help` stays quick. What was typed wrong, what a
TilewiseError says, and what the system refuses (a file, memory) is one sentence on stderr and exit code 2; nothing else
is caught.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import threading
import warnings
from typing import Any

import typer

from tilewise._wording import substitute_unencodable
from tilewise.cli.configuration import defaults
from tilewise.cli.help import Sections
from tilewise.errors import TilewiseError

_HELP: dict[str, Any] = {"help_option_names": ["--help", "-h"], "max_content_width": 110}
app = typer.Typer(
    name="tilewise",
    cls=Sections,
    help="Measure tensor programs, learn which tile is fastest, and make a small tensor framework fast for real.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP,
)


def main() -> None:
    """Entry point of the console script."""
    _open_standard_streams()
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "120")  # a log has no width, and tables need some
    warnings.formatwarning = _one_line
    substitute_unencodable(sys.stdout)
    substitute_unencodable(sys.stderr)
    _end_like_an_interrupt()
    try:
        command = command_line()
        code = command.main(prog_name="tilewise", standalone_mode=False, default_map=defaults(command))
        sys.stdout.flush()
    except TilewiseError as error:
        _leave(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _leave("interrupted", 130)
    except BrokenPipeError:  # `tilewise ... | head`: whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _leave(_refused(error), 2)
    except MemoryError:
        _leave("this needs more memory than the machine has to give; try smaller sizes.", 2)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # nothing typed after a group: its help
            typer.echo(error.format_message())
            sys.exit(2)
        _leave(_typed_wrong(error), int(getattr(error, "exit_code", 2)))
    sys.exit(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Replace streams that whoever started us has closed (`<&-`, `>&-`, some daemons).

    Descriptors 0 to 2 go to the null device: otherwise the next file that is opened gets such a number, and what is
    printed, or what a child process prints, is written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdin, sys.stdout, sys.stderr = (s or io.StringIO() for s in (sys.stdin, sys.stdout, sys.stderr))


def _end_like_an_interrupt() -> None:
    """SIGTERM is Ctrl-C: what was begun is cleaned up or kept for the next run. Forked children end at once."""
    here = os.getpid()

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN if os.getpid() == here else signal.SIG_DFL)  # once is enough
        if os.getpid() == here:
            raise KeyboardInterrupt
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


@functools.cache
def command_line() -> Any:
    """Build the tree of all commands, sorted as `tilewise --help` lists them."""
    from tilewise.cli import commands

    if not app.registered_commands:
        commands.register(app)
    tree = typer.main.get_command(app)
    commands.arrange(tree)
    return tree


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as a reader wants it: what it says, not where in the code it was raised."""
    return f"tilewise: {message}\n"


def _refused(error: OSError) -> str:
    what = error.strerror or str(error)
    return f"{error.filename}: {what}." if error.filename else f"the system refused: {what}."


def _typed_wrong(error: Any) -> str:
    """The parser's complaint and where to look."""
    said, context = str(error.format_message()).strip().rstrip("."), getattr(error, "ctx", None)
    where = f"`{context.command_path} --help`" if context is not None else "`tilewise --help`"
    return f"{said} ({where} lists what there is.)" if said.endswith("?") else f"{said}; {where} lists what there is."


def _leave(sentence: str, code: int) -> None:
    if sentence:
        typer.echo(f"tilewise: {sentence}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
