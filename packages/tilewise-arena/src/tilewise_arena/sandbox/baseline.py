"""The baseline of the open division as a plugin, so that it uses the same pipe as the entries.

It is also the shortest example of a plugin: a file with a function `load(event, folder)` that returns a function
from inputs to answers. Images come as (32, …) float32 and are answered with logits (32, 10); a prompt comes as (32,)
int64 and is answered with the 200 tokens after it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewise.bench.events import TinyMLPerf
from tilewise.bench.runner import baseline


def load(event: str, folder: Path) -> Callable[[Any], Any]:
    """Return a function that answers by the event's shipped model: float32, NumPy backend, no KV cache."""
    runner = baseline(TinyMLPerf.event(event))

    def answer(inputs: Any) -> Any:
        with runner.active():
            return runner.call(inputs)

    return answer
