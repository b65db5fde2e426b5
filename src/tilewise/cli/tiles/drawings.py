"""Pictures of a cost model: its learning curve, and its errors compared with baselines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.cli.pictures import BLUE, GREY, RED, picture

if TYPE_CHECKING:
    from tilewise.costmodel.evaluation import Evaluation

_PANELS = {
    "loss": ("train_loss", "val_loss"),
    "ordered pairs": ("train_opa", "val_opa"),
    "error": ("val_top1", "val_top5"),
}


def draw_curve(record: Mapping[str, Any], path: Path) -> None:
    """Draw the learning curve in a model's record: loss and metrics over epochs, the best epoch marked."""
    with picture(path, 9, 3.2, columns=len(_PANELS)) as panels:
        for axes, (title, keys) in zip(panels, _PANELS.items(), strict=True):
            for key in keys:
                points = [(row["epoch"] + 1, row[key]) for row in record["curve"] if row.get(key) is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), label=key.replace("_", " "))
            axes.axvline(record.get("best_epoch", -1) + 1, color=GREY, linestyle=":", label="kept")
            axes.set(title=title, xlabel="epoch")
            axes.legend()


def draw_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Draw the top-1 and top-5 error of every row with intervals, and the noise ceiling as a line."""
    with picture(path, 9, 0.5 * len(evaluation.rows) + 1.6, columns=2) as panels:
        for axes, metric in zip(panels, ("top1", "top5"), strict=True):
            rows = [(row.name, row.metrics[metric]) for row in reversed(evaluation.rows) if metric in row.metrics]
            means = [100 * interval.mean for _, interval in rows]
            error_bars = zip(*((100 * abs(f.mean - f.low), 100 * abs(f.high - f.mean)) for _, f in rows), strict=True)
            axes.barh([name for name, _ in rows], means, xerr=list(error_bars), color=BLUE)
            axes.set_xscale("symlog", linthresh=1.0)
            axes.set_xlabel(f"top-{metric[3:]} error, % slower than the best")
            if metric in evaluation.ceiling:
                axes.axvline(100 * evaluation.ceiling[metric], color=RED, linestyle="--", label="noise ceiling")
                axes.legend(loc="lower right")
        panels[0].figure.suptitle(
            f"{evaluation.split}: {evaluation.kernels} kernels, {evaluation.configs} configurations"
        )
