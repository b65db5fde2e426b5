"""How help looks: plain text in sections, one for each kind of command.

Typer's own panels are prettier, but loading what draws them takes longer than everything else that help needs.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Sections(TyperGroup):
    """A group whose help lists its commands under the headings that they were registered with."""

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


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
