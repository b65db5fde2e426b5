"""What a compiled network promises about memory, for tests of plans and of quantized networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise._extension import native


def assert_passes_allocate_nothing(compiled: Callable[[Any], Any], x: Any, passes: int) -> None:
    """Neither the library's own memory grows after the third pass, nor is more of it in use for a moment."""
    assert native is not None
    for _ in range(3):
        compiled(x)
    before = native.memory_in_use()
    native.reset_memory_peak()
    for _ in range(passes):
        compiled(x)
    assert native.memory_in_use() == before
    assert native.memory_peak() <= before
