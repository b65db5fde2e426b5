"""Train the ranker of unknown Triton kernels and store it in the package.

    python -m tools.ship_ranker gather --out groups.json              # needs Triton, no GPU
    python -m tools.ship_ranker train --out groups.json [--ship]      # needs LightGBM

`gather` lowers the kernels of `benchmarks.pinned` and counts their work; their times and their machine code were
recorded on an H200. `train` prints what the choices reach on kernels that are held out; `--ship` stores the trees of
all kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.gpu.devices import H200
from tilewise.gpu.pinning.choose import MAX_COMPILED, MAX_SPILLS
from tilewise.gpu.pinning.ir import WorkSummary
from tilewise.gpu.pinning.machine_code import MachineWork, machine_features
from tilewise.gpu.pinning.ranker import COMPILED, FILE, SETS, KernelRanker
from tilewise.gpu.pinning.work_features import RankedCandidate, features, relative
from tilewise.io import save

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TREES = {"objective": "regression", "num_leaves": 31, "learning_rate": 0.05, "min_data_in_leaf": 40, "seed": 1,
         "feature_fraction": 0.6, "bagging_fraction": 0.8, "bagging_freq": 1, "verbose": -1, "num_threads": 1,
         "deterministic": True, "force_row_wise": True}  # fmt: skip
ROUNDS = 200
FOLDS, SEEDS = 6, 3  # of kernels, each held out once for every seed


@dataclass(frozen=True)
class MeasuredGroup:
    """The candidates of one problem with their machine code and runtimes in ns."""

    kernel: str
    candidates: list[RankedCandidate]
    compiled: list[MachineWork]
    runtime: list[float]


def measured_groups() -> Iterator[MeasuredGroup]:
    """Describe the configurations of `benchmarks.pinned` that were timed."""
    from benchmarks.pinned_kernels import CASES
    from tilewise.gpu.pinning.choose import describe_candidates

    cases = {case.name: case for case in CASES}
    rows = json.loads((RESULTS / "pinned_h200.json").read_text())
    machine_code = json.loads(lzma.decompress((RESULTS / "pinned_h200.compiled.json.xz").read_bytes()))
    for row, compiled in zip(rows, machine_code, strict=True):
        case = cases[row["case"]]
        arguments, grid = case.make(tuple(row["problem"]), "meta")
        by_name = dict(zip(case.kernel.arg_names, arguments, strict=False))
        ran = [number for number, us in enumerate(row["us"]) if us is not None]
        candidates = describe_candidates(case.kernel.fn, by_name, [case.kernel.configs[number] for number in ran], grid)
        works = [MachineWork(*compiled["compiled"][number]) for number in ran]
        yield MeasuredGroup(case.name, candidates, works, [row["us"][number] * 1e3 for number in ran])


def train(groups: Sequence[MeasuredGroup]) -> dict[str, Any]:
    """Fit the trees without and with machine code and return their arrays."""
    import lightgbm

    tables = [features(group.candidates, H200) for group in groups]
    estimate = np.log(np.concatenate([seconds * 1e9 for _, seconds in tables]))
    logs = [np.log(group.runtime) for group in groups]
    ratio, centred = np.concatenate(logs) - estimate, np.concatenate([one - one.mean() for one in logs])
    counts: Counter[str] = Counter()
    for group in groups:
        counts[group.kernel] += len(group.runtime)
    # Kernels count alike, whatever their number of rows.
    weight = np.concatenate([np.full(len(g.runtime), 1 / counts[g.kernel]) for g in groups])
    weight /= weight.mean()
    plain = [table for table, _ in tables]
    with_code = [
        np.hstack([table, machine_features(group.candidates, group.compiled, H200)])
        for table, group in zip(plain, groups, strict=True)
    ]
    arrays: dict[str, Any] = {}
    for prefix, rows in (("", plain), (COMPILED, with_code)):
        for name, inputs, goal in zip(SETS, (rows, [relative(one) for one in rows]), (ratio, centred), strict=True):
            data = lightgbm.Dataset(np.concatenate(inputs), goal, weight=weight)
            arrays |= flat_trees(lightgbm.train(TREES, data, ROUNDS), f"{prefix}{name}")
    return arrays


def flat_trees(booster: Any, name: str) -> dict[str, Any]:
    """Convert LightGBM's trees to flat arrays; children come behind their parent."""
    nodes: list[list[float]] = []  # feature or -1, threshold, left, right, value
    roots = []

    def add(node: Any) -> int:
        index = len(nodes)
        nodes.append([-1, 0.0, 0, 0, float(node.get("leaf_value", 0.0))])
        if "split_feature" in node:
            nodes[index][:2] = [node["split_feature"], node["threshold"]]
            nodes[index][2] = add(node["left_child"])
            nodes[index][3] = add(node["right_child"])
        return index

    for tree in booster.dump_model()["tree_info"]:
        roots.append(add(tree["tree_structure"]))
    table = np.array(nodes)
    columns = {"feature": np.int16, "threshold": np.float32, "left": np.int32, "right": np.int32, "value": np.float32}
    arrays = {f"{name}.{part}": table[:, i].astype(dtype) for i, (part, dtype) in enumerate(columns.items())}
    return {**arrays, f"{name}.root": np.array(roots, np.int32)}


