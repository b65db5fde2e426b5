"""The list of commands, in the order and the groups that `tilewise --help` shows, and their help as plain text.

Typer's own help panels need Rich, whose import takes longer than the rest of `tilewise --help`.
"""

from __future__ import annotations

import platform
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewise._addons import provider_of, register_commands
from tilewise.cli.every import Json, Quiet, prepared
from tilewise.errors import UnavailableError

# Headings of `tilewise --help` with their commands; those of an add-on appear when it is installed.
HEADINGS = {
    "Learn and measure": ("tour", "check", "lab", "machine", "profile", "ladder"),
    "Make models fast": ("run", "fit", "quantize", "prune", "generate", "kv"),
    "Choose tiles": ("tiles", "collect", "tune", "calibrate", "lock", "store"),
    "Compete and share": ("compete", "fleet"),
}
# Commands that are one function, with the module that has it; each module imports its work late.
FUNCTIONS = {
    "tour": "tour",
    "check": "lessons",
    "lab": "lessons",
    "machine": "machine",
    "profile": "profile",
    "ladder": "ladder",
    "run": "run",
    "fit": "optimize.fit",
    "quantize": "optimize.quantize",
    "prune": "optimize.prune",
    "generate": "optimize.generate",
    "kv": "optimize.generate",
    "tune": "tune",
    "calibrate": "calibrate",
}
_GROUPS = {"tiles": "tiles.app", "collect": "collect", "lock": "lock", "store": "store", "compete": "compete"}
# Former top-level commands and their names now. The old names work until 0.2, with a note on stderr.
_RENAMED = {
    "layout": ("tiles", "layout"),
    "serve": ("fleet", "serve"),
    "inductor": ("store", "inductor"),
    "replay": ("tiles", "replay"),
}
# Second names of commands inside a group, without a note.
_ALIASES = {"run-pinned": ("lock", "run")}


def register(app: typer.Typer, only: str = "") -> None:
    """Attach every command to the application, or only one of `FUNCTIONS`, and the options before its name."""
    app.callback()(options)
    for name in (only,) if only else FUNCTIONS:
        app.command()(getattr(import_module(f"tilewise.cli.{FUNCTIONS[name]}"), name))
    if not only:
        for name, module in _GROUPS.items():
            app.add_typer(getattr(import_module(f"tilewise.cli.{module}"), name), name=name)
        register_commands(app)
    _prepare(app)


def _prepare(app: typer.Typer) -> None:
    """Wrap every command of an application, and of the groups in it, with the checks of `prepared`."""
    for command in app.registered_commands:
        if command.callback is not None and not hasattr(command.callback, "is_prepared"):
            command.callback = prepared(command.callback)
    for group in app.registered_groups:
        group.cls = Sections
        if group.typer_instance is not None:
            _prepare(group.typer_instance)


def arrange(tree: Any) -> None:
    """Sort the top-level commands by HEADINGS; unknown add-ons' commands follow under their own headings."""
    headings = {name: heading for heading, names in HEADINGS.items() for name in names}
    for name in headings.keys() & tree.commands.keys():
        tree.commands[name].rich_help_panel = headings[name]
    names = [*(name for name in headings if name in tree.commands), *tree.commands]
    tree.commands = {name: tree.commands[name] for name in names}


class Sections(TyperGroup):
    """A group of commands whose help lists them under their headings."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command by its name now or earlier; for one of a missing add-on, say what to install."""
        if ctx.parent is None and cmd_name in _RENAMED and cmd_name not in self.commands:
            command = self._command_at(ctx, _RENAMED[cmd_name])
            if not ctx.resilient_parsing and not ctx.params.get("quiet"):  # resilient: the shell completes a line
                new_name = " ".join(_RENAMED[cmd_name])
                note = f"`tilewise {cmd_name}` is now `tilewise {new_name}`; the old name works until 0.2"
                typer.echo(f"tilewise: {note}", err=True)
            return command
        if ctx.parent is None and cmd_name in _ALIASES:
            return self._command_at(ctx, _ALIASES[cmd_name])
        command = super().get_command(ctx, cmd_name)
        typed = f"{ctx.command_path} {cmd_name}".partition(" ")[2]  # as typed after `tilewise`: compete serve
        if command is None and (addon := provider_of(typed)):
            raise UnavailableError(f"`tilewise {typed}` comes with {addon}: in a clone, pip install packages/{addon}")
        return command

    def _command_at(self, ctx: Any, names: tuple[str, ...]) -> Any:
        """Return the command at a path of group names and its own name; None if there is none."""
        command: Any = self
        for name in names:
            command = command.get_command(ctx, name)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per heading, with the first sentence of each command's help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        widest = max(len(name) for name in self.commands)
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None)
            heading = heading if isinstance(heading, str) else "Commands"
            first_sentence = " ".join((command.help or "").split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
            sections.setdefault(heading, []).append((name.ljust(widest), first_sentence))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


# --- options before a command's name ---


def _wheel_tag() -> str:
    """Return the tag of the installed wheel: the Python and the systems that it was built for."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        wheel = distribution("tilewise").read_text("WHEEL") or ""
    except PackageNotFoundError:
        wheel = ""
    tags = [line.removeprefix("Tag: ") for line in wheel.splitlines() if line.startswith("Tag: ")]
    return f"built as {tags[0]}" if tags else "not installed, only on the path"


def _print_version(requested: bool) -> None:
    """Print version and build, kernels, and machine in three lines."""
    if not requested:
        return
    import numpy as np

    from tilewise import __version__
    from tilewise._extension import native
    from tilewise._system import cores, cpu_name
    from tilewise._wording import pluralize

    if native is None:
        kernels = "none compiled: NumPy paths"
    else:
        kernels = f"{native.isa()} in use, of {', '.join(native.supported_isas())}"
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    typer.echo(f"tilewise {__version__}, {_wheel_tag()}")
    typer.echo(f"kernels: {kernels}")
    typer.echo(f"machine: {cpu_name()}, {pluralize(cores(), 'core')}, {system}")
    raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version, kernels and machine.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure tensor programs, learn which tile is fastest, and make a small tensor framework fast for real."""
