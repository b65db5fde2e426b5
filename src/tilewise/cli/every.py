"""Options and checks that all commands share: `--json` and `--quiet`, outputs, choices, and checked arguments.

Numbers must be finite, not negative and below 2**31. A path declared with `output_file` and its variants must be
writable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from tilewise.errors import ConfigurationError, UnavailableError


def _set_threads(value: int | None) -> int | None:
    """Set the number of threads if `--threads` was typed; the option's callback."""
    if value is not None:
        from tilewise import set_num_threads

        set_num_threads(value)
    return value


Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors and JSON, also after the command's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, also after the command's name.")]
_HiddenQuiet = Annotated[bool, typer.Option("--quiet", hidden=True, help="As `tilewise --quiet`.")]
AsJson = Annotated[bool, typer.Option("--json", hidden=True, help="As `tilewise --json`.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the native kernels.", callback=_set_threads)]
_METAVARS = {int: "<number>", float: "<number>", Path: "<path>"}
_MAX_NUMBER = 2**31 - 1  # the largest signed 32-bit integer; arbitrary, rejects absurd numbers
_PICTURE_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")


def option(text: str, *names: str, **settings: Any) -> Any:
    """Declare an option with its help; a switch that is off by default gets no `--no-` form."""
    return typer.Option(*names, help=text, **settings)


def argument(text: str, **settings: Any) -> Any:
    """Declare an argument with its help."""
    return typer.Argument(help=text, **settings)


