"""`tilewise --version`: version, kernels and machine, which is what a report of a fault needs."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from tilewise.cli.every import Quiet


def build() -> str:
    """The tag of the wheel that was installed, which names the Python and the systems it was built for."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        wheel = distribution("tilewise").read_text("WHEEL") or ""
    except PackageNotFoundError:
        wheel = ""
    tags = [line.removeprefix("Tag: ") for line in wheel.splitlines() if line.startswith("Tag: ")]
    return f"built as {tags[0]}" if tags else "not installed, only on the path"


def describe_version() -> str:
    """Three lines: tilewise and its build, its kernels, the machine."""
    import numpy as np

    from tilewise import __version__
    from tilewise._extension import native
    from tilewise._system import cores, cpu_name

    if native is None:
        kernels = "none compiled: NumPy paths"
    else:
        kernels = f"{native.isa()} in use, of {', '.join(native.supported_isas())}"
    return (
        f"tilewise {__version__}, {build()}\n"
        f"kernels: {kernels}\n"
        f"machine: {cpu_name()}, {cores()} core{'s' * (cores() != 1)}, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, NumPy {np.__version__}"
    )


def _show(asked: bool) -> None:
    if asked:
        typer.echo(describe_version())
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show, is_eager=True, help="Version, kernels and machine.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Measure tensor programs, learn which tile is fastest, and make a small tensor framework fast for real."""
