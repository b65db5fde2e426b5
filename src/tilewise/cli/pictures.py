"""Matplotlib pictures in the style of the tour's report."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from typer import echo

from tilewise._atomic import write_atomic

BLUE, RED, GREY = "#2a6fb5", "#b5482a", "#8a8f98"
_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "grid.color": "#d9dde3",
    "legend.frameon": False,
}


class _BlankAxes:
    """Accepts every drawing call and draws nothing."""

    def __getattr__(self, name: str) -> _BlankAxes:
        return self

    def __call__(self, *_arguments: Any, **_settings: Any) -> _BlankAxes:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def can_draw() -> bool:
    """Tell whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


@contextmanager
def picture(path: Path, width: float = 9.0, height: float = 4.8, columns: int = 1) -> Iterator[Any]:
    """Yield axes, or a row of `columns` axes; when the block ends, write the picture to `path` atomically.

    Without matplotlib nothing is drawn, and a note says how to install it: the numbers that were measured count more.
    """
    if not can_draw():
        echo(f"{path} was not drawn: pictures need matplotlib, pip install 'tilewise[plots]'.", err=True)
        yield _BlankAxes() if columns == 1 else [_BlankAxes() for _ in range(columns)]
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
        try:
            yield axes
            content = io.BytesIO()
            kind = path.suffix.lower().lstrip(".") or "png"
            figure.savefig(content, format=kind if kind in ("png", "svg", "pdf") else "png", dpi=130)
        finally:
            plt.close(figure)
    write_atomic(path, content.getvalue())
