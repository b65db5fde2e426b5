"""Layout models on synthetic graphs held out of training: Kendall's tau of the baseline, the better model and chance.

    python -m benchmarks.layout                                     # four collections, three seeds
    python -m benchmarks.layout xla:random --seeds 5 --models LayoutSAGE

Runtimes come from a formula (`tilewise.costmodel.layout.synthetic`): the table shows that the models learn what hangs
on a graph's structure, and says nothing about TPUs. A seed draws new graphs and new initial weights; an interval is
that of Student's t over seeds. Every run is written when it ends, and one that is there already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import today
from tilewise._atomic import write_atomic
from tilewise.costmodel.layout import COLLECTIONS, LayoutDataset, synthetic_graph
from tilewise.costmodel.metrics import kendall_tau, over_seeds

RESULTS = Path(__file__).parent / "results" / "layout.json"
COUNTS = {"train": 32, "valid": 8, "test": 16}
NODES, CONFIGS = 64, 200
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LayoutSAGE": ("LayoutSAGE", {}),
    "LayoutMPNN": ("LayoutMPNN", {}),
}


def draw_dataset(collection: str, seed: int) -> LayoutDataset:
    source, search = collection.split(":")
    splits = {
        split: [
            synthetic_graph(
                f"{split}{i}", (seed * 3 + n) * 1009 + i, source=source, search=search, nodes=NODES, configs=CONFIGS
            )
            for i in range(count)
        ]
        for n, (split, count) in enumerate(COUNTS.items())
    }
    return LayoutDataset(collection, **splits)


def run_once(data: LayoutDataset, model: str, seed: int) -> dict[str, float]:
    if model == "chance":
        rng = np.random.default_rng(seed)
        return {"tau": float(np.mean([kendall_tau(g.target(), rng.random(g.n_configs)) for g in data.test]))}
    from tilewise.costmodel.layout import train_layouts
    from tilewise.costmodel.layout.trained import evaluate_layouts

    name, kwargs = MODELS[model]
    used = time.process_time()
    trained = train_layouts(data, name, seed=seed, model_kwargs=kwargs, device="cpu", progress=False)
    used = time.process_time() - used
    tau = evaluate_layouts({model: trained}, data.test)[model]["tau"].mean
    return {"tau": tau, "processor_seconds": used}


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("collections", nargs="*", default=list(COLLECTIONS))
    flags.add_argument("--models", default=None, help="separated by semicolons")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--out", type=Path, default=RESULTS)
    options = flags.parse_args()

    import torch

    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for seed in range(options.seeds):
        for collection in options.collections:
            data = draw_dataset(collection, seed)
            for model in options.models.split(";") if options.models else ("chance", *MODELS):
                runs = results.setdefault("runs", {}).setdefault(collection, {}).setdefault(model, {})
                if str(seed) not in runs:
                    runs[str(seed)] = run_once(data, model, seed)
                    results |= {"date": today(), "graphs": COUNTS, "nodes": NODES, "configurations": CONFIGS}
                    write_atomic(options.out, json.dumps(results, indent=1) + "\n")
                mean = over_seeds([run["tau"] for run in runs.values()]).mean
                print(
                    f"{collection:12s} {model:36s} seed {seed}: {runs[str(seed)]['tau']:.3f}, mean {mean:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
