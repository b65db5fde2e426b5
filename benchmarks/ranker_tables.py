"""Tables of the cost model on other people's collections, devices and logs."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.results_files import read_any, table

NOT_MEASURED = "not measured yet"
_KEYS = ("top1", "top5", "geometric1", "geometric5")


def foreign() -> str:
    """`--model auto` compared with its peers on collections of other shapes; the best of each column is not marked."""
    content = read_any("foreign")
    if not content:
        return f"{NOT_MEASURED}: `python -m benchmarks.foreign` writes it."
    cells = []
    for name, entry in content.items():
        choices = ", ".join(dict.fromkeys(run["auto"]["chosen"] for run in entry["runs"]))
        for model, row in entry["mean"].items():
            label = f"auto ({choices})" if model == "auto" else model
            errors = (f"{row[key]:.2f} %" if not math.isnan(row.get(key, math.nan)) else "" for key in _KEYS)
            cells.append((f"`{name}`", label, *errors, str(len(entry["runs"]))))
    headings = ("collection", "model", "top-1 error", "top-5", "top-1, geometric", "top-5, geometric", "seeds")
    return table(headings, cells)


def unseen() -> str:
    """`--model auto` with few train kernels, or a family that training lacked: `python -m benchmarks.unseen`."""
    content = read_any("unseen")
    if not content:
        return f"{NOT_MEASURED}: `python -m benchmarks.unseen` writes it."
    models = ("auto", "weighted sum", "TileRanker", "GBDT", "random")
    cells = []
    for name, runs in content["runs"].items():
        for part in sorted(runs[0]["errors"], reverse=True):
            errors_of = {m: [r["errors"][part][m][1] for r in runs if m in r["errors"][part]] for m in models}
            means = [f"{np.mean(errors):.2f} %" if errors else "" for errors in errors_of.values()]
            unfamiliar, count = np.sum([run["unfamiliar"][part] for run in runs], axis=0)
            flagged = f"{unfamiliar} of {count}"
            cells.append((f"`{name}`", part, *means, flagged, str(len(runs))))
    headings = ("collection", "families", *models[:-1], "five random picks", "unfamiliar", "seeds")
    return table(headings, cells)


def tile_peers() -> str:
    """Published ranking models on synthetic TPU kernels: `python -m benchmarks.tile_peers`."""
    results = read_any("tile_peers") or {}
    if "peers" not in results:
        return f"{NOT_MEASURED}: `python -m benchmarks.tile_peers` writes it."
    cells = []
    for name, row in results["peers"].items():
        errors = (_with_interval(*row[key], seeds=row["seeds"]) for key in ("top1", "top5"))
        above = "{:+.2f} ± {:.2f}".format(*row["above_ours"]) if "above_ours" in row else ""
        cells.append((name, *errors, above, f"{row['processor_seconds'][0]:.0f} s", str(row["seeds"])))
    cells.append(("chance", *(f"{results['chance'][key]:.2f} %" for key in ("top1", "top5")), "", "", ""))
    headings = ("model", "top-1 error", "top-5 error", "top-5 above TileRanker's", "processor time", "seeds")
    return table(headings, cells)


def _with_interval(mean: float, half: float, seeds: int) -> str:
    return f"{mean:.2f} ± {half:.2f} %" if seeds > 1 else f"{mean:.2f} %"


def tile_sample() -> str:
    """Real TPU kernels, each left out of training: `python -m benchmarks.tile_peers --sample FILE`."""
    results = (read_any("tile_peers") or {}).get("sample")
    if not results:
        return f"{NOT_MEASURED}: `python -m benchmarks.tile_peers --sample` writes it."
    cells = [
        (name, *(_with_interval(*row[key], seeds=row["seeds"]) for key in ("top1", "top5")), str(row["seeds"]))
        for name, row in results["models"].items()
    ]
    return table(("model", "top-1 error", "top-5 error", "seeds"), cells)


def train_devices() -> str:
    """Training on a GPU and on CPU threads of the same machine: `python -m benchmarks.train_devices`."""
    results = read_any("train_devices")
    if not results:
        return f"{NOT_MEASURED}: `python -m benchmarks.train_devices` writes it."
    machines, run = results["machine"], results["run"]
    rows = {
        "1,000 steps, default settings": {name: results["steps"][name] for name in machines},
        "1,000 steps, recipe `winners`": {name: results["wide steps"][name] for name in machines},
        "whole run, default settings": {name: run[name]["seconds"] for name in machines},
    }
    cells = [
        (title, *(f"{seconds:.2f} s" for seconds in row.values()), f"{row['cpu'] / row['cuda']:.1f}x")
        for title, row in rows.items()
    ]
    cells.append(("top-5 error on the test kernels", *(f"{run[name]['test top-5']:.2f} %" for name in machines), ""))
    return table((f"{results['kernels']:,} kernels", *machines.values(), "ratio"), cells)


def products() -> str:
    """The H200's model on another GPU's products: `python -m benchmarks.devices --products FILES`."""
    content = (read_any("devices") or {}).get("products")
    if not content:
        return f"{NOT_MEASURED}: `python -m benchmarks.devices --products` writes it into `devices.json`."
    cells = [
        (name, "{:.3f} ({:.3f} to {:.3f})".format(*mean))
        for name, mean in content["means"].items()
        if "over" not in name
    ]
    return table((f"{content['kernels']:,} products on an A100", "of the best (95 % interval)"), cells)
