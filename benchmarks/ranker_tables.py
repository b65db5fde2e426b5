"""Tables of the cost model on other people's collections, devices and logs."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.results_files import read_any, table

NOT_MEASURED = "not measured yet"


def foreign() -> str:
    """Top-5 errors of ranking models on collections of other shapes: `python -m benchmarks.tile_peers`."""
    collections = {name: entry for name, entry in _peer_collections().items() if name != "synthetic"}
    if not collections:
        return f"{NOT_MEASURED}: `python -m benchmarks.tile_peers` writes it."
    peers = list(dict.fromkeys(peer for entry in collections.values() for peer in entry["peers"]))
    cells = []
    for name, entry in collections.items():
        rows = [entry["peers"].get(peer) for peer in peers]
        cells.append(
            (f"`{name}`", *(_peer_cell(row) if row else "" for row in rows), f"{entry['chance']['top5']:.2f} %")
        )
    return table(("collection", *peers, "five random picks"), cells)


def _peer_cell(row: dict[str, Any]) -> str:
    """Format a model's top-5 error: its interval over seeds, or its paired difference from TileRanker's."""
    if "above_ours" in row:
        return "{:.2f} % ({:+.2f} ± {:.2f})".format(row["top5"][0], *row["above_ours"])
    return _with_interval(*row["top5"], seeds=row["seeds"])


def _peer_collections() -> dict[str, Any]:
    collections: dict[str, Any] = (read_any("tile_peers") or {}).get("collections", {})
    return collections


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


def reliability() -> str:
    """Confidences of `--model auto` on new kernels, and how often they are right: `python -m benchmarks.unseen`."""
    every = [run for runs in (read_any("unseen") or {"runs": {}})["runs"].values() for run in runs]
    if not any("confidences" in run for run in every):
        return f"{NOT_MEASURED}: `python -m benchmarks.unseen` writes it."
    cells = []
    for part in ("seen", "absent"):
        entries = [entry for run in every for entry in run.get("confidences", {}).get(part, [])]
        said = np.array([entry for entry in entries if entry is not None], float).reshape(-1, 2, 2)
        cells.append((part, "none", str(len(entries) - len(said)), *[""] * 5))
        for low in (0.0, 0.2, 0.4, 0.6, 0.8):
            high = 1.01 if low == 0.8 else low + 0.2
            groups = [c[(c[:, 0] >= low) & (c[:, 0] < high)] for c in (said[:, 0], said[:, 1])]
            if not any(map(len, groups)):
                continue
            means = [[f"{mean:.0%}" for mean in group.mean(axis=0)] if len(group) else ["", ""] for group in groups]
            figures = [cell for group, mean in zip(groups, means, strict=True) for cell in (str(len(group)), *mean)]
            cells.append((part, f"{low:.0%} to {low + 0.2:.0%}", *figures))
    facts = ("kernels", "said", "right")
    choices = [f"{choices}: {fact}" for choices in ("first choice", "first five") for fact in facts]
    return table(("families", "confidence", *choices), cells)


def tile_peers() -> str:
    """Published ranking models on synthetic TPU kernels: `python -m benchmarks.tile_peers synthetic`."""
    results = _peer_collections().get("synthetic")
    if results is None:
        return f"{NOT_MEASURED}: `python -m benchmarks.tile_peers synthetic` writes it."
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
