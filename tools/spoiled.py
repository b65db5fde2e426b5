"""Inject faults into the templates of PyTorch's compiler: crashes, endless loops and wrong results.

`tools.smoke_inductor` uses this to show that a faulty template never reaches a user's run. The fault is written into
the text of the kernel before it is compiled.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LINES = {
    "crashes": ("tl.store(out_ptr0 + tl.full([], 1 << 40, tl.int64), 0.0)",),
    "hangs": ("spin = tl.load(arg_A, volatile=True).to(tl.float32)", "while spin < 1e30:",
              "    spin = tl.load(arg_A, volatile=True).to(tl.float32)"),
}  # fmt: skip


def spoil(source: str, how: str) -> str:
    """Insert a fault into a kernel's text."""
    if how == "is wrong":
        return source.replace("tl.dot(a, b", "tl.dot(a + a, b")
    lines = "".join(f"    {line}\n" for line in _LINES[how])
    return re.sub(r"(?m)^def triton_\w+\(.*\):\n", lambda match: match.group() + lines, source, count=1)


@contextlib.contextmanager
def spoiled(how: str, most: int = 64) -> Iterator[list[str]]:
    """Insert a fault into the first `most` templates, and yield the names of those that were changed."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.select_algorithm import add_preprocessing_fn, get_algorithm_selector_cache

    changed: list[str] = []

    def insert_faults(choices: list[Any]) -> list[Any]:
        """Rewrite the source files of the templates before they are compiled."""
        for choice in choices:
            path = getattr(getattr(choice, "bmreq", None), "module_path", None)
            if path is None or len(changed) >= most:
                continue
            before = Path(path).read_text()
            after = spoil(before, how)
            if after != before:
                Path(path).write_text(after)
                PyCodeCache.modules_no_attr.pop(path, None)
                changed.append(choice.name)
        return choices

    add_preprocessing_fn(insert_faults)
    try:
        yield changed
    finally:
        get_algorithm_selector_cache().preprocessing_fns.remove(insert_faults)
