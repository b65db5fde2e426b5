"""A hook of the documentation site: examples in docstrings (lines after `>>>`) are shown as code, not as quotations."""

from __future__ import annotations

import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

_EXAMPLE = re.compile(r"^(\s*)(>>> |\.\.\. )")


class _Fence(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        """Fence each example from its first prompt to the next empty line."""
        out: list[str] = []
        inside = fenced = False
        for line in lines:
            fenced ^= line.lstrip().startswith("```")
            if not inside and not fenced and _EXAMPLE.match(line):
                inside = True
                out.append("```pycon")
            elif inside and not line.strip():
                inside = False
                out += ["```", ""]
                continue
            out.append(line)
        return [*out, "```"] if inside else out


class DoctestBlocks(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Fence(md), "doctest_blocks", 30)


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(DoctestBlocks())
    return config
