"""A hook of the documentation site: the page `cli.md` gets every command, read off the command line itself."""

from __future__ import annotations

import inspect
from typing import Any

MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, reference()) if MARK in markdown else markdown


def reference() -> str:
    """Every command as Markdown, in the order of `tilewise --help`."""
    from tilewise.cli.app import command_line

    return "\n".join(part for name, command in leaves(command_line()) for part in section(name, command))


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    if hasattr(command, "commands"):
        return [leaf for name, child in command.commands.items() for leaf in leaves(child, (*path, name))]
    return [(" ".join(path), command)]


def section(name: str, command: Any) -> list[str]:
    text, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    lines = [f"## tilewise {name}", "", " ".join(text.split()), ""]
    if example:
        lines += ["```sh", *example.strip().split(", then, with the answers written: "), "```", ""]
    rows = [row(parameter) for parameter in command.params if parameter.name not in ("help", "quiet")]
    return [*lines, "| | |", "|---|---|", *rows, ""] if rows else lines


def row(parameter: Any) -> str:
    """An option or an argument: how it is written, what it is for, what it is unless given."""
    names = [*parameter.opts, *parameter.secondary_opts]
    written = ", ".join(names) if names[0].startswith("-") else names[0].upper()
    default = parameter.default
    shown = f" Default: `{default}`." if default not in (None, False, True, "", []) and not callable(default) else ""
    return f"| `{written}` | {escape((parameter.help or '') + shown)} |"


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
