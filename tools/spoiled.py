"""Templates of PyTorch's compiler made to crash, to hang or to compute something else, before any of them is compiled.

For `tools.smoke_inductor`: what a user's run must never see is put in on purpose, into the text of the kernel.
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
    """A kernel's text with the fault in it."""
    if how == "is wrong":
        return source.replace("tl.dot(a, b", "tl.dot(a + a, b")
    lines = "".join(f"    {line}\n" for line in _LINES[how])
    return re.sub(r"(?m)^def triton_\w+\(.*\):\n", lambda found: found.group() + lines, source, count=1)


@contextlib.contextmanager
def spoiled(how: str, most: int = 64) -> Iterator[list[str]]:
    """The first `most` templates of every list have the fault; gives the names of those that were changed."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.select_algorithm import add_preprocessing_fn, get_algorithm_selector_cache

    changed: list[str] = []

    def change(choices: list[Any]) -> list[Any]:
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

    add_preprocessing_fn(change)
    try:
        yield changed
    finally:
        get_algorithm_selector_cache().preprocessing_fns.remove(change)
