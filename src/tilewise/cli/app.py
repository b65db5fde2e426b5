"""The `tilewise` command: one Typer application, one module per command.

A command imports the code that it needs only when it runs, so that `tilewise --help` stays quick. Usage errors,
TilewiseErrors and errors of the operating system (a file, memory) end in one sentence on stderr and exit code 2; other
exceptions are not caught.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import threading
import tomllib
import warnings
from pathlib import Path
from typing import Any

import typer

from tilewise._files import read_text_input
from tilewise._wording import substitute_unencodable
from tilewise.cli import commands
from tilewise.errors import ConfigurationError, TilewiseError


def _new_application() -> typer.Typer:
    """Create an application without commands."""
    return typer.Typer(
        name="tilewise",
        cls=commands.Sections,
        help=commands.options.__doc__,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 110},
    )


app = _new_application()


def main() -> None:
    """Entry point of the console script."""
    _open_standard_streams()
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "120")  # a log has no width; tables need one
    warnings.formatwarning = _format_warning
    substitute_unencodable(sys.stdout)
    substitute_unencodable(sys.stderr)
    _treat_sigterm_as_interrupt()
    try:
        command = command_line(_only_command(sys.argv))
        code = command.main(prog_name="tilewise", standalone_mode=False, default_map=defaults(command))
        sys.stdout.flush()
    except TilewiseError as error:
        _exit_with_message(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _exit_with_message("interrupted", 130)
    except BrokenPipeError:  # `tilewise ... | head`: the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _exit_with_message(_describe_os_error(error), 2)
    except MemoryError:
        _exit_with_message("this needs more memory than the machine has to give; try smaller sizes.", 2)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command prints its help
            typer.echo(error.format_message())
            sys.exit(2)
        _exit_with_message(_describe_usage_error(error), int(getattr(error, "exit_code", 2)))
    sys.exit(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Replace standard streams that the parent process has closed (`<&-`, `>&-`, some daemons).

    Closed descriptors 0 to 2 are opened on the null device. Otherwise the next file that is opened would get such a
    number, and output of this process or of a child would be written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # os.open returns the lowest free number: this one
    sys.stdin, sys.stdout, sys.stderr = (s or io.StringIO() for s in (sys.stdin, sys.stdout, sys.stderr))


def _treat_sigterm_as_interrupt() -> None:
    """Raise KeyboardInterrupt on SIGTERM, so that commands clean up as after Ctrl-C. Forked children end at once."""
    main_pid = os.getpid()

    def end(number: int, frame: object) -> None:
        """Raise KeyboardInterrupt in this process; end a forked child at once."""
        signal.signal(number, signal.SIG_IGN if os.getpid() == main_pid else signal.SIG_DFL)  # ignore repeats
        if os.getpid() == main_pid:
            raise KeyboardInterrupt
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


@functools.cache
def command_line(only: str = "") -> Any:
    """Build the tree of all commands, sorted as `tilewise --help` lists them, or only of the command `only`."""
    application = _new_application() if only else app
    if not application.registered_commands:
        commands.register(application, only)
    tree = typer.main.get_command(application)
    commands.arrange(tree)
    return tree


def _only_command(arguments: list[str]) -> str:
    """Return the name of the command if these arguments need no other: building all takes a tenth of a second.

    "" before the name of the command was parsed, or where a shell asks for completions.
    """
    is_single = len(arguments) > 1 and arguments[1] in commands.FUNCTIONS and "_TILEWISE_COMPLETE" not in os.environ
    return arguments[1] if is_single else ""


def _format_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    """Format a warning as its message alone, without the line of code that raised it."""
    return f"tilewise: {message}\n"


def _describe_os_error(error: OSError) -> str:
    """Format an error of the operating system, with the file's name if there is one."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}." if error.filename else f"the system refused: {reason}."


def _describe_usage_error(error: Any) -> str:
    """Format a usage error as one sentence with a hint at the command's help."""
    complaint, context = str(error.format_message()).strip().rstrip("."), getattr(error, "ctx", None)
    where = f"`{context.command_path} --help`" if context is not None else "`tilewise --help`"
    hint = f"{where} lists what there is."
    return f"{complaint} ({hint})" if complaint.endswith("?") else f"{complaint}; {hint}"


def _exit_with_message(sentence: str, code: int) -> None:
    """Print the sentence, unless it is empty, on standard error, and exit with the code."""
    if sentence:
        typer.echo(f"tilewise: {sentence}", err=True)
    sys.exit(code)


# --- tilewise.toml ---


_KINDS: dict[str, type] = {"cache": str, "threads": int, "board": str}
_PARAMETERS = {"threads": "threads", "board": "where"}  # setting: parameter whose default it sets
_MAX_FILE_BYTES = 1 << 16  # arbitrary: rejects files that are not a short list of settings


def configuration_file() -> Path | None:
    """Return the configuration file that applies in the current folder, if any."""
    base = os.environ.get("XDG_CONFIG_HOME")
    config = Path(base) if base else Path("~/.config").expanduser()
    candidates = (Path("tilewise.toml"), config / "tilewise" / "tilewise.toml")
    return next((path for path in candidates if path.is_file()), None)


def read_configuration(path: Path) -> dict[str, Any]:
    """Read and check the settings of a file; errors name the file."""
    try:
        settings = tomllib.loads(read_text_input(path, _MAX_FILE_BYTES))
    except TilewiseError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read as TOML: {error}") from None
    for key, value in settings.items():
        if key not in _KINDS:
            raise ConfigurationError(f"{path}: there is no setting {key!r}; there are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[key]) or isinstance(value, bool):
            kind = "a text in quotes" if _KINDS[key] is str else "a whole number"
            raise ConfigurationError(f"{path}: {key} must be {kind}, not {value!r}")
    return settings


def defaults(command: Any) -> dict[str, Any]:
    """Return the configured defaults of every command as a click `default_map`, and set the cache folder."""
    path = configuration_file()
    settings = read_configuration(path) if path is not None else {}
    if "cache" in settings:
        os.environ.setdefault("TILEWISE_CACHE", str(Path(settings["cache"]).expanduser()))
    settings_by_parameter = {_PARAMETERS[key]: value for key, value in settings.items() if key in _PARAMETERS}
    return _defaults_for(command, settings_by_parameter) if settings_by_parameter else {}


def _defaults_for(command: Any, settings_by_parameter: dict[str, Any]) -> dict[str, Any]:
    """Select the settings that a command, or each command of a group, has as parameters."""
    if hasattr(command, "commands"):
        return {name: _defaults_for(child, settings_by_parameter) for name, child in command.commands.items()}
    names = [parameter.name for parameter in command.params if parameter.name in settings_by_parameter]
    return {name: settings_by_parameter[name] for name in names}


if __name__ == "__main__":
    main()