def output_file(
    *names: str,
    declare: Callable[..., Any] = typer.Option,
    is_folder: Callable[[Path], bool] = lambda _path: False,
    suffixes: tuple[str, ...] = (),
    **settings: Any,
) -> Any:
    """Declare an option, or an argument, that names a file to write."""

    def check(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
        """Raise an error unless the path can be written, and no other output of the command has it."""
        if value is None:
            return None
        label = _label(parameter)
        if suffixes and value.suffix.lower() not in suffixes:
            raise ConfigurationError(f"{label} {value}: a picture's name ends in {', '.join(suffixes)}")
        check_output(value, label, folder=is_folder(value))
        other = context.meta.setdefault("tilewise.outputs", {}).setdefault(value, label)
        if other != label and not value.is_dir():
            raise ConfigurationError(f"{other} and {label} name the same file, {value}")
        return value

    return declare(*names, callback=check, **settings)


def output_folder(*names: str, **settings: Any) -> Any:
    """Declare an option that names a folder to write into."""
    return output_file(*names, is_folder=lambda _path: True, **settings)


def output_file_or_folder(*names: str, **settings: Any) -> Any:
    """Declare an option that names a file, if the path has a suffix, or a folder to write into."""
    return output_file(*names, is_folder=lambda path: not path.suffix, **settings)


def output_picture(*names: str, **settings: Any) -> Any:
    """Declare an option that names a picture to write."""
    return output_file(*names, suffixes=_PICTURE_SUFFIXES, **settings)


def one_of(*words: str, declare: Callable[..., Any] = typer.Option, **settings: Any) -> Any:
    """Declare an option, or an argument, that takes one of these words: help lists them, the shell completes them.

    The command itself rejects other words, with a message that suggests the nearest one.
    """
    return declare(
        help=f"{', '.join(words[:-1])} or {words[-1]}.",
        autocompletion=lambda incomplete: [word for word in words if word.startswith(incomplete)],
        **settings,
    )


def prepared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command: check its numbers, and obey `--json` and `--quiet` before or after the command's name."""
    signature = inspect.signature(command, eval_str=True)
    for parameter in signature.parameters.values():
        _complete_declaration(parameter)

    @functools.wraps(command)
    def run(*args: Any, quiet: bool = False, command_context: typer.Context | None = None, **options: Any) -> Any:
        """Apply the options that every command has, and run the command."""
        shared = {} if command_context is None else command_context.find_root().params
        if shared.get("as_json"):
            if "as_json" not in options:
                raise ConfigurationError("This command has no result to print as JSON; leave out --json.")
            options["as_json"] = True
        if not (quiet or shared.get("quiet")):
            return command(*args, **options)
        with contextlib.ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: PTH123 - a device, not a path
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            if not options.get("as_json"):
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            return command(*args, **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    quiet_option = inspect.Parameter("quiet", keyword, default=False, annotation=_HiddenQuiet)
    context = inspect.Parameter("command_context", keyword, default=None, annotation=typer.Context)
    parameters = [*signature.parameters.values(), quiet_option, context]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}  # evaluated once
    run.is_prepared = True  # type: ignore[attr-defined]
    return run


def _complete_declaration(parameter: inspect.Parameter) -> None:
    """Add to a parameter what its type implies: a check of numbers, and a placeholder such as <number>."""
    notes = getattr(parameter.annotation, "__metadata__", ())
    declared = next((note for note in notes if isinstance(note, typer.models.ParameterInfo)), None)
    if declared is None:
        return
    kind = parameter.annotation.__origin__
    if kind is bool and parameter.default is False and declared.default is ...:  # Typer has the first name there
        declared.default = f"--{parameter.name.replace('_', '-')}"  # without a name Typer would add `--no-` as well
    kinds = {kind, *get_args(kind)}
    if kinds & {int, float} and declared.callback is None:
        declared.callback = _check_number
    if isinstance(declared, typer.models.OptionInfo) and declared.metavar is None and bool not in kinds:
        declared.metavar = next((word for kind, word in _METAVARS.items() if kind in kinds), "<text>")


def _label(parameter: typer.CallbackParam) -> str:
    """Return an option as it is typed, or the name of an argument in capitals."""
    return next((name for name in parameter.opts if name.startswith("--")), str(parameter.name).upper())


def _check_number(parameter: typer.CallbackParam, value: Any) -> Any:
    """Return the value of an option; raise unless it is finite and in the range that all commands accept."""
    if not isinstance(value, int | float):
        return value
    if not math.isfinite(value):
        raise ConfigurationError(f"{_label(parameter)} must be a finite number, not {value}")
    if value < 0:
        raise ConfigurationError(f"{_label(parameter)} must not be negative, but is {value}")
    if value > _MAX_NUMBER:
        largest = f"the largest number a command takes is {_MAX_NUMBER}"
        raise ConfigurationError(f"{_label(parameter)} {value} is too large: {largest}")
    return value


def answer(as_json: bool, facts: Any, *lines: str, notes: Iterable[str] = ()) -> None:
    """Print the result of a command: its facts as JSON, or sentences and, on stderr, notes."""
    if as_json:
        typer.echo(json.dumps(facts, default=_plain))
        return
    for note in notes:
        typer.echo(note, err=True)
    for line in lines:
        typer.echo(line)


def _plain(value: Any) -> Any:
    """Convert a dataclass, path or NumPy number to JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value) if isinstance(value, Path) else float(value)


def check_output(path: Path, label: str = "the output", folder: bool = False) -> None:
    """Raise an error unless `path` is, or can become, a file (or a folder) that this user can write."""
    path = path.expanduser()
    try:
        if path.is_dir() and not folder:
            raise UnavailableError(f"{label} {path} is a folder; name a file in it")
        if folder and path.exists() and not path.is_dir():
            raise UnavailableError(f"{label} {path} is a file; name a folder")
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except OSError as error:  # a name too long, a loop of links
        raise UnavailableError(f"{label} {path} cannot be written ({error.strerror or error})") from None
    if path != existing and not existing.is_dir():
        raise UnavailableError(f"{label} {path} cannot be written: {existing} is a file, not a folder")
    is_virtual = existing.absolute().parts[1:2] in (("proc",), ("sys",))  # even root cannot create files there
    if not os.access(existing, os.W_OK | (os.X_OK if existing.is_dir() else 0)) or is_virtual:
        raise UnavailableError(f"{label} {path} cannot be written: no permission to write in {existing}")


def check_memory(required_bytes: float, what: str) -> None:
    """Raise an error if this many bytes exceed the memory of the machine."""
    from tilewise.profile.machine import memory_bytes

    if required_bytes > memory_bytes():
        has = memory_bytes() / 2**30
        raise ConfigurationError(
            f"{what} would take {required_bytes / 2**30:,.0f} GiB of memory, and this machine has {has:,.0f}"
        )
