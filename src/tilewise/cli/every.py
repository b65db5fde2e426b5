"""Options and checks that all commands share: `--json` and `--quiet`, outputs, choices, and checked arguments.

Numbers must be finite, not negative and below 2**31. A path declared with `output_file`, `output_folder` or
`output_picture` must be writable.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from tilewise.errors import ConfigurationError, UnavailableError

Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors and JSON, also after the command's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, also after the command's name.")]
_HiddenQuiet = Annotated[bool, typer.Option("--quiet", hidden=True, help="As `tilewise --quiet`.")]
AsJson = Annotated[bool, typer.Option("--json", hidden=True, help="As `tilewise --json`.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the native kernels.")]
_METAVARS = {int: "<number>", float: "<number>", Path: "<path>"}
_MAX_NUMBER = 2**31 - 1  # the largest signed 32-bit integer; arbitrary, rejects absurd numbers
_PICTURE_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")


class OutputKind(Enum):
    """The kinds of paths that commands write."""

    FILE = "file"
    FOLDER = "folder"
    PICTURE = "picture"
    EITHER = "file or folder"


def output_file(*names: str, declare: Callable[..., Any] = typer.Option, **settings: Any) -> Any:
    """Declare an option, or an argument, that names a file to write."""
    return _output(OutputKind.FILE, declare(*names, **settings))


def output_folder(*names: str, **settings: Any) -> Any:
    """Declare an option that names a folder to write into."""
    return _output(OutputKind.FOLDER, typer.Option(*names, **settings))


def output_file_or_folder(*names: str, **settings: Any) -> Any:
    """Declare an option that names a file, if the path has a suffix, or a folder to write into."""
    return _output(OutputKind.EITHER, typer.Option(*names, **settings))


def output_picture(*names: str, **settings: Any) -> Any:
    """Declare an option that names a picture to write."""
    return _output(OutputKind.PICTURE, typer.Option(*names, **settings))


def _output(kind: OutputKind, declaration: Any) -> Any:
    declaration.output_kind = kind
    return declaration


def one_of(*words: str, declare: Callable[..., Any] = typer.Option, **settings: Any) -> Any:
    """Declare an option, or an argument, that takes one of these words: help lists them, the shell completes them.

    The command itself rejects other words, with a message that suggests the nearest one.
    """
    return declare(
        help=f"{', '.join(words[:-1])} or {words[-1]}.",
        autocompletion=lambda incomplete: [word for word in words if word.startswith(incomplete)],
        **settings,
    )


def prepare_all(app: typer.Typer) -> None:
    """Prepare every command of an application, and of the groups in it."""
    for command in app.registered_commands:
        if command.callback is not None and not hasattr(command.callback, "is_prepared"):
            command.callback = prepared(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            prepare_all(group.typer_instance)


def prepared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command: check its arguments, and obey `--json` and `--quiet` before or after the command's name."""
    signature = inspect.signature(command, eval_str=True)
    for parameter in signature.parameters.values():
        _add_metavar(parameter)

    @functools.wraps(command)
    def run(*args: Any, quiet: bool = False, command_context: typer.Context | None = None, **options: Any) -> Any:
        """Check the arguments, apply the options that every command has, and run the command."""
        shared = {} if command_context is None else command_context.find_root().params
        quiet = quiet or bool(shared.get("quiet"))
        if shared.get("as_json"):
            if "as_json" not in options:
                raise ConfigurationError("This command has no result to print as JSON; leave out --json.")
            options["as_json"] = True
        check_arguments(signature, options)
        if options.get("threads") is not None and signature.parameters["threads"].annotation == Threads:
            from tilewise import set_num_threads

            set_num_threads(options["threads"])
        if not quiet:
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


def answer(as_json: bool, facts: Any, *lines: str) -> None:
    """Print the result of a command: its facts as JSON, or sentences."""
    for line in [json.dumps(facts, default=float)] if as_json else lines:
        typer.echo(line)