def speeds(group: MeasuredGroup, ranker: KernelRanker) -> tuple[float, float]:
    """Return the share of the best speed that the choice reaches, and the first one without a look at machine code."""
    order = np.argsort(ranker.scores(group.candidates, H200), kind="stable")
    first = [i for i in order if group.compiled[i].spills <= MAX_SPILLS][:MAX_COMPILED] or [order[0]]
    scores = ranker.scores([group.candidates[i] for i in first], H200, [group.compiled[i] for i in first])
    best = min(group.runtime)
    return best / group.runtime[first[int(np.argmin(scores))]], best / group.runtime[first[0]]


def print_held_out(groups: Sequence[MeasuredGroup], folder: Path) -> None:
    """Print the mean and the least share of the best for kernels that were held out of the training."""
    kernels = sorted({group.kernel for group in groups})
    by_kernel: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        order, shares = np.random.default_rng(seed).permutation(len(kernels)), []
        for fold in range(FOLDS):
            held_out = {kernels[number] for number in order[fold::FOLDS]}
            save(train([group for group in groups if group.kernel not in held_out]), folder / "held_out.safetensors")
            ranker = KernelRanker(folder / "held_out.safetensors")
            for group in groups:
                if group.kernel in held_out:
                    shares.append(speeds(group, ranker))
                    by_kernel.setdefault(group.kernel, []).append(shares[-1][0])
        reached, first = np.array(shares).T
        low = int((reached < 0.85).sum())
        print(f"seed {seed}: {reached.mean():.4f} (least {reached.min():.2f}; {low} of {len(reached)} below 0.85)")
        print(f"    by work alone {first.mean():.4f} (least {first.min():.2f})", flush=True)
    for kernel, values in sorted(by_kernel.items(), key=lambda item: np.mean(item[1])):
        print(f"{kernel:40} {np.mean(values):.3f} (least {min(values):.2f})")


def main() -> int:
    """Gather groups, or train on a file of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("gather", "train"))
    parser.add_argument("--out", type=Path, default=Path("groups.json"))
    parser.add_argument("--ship", action="store_true")
    options = parser.parse_args()
    if options.command == "gather":
        options.out.write_text(json.dumps([dataclasses.asdict(group) for group in measured_groups()]))
        return 0
    groups = [_read_group(group) for group in json.loads(options.out.read_text())]
    if options.ship:
        save(train(groups), FILE)
        ranker = KernelRanker()
        print(f"{FILE.name}: {np.mean([speeds(group, ranker)[0] for group in groups]):.3f} on the training data")
        return 0
    print_held_out(groups, options.out.parent)
    return 0


def _read_group(group: Any) -> MeasuredGroup:
    """Convert a group from JSON."""
    candidates = [RankedCandidate(WorkSummary(**one.pop("work")), **one) for one in group["candidates"]]
    compiled = [MachineWork(**one) for one in group["compiled"]]
    return MeasuredGroup(group["kernel"], candidates, compiled, group["runtime"])


if __name__ == "__main__":
    sys.exit(main())
