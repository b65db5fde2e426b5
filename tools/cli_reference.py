"""Fill the page `cli.md` with every command, read from the command line itself: a hook of the documentation site."""

from __future__ import annotations

import inspect
from typing import Any

MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, reference()) if MARK in markdown else markdown


def reference() -> str:
    """Describe every command in Markdown, in the order of `tilewise --help`."""
    from tilewise.cli.app import command_line

    return "\n".join(line for name, command in leaves(command_line()) for line in section(name, command))


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """List the commands below a group with their full names."""
    if hasattr(command, "commands"):
        return [leaf for name, child in command.commands.items() for leaf in leaves(child, (*path, name))]
    return [(" ".join(path), command)]


def section(name: str, command: Any) -> list[str]:
    """Write the lines of one command: heading, text, example, and a table of its options."""
    lines = [f"## tilewise {name}", ""]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        text, _, example = paragraph.partition("Example: ")
        lines += [" ".join(text.split()), ""] if text.strip() else []
        if example:
            lines += ["```sh", *example.strip().split(", then, with the answers written: "), "```", ""]
    rows = [
        row(parameter)
        for parameter in command.params
        if not getattr(parameter, "hidden", False) and parameter.name != "help"
    ]
    return [*lines, "| | |", "|---|---|", *rows, ""] if rows else lines


def row(parameter: Any) -> str:
    """Describe an option or an argument: its spelling, its purpose, its default."""
    names = [*parameter.opts, *parameter.secondary_opts]
    spelling = ", ".join(names) if names[0].startswith("-") else names[0].upper()
    default = parameter.default
    default_text = (
        f" Default: `{default}`." if default not in (None, False, True, "", []) and not callable(default) else ""
    )
    return f"| `{spelling}` | {escape((parameter.help or '') + default_text)} |"


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