def _add_metavar(parameter: inspect.Parameter) -> None:
    """Set the placeholder that help prints for an option's value, such as <number>."""
    declared = _typer_info(parameter)
    if declared is None or declared.metavar is not None or isinstance(declared, typer.models.ArgumentInfo):
        return
    kinds = {parameter.annotation.__origin__, *get_args(parameter.annotation.__origin__)}
    if bool not in kinds:
        declared.metavar = next((word for kind, word in _METAVARS.items() if kind in kinds), "<text>")


def check_arguments(signature: inspect.Signature, options: Mapping[str, Any]) -> None:
    """Raise an error for the first argument that is out of range or cannot be written."""
    declarations = {name: _typer_info(parameter) for name, parameter in signature.parameters.items()}
    kinds = {name: info.output_kind for name, info in declarations.items() if hasattr(info, "output_kind")}
    for name, value in options.items():
        label = _label(name, declarations.get(name))
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(label, value)
        elif isinstance(value, Path) and name in kinds:
            if kinds[name] is OutputKind.PICTURE and value.suffix.lower() not in _PICTURE_SUFFIXES:
                raise ConfigurationError(f"{label} {value}: a picture's name ends in {', '.join(_PICTURE_SUFFIXES)}")
            is_folder = kinds[name] is OutputKind.FOLDER or (kinds[name] is OutputKind.EITHER and not value.suffix)
            check_output(value, label, folder=is_folder)
            for other in kinds.keys() - {name}:
                if options.get(other) == value and not value.is_dir():
                    raise ConfigurationError(f"{label} and --{other.replace('_', '-')} name the same file, {value}")


def _typer_info(parameter: inspect.Parameter | None) -> Any:
    """Return the typer.Option or typer.Argument in a parameter's annotation, if there is one."""
    notes = getattr(parameter.annotation, "__metadata__", ()) if parameter is not None else ()
    return next((note for note in notes if hasattr(note, "param_decls")), None)


def _label(name: str, declared: Any) -> str:
    if isinstance(declared, typer.models.ArgumentInfo):
        return name.upper()
    spellings = [text for text in getattr(declared, "param_decls", None) or () if text.startswith("--")]
    return spellings[0].split("/")[0] if spellings else f"--{name.replace('_', '-')}"


def _check_number(label: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigurationError(f"{label} must be a finite number, not {value}")
    if value < 0:
        raise ConfigurationError(f"{label} must not be negative, but is {value}")
    if value > _MAX_NUMBER:
        raise ConfigurationError(f"{label} {value} is too large: the largest number a command takes is {_MAX_NUMBER}")


def check_output(path: Path, label: str = "the output", folder: bool = False) -> None:
    """Raise an error unless `path` is, or can become, a file (or a folder) that this user can write."""
    path = path.expanduser()
    try:
        if path.is_dir() and not folder:
            raise UnavailableError(f"{label} {path} is a folder; name a file in it")
        if folder and path.exists() and not path.is_dir():
            raise UnavailableError(f"{label} {path} is a file; name a folder")
        existing = path if path.exists() else _nearest_existing_parent(path)
    except OSError as error:  # a name too long, a loop of links
        raise UnavailableError(f"{label} {path} cannot be written ({error.strerror or error})") from None
    if path != existing and not existing.is_dir():
        raise UnavailableError(f"{label} {path} cannot be written: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | (os.X_OK if existing.is_dir() else 0)) or _is_virtual(existing):
        raise UnavailableError(f"{label} {path} cannot be written: no permission to write in {existing}")


def check_memory(required_bytes: float, what: str) -> None:
    """Raise an error if this many bytes exceed the memory of the machine."""
    from tilewise.profile.machine import memory_bytes

    if required_bytes > memory_bytes():
        has = memory_bytes() / 2**30
        raise ConfigurationError(
            f"{what} would take {required_bytes / 2**30:,.0f} GiB of memory, and this machine has {has:,.0f}"
        )


def _nearest_existing_parent(path: Path) -> Path:
    """Return the closest parent of a path that exists."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def _is_virtual(existing: Path) -> bool:
    """Return whether a path is in /proc or /sys, where even root cannot create files."""
    return existing.absolute().parts[1:2] in (("proc",), ("sys",))
