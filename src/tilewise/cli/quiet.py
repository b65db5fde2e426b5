"""`--quiet`, for every command in one place: nothing is printed but errors and what `--json` asks for."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors, and the JSON where it is asked for.")]


def add_quiet(app: typer.Typer) -> None:
    """Give every command of an application, and of the groups in it, the option."""
    for command in app.registered_commands:
        if command.callback is not None and not hasattr(command.callback, "takes_quiet"):
            command.callback = with_quiet(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_quiet(group.typer_instance)


def with_quiet(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with one more option."""

    @functools.wraps(command)
    def run(*args: Any, quiet: bool = False, **options: Any) -> Any:
        if not quiet:
            return command(*args, **options)
        with contextlib.ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: PTH123 - a device, not a path
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            if not options.get("as_json"):
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            return command(*args, **options)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "quiet": Quiet}
    run.takes_quiet = True  # type: ignore[attr-defined]
    return run
