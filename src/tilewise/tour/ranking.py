"""Second stop: the shipped models rank the tiles of held-out kernels and write their predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.costmodel.course.predictions import write_predictions
from tilewise.costmodel.data.dataset import load_dataset
from tilewise.costmodel.evaluation import evaluate
from tilewise.costmodel.models.files import shipped_names
from tilewise.costmodel.models.scorer import shipped_scorer
from tilewise.costmodel.ranking import rank
from tilewise.tour.stops import Bars, Stop, Table, Visit


def ranking_stop(visit: Visit) -> Stop:
    """Compare each shipped model with baselines on its test kernels, and write predictions_NAME.csv."""
    facts: dict[str, Any] = {}
    rows, charts, lines = [], [], []
    for name in shipped_names():
        visit.say(f"ranking the held-out kernels of {name}")
        scorer, dataset = shipped_scorer(name), load_dataset(name, progress=False)
        table = evaluate({"shipped model": scorer}, dataset, "test")
        errors = {row.name: {k: row.metrics[k].mean for k in ("top1", "top5")} for row in table.rows}
        facts[name] = {"kernels": len(dataset.test), "configurations": dataset.test.n_configs, "errors": errors}
        rows += [
            (f"{name}: {who}", f"{100 * e['top1']:.1f} %", f"{100 * e['top5']:.1f} %") for who, e in errors.items()
        ]
        first = {who: 100 * e["top1"] for who, e in errors.items()}
        charts.append(Bars(f"Time lost by taking the first choice, {name}", "% slower than the best tile", first))
        path = visit.folder / f"predictions_{name}.csv"
        write_predictions(path, {kernel.name: rank(scorer, kernel).order for kernel in dataset.test})
        facts[name]["predictions"] = path.name
        if errors["shipped model"]["top1"] > errors.get("default configuration", {"top1": np.inf})["top1"]:
            lines.append(
                f"On {name}, the first choice is no better than the default configuration, which was made for this "
                "kind of machine; measuring the five best is where the model helps."
            )
        lines.append(
            f"{len(dataset.test)} kernels of programs it has not seen, {dataset.test.n_configs:,} configurations "
            f"measured ({name}); its five best of each are in {path.name}."
        )
    largest = max((value for chart in charts for value in chart.values.values()), default=None)
    charts = [replace(chart, largest=largest) for chart in charts]
    headings = ("how much slower than the best tile", "first choice", "best of five")
    meaning = (
        "A kernel works on its matrices tile by tile: blocks small enough to stay in fast memory. Their size changes "
        "nothing in the result, and a lot in the time. Measuring every size takes minutes; the model ranks them all in "
        "milliseconds, without running one. Shorter bars are better."
    )
    return Stop("Which tile is fastest? Ranked without running", facts, lines, [Table(headings, rows)], charts, meaning)
