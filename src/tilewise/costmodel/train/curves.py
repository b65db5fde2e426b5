"""The learning curve of a run as a picture: loss and validation metrics over epochs, the kept epoch marked."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise._files import write_whole


def plot_curve(record: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the curve in a model's record."""
    from matplotlib.figure import Figure

    curve = record.get("curve") or []
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = (
        ("loss", ("train_loss", "val_loss")),
        ("ordered pairs", ("train_opa", "val_opa")),
        ("error", ("val_top1", "val_top5")),
    )
    for place, (title, keys) in enumerate(panels):
        axes = figure.add_subplot(1, 3, place + 1)
        for key in keys:
            points = [(row["epoch"] + 1, row[key]) for row in curve if row.get(key) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=key.replace("_", " "))
        axes.axvline(record.get("best_epoch", -1) + 1, color="#999999", linestyle=":", label="kept")
        axes.set_title(title)
        axes.set_xlabel("epoch")
        axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    write_whole(path, content.getvalue())
