"""Options of `tilewise` itself: --quiet, and --version with all that a bug report needs."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from tilewise.cli.every import Quiet


def wheel_tag() -> str:
    """Return the tag of the installed wheel: the Python and the systems that it was built for."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        wheel = distribution("tilewise").read_text("WHEEL") or ""
    except PackageNotFoundError:
        wheel = ""
    tags = [line.removeprefix("Tag: ") for line in wheel.splitlines() if line.startswith("Tag: ")]
    return f"built as {tags[0]}" if tags else "not installed, only on the path"


def describe_version() -> str:
    """Describe version and build, kernels, and machine in three lines."""
    import numpy as np

    from tilewise import __version__
    from tilewise._extension import native
    from tilewise._system import cores, cpu_name

    if native is None:
        kernels = "none compiled: NumPy paths"
    else:
        kernels = f"{native.isa()} in use, of {', '.join(native.supported_isas())}"
    return (
        f"tilewise {__version__}, {wheel_tag()}\n"
        f"kernels: {kernels}\n"
        f"machine: {cpu_name()}, {cores()} core{'s' * (cores() != 1)}, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, NumPy {np.__version__}"
    )


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(describe_version())
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version, kernels and machine.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Measure tensor programs, learn which tile is fastest, and make a small tensor framework fast for real."""
