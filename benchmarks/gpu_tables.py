"""The tables of docs/gpu.md: products compared with cuBLAS and a peer, and products inside `torch.compile`."""

from __future__ import annotations

import json
from statistics import geometric_mean as gmean
from typing import Any

from benchmarks.compiled import OURS, WAYS, compare_ways, read_compiled
from benchmarks.recorded import NAMES, compare_methods, read_recorded
from benchmarks.recorded import table as compared
from benchmarks.results_files import RESULTS, table
from tilewise.gpu.products.runtime_model import shipped_runtime_model

_HEADINGS = ("products", "number", "best kernel measured", "first choice", "five measurements",
             "nvMatmulHeuristics, first", "the same, five")  # fmt: skip
_SHOWN = {
    "aten": "ATen",
    "default": "torch.compile",
    "as-it-comes": "max-autotune as it comes",
    "nvmatmul": "nvMatmulHeuristics",
    "autoheuristic": "AutoHeuristic",
    "steps": "tilewise, long rows in steps",
}


def products() -> str:
    """Build the table of speeds relative to cuBLAS, by kind: geometric mean, and the minimum in brackets."""
    path, model = RESULTS / "products_h200.json", shipped_runtime_model()
    if not path.is_file() or model is None:
        return ""
    rows = compared(model, read_recorded(path))
    cells = [[f"{row[name]:.3f} ({row[name + '_least']:.2f})" for name in NAMES] for row in rows]
    return table(
        _HEADINGS, [[row["kind"], str(row["products"]), *speeds] for row, speeds in zip(rows, cells, strict=True)]
    )


def ways() -> str:
    """Build the table of schedules: where each is fastest, and how much longer the others take there."""
    paths = [RESULTS / f"products_{which}h200.json" for which in ("earlier_", "")]
    recorded = [product for path in paths if path.is_file() for product in read_recorded(path)]
    if not recorded:
        return ""
    cells = [[row["way"], str(row["products"]), f"{row['mean']:.3f} ({row['most']:.2f})"]
             for row in compare_methods(recorded)]  # fmt: skip
    return table(("method", "fastest in", "time of the other methods there: geometric mean (most)"), cells)


def serving_new_shapes() -> str:
    """Build the table of the shipped ranker's choices on shapes that were timed for the first time."""
    return serving("new_shape")


def serving(shapes: str = "shape") -> str:
    """Build the table of unmeasured choices for serving kernels on shapes that were left out of training."""
    rows = _serving_results(shapes)
    kinds = {"fused MoE, bf16": lambda row: row["experts"] and row["dtype"] == "bf16",
             "fused MoE, FP8": lambda row: row["experts"] and row["dtype"] != "bf16" and not row["block_scaled"],
             "fused MoE, block FP8": lambda row: row["experts"] and row["block_scaled"],
             "block-FP8 products": lambda row: not row["experts"], "all": lambda row: True}  # fmt: skip
    cells = []
    for kind, belongs in kinds.items():
        members = [row for row in rows if belongs(row)]
        ratios = [[row[name] / row["ours"] for row in members if name in row] for name in ("tuned", "default")]
        best = [1 / row["ours"] for row in members]
        cells.append(
            [kind, str(len(members)), *(f"{gmean(values):.3f} ({min(values):.2f})" for values in (best, *ratios))]
        )
    return table(("kernels", "problems", "fastest measured", "vLLM's tuned row", "vLLM's default rule"), cells)


def left_out_gpus() -> str:
    """Build the table of the share of tuned rows whose tile is found on GPUs that were left out of training."""
    rows = _serving_results("device")
    cells = [[name.replace("_", " "), str(row["rows"]), f"{row['first']:.0%}", f"{row['five']:.0%}"]
             for name, row in rows.items()]  # fmt: skip
    means = [f"{sum(row[name] for row in rows.values()) / len(rows):.1%}" for name in ("first", "five")]
    cells.append(["mean over GPUs", str(sum(row["rows"] for row in rows.values())), *means])
    return table(("GPU left out", "tuned rows", "tile is our first", "among our first five"), cells)


def _serving_results(by: str) -> Any:
    return json.loads((RESULTS / "serving.json").read_text(encoding="utf-8"))[by]


def compiled() -> str:
    """Build the table of `torch.compile` with every way of choosing."""
    return _compiled("inductor_h200.json")


def training() -> str:
    """Build the table that decided to keep long rows in registers: blocks of other models, and single kernels."""
    return _compiled("inductor_training_h200.json")


def exhaustive() -> str:
    """Build the table with PyTorch's exhaustive search."""
    return _compiled("inductor_exhaustive_h200.json")


def _compiled(name: str) -> str:
    """Build a table of microseconds per run and seconds of the first call for every way of compiling."""
    path = RESULTS / name
    if not path.is_file():
        return ""
    rows = read_compiled(path)
    ways = [way for way in (*WAYS, OURS) if any(way in row.us for row in rows)]
    cells = [[row.name, *(_cell(row.us.get(way), row.seconds.get(way)) for way in ways)] for row in rows]
    against = {comparison.way: comparison for comparison in compare_ways(rows)}
    cells.append(["runtime / tilewise's: geometric mean (least), problems", *(
        f"{against[way].runs:.3f} ({against[way].least:.2f}), {against[way].problems}" if way in against
        else "1" if way == OURS else ""
        for way in ways)])  # fmt: skip
    cells.append(["first call / tilewise's: geometric mean (all together)", *(
        f"{against[way].first_call:.1f} ({against[way].all_calls:.1f})" if way in against and against[way].first_call
        else "1" if way == OURS else "" for way in ways)])  # fmt: skip
    return table(("problem", *(_SHOWN.get(way, way) for way in ways)), cells)


def _cell(microseconds: float | None, seconds: float | None) -> str:
    if microseconds is None:
        return ""
    return f"{microseconds:.1f} µs" + (f", {seconds:.1f} s" if seconds else "")
