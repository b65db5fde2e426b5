"""How help looks: plain text in sections, one for each kind of command.

Typer's own panels are prettier, but loading what draws them takes longer than everything else that help needs.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from tilewise._addons import provider_of
from tilewise.errors import UnavailableError


class Sections(TyperGroup):
    """A group whose help lists its commands under the headings that they were registered with."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command; for one of an add-on that is not installed, say what to install."""
        command = super().get_command(ctx, cmd_name)
        if command is None and (addon := provider_of(_typed(ctx, cmd_name))):
            raise UnavailableError(f"`tilewise {_typed(ctx, cmd_name)}` comes with {addon}: pip install {addon}")
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
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
    """The command as typed after `tilewise`: `compete serve`."""
    return f"{ctx.command_path} {name}".partition(" ")[2]


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
