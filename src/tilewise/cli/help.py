"""Help as plain text with a heading for each group of commands.

Typer's own panels need Rich, whose import takes longer than the rest of `tilewise --help`.
"""

from __future__ import annotations

import platform
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewise._addons import provider_of
from tilewise.cli.every import Json, Quiet
from tilewise.errors import UnavailableError

# Former top-level commands and their names now. The old names work until 0.2, with a note on stderr.
RENAMED = {
    "layout": ("tiles", "layout"),
    "serve": ("fleet", "serve"),
    "inductor": ("store", "inductor"),
    "replay": ("tiles", "replay"),
}
# Second names of commands inside a group, without a note.
_ALIASES = {"run-pinned": ("lock", "run")}


class Sections(TyperGroup):
    """A group of commands whose help lists them under their headings."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command; for one of an add-on that is not installed, say what to install."""
        if ctx.parent is None and cmd_name in RENAMED and cmd_name not in self.commands:
            return self._renamed_command(ctx, cmd_name)
        if ctx.parent is None and cmd_name in _ALIASES:
            return self._command_at(ctx, _ALIASES[cmd_name])
        command = super().get_command(ctx, cmd_name)
        if command is None and (addon := provider_of(_typed(ctx, cmd_name))):
            raise UnavailableError(f"`tilewise {_typed(ctx, cmd_name)}` comes with {addon}: pip install {addon}")
        return command

    def _renamed_command(self, ctx: Any, old_name: str) -> Any:
        """Look up a command by its former name, and print a note with the new one unless --quiet forbids it."""
        command = self._command_at(ctx, RENAMED[old_name])
        if not ctx.resilient_parsing and not ctx.params.get("quiet"):  # resilient parsing: the shell completes a line
            new_name = " ".join(RENAMED[old_name])
            note = f"`tilewise {old_name}` is now `tilewise {new_name}`; the old name works until 0.2"
            typer.echo(f"tilewise: {note}", err=True)
        return command

    def _command_at(self, ctx: Any, names: tuple[str, ...]) -> Any:
        """Return a command inside of groups."""
        command: Any = self
        for name in names:
            command = command.get_command(ctx, name)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per heading, with the first sentence of each command's help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None)
            heading = heading if isinstance(heading, str) else "Commands"
            sections.setdefault(heading, []).append((name, _first_sentence(command.help or "")))
        widest = max(len(name) for name in self.commands)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows])


def _typed(ctx: Any, name: str) -> str:
    """Return a command as typed after `tilewise`, such as `compete serve`."""
    return f"{ctx.command_path} {name}".partition(" ")[2]


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")


# --- version ---


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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure tensor programs, learn which tile is fastest, and make a small tensor framework fast for real."""
