"""Train the ranker of unknown Triton kernels and store it in the package.

    python -m tools.ship_ranker gather --out groups.json                        # needs Triton, no GPU
    python -m tools.ship_ranker gather --foreign benchmarks/results/pinned_h200.json --out foreign.json
    python -m tools.ship_ranker train groups.json foreign.json [--ship]         # needs LightGBM

`gather` lowers kernels of our families and counts their work, for a sample of the measured configurations of the H200
collection; `--foreign` does so for the times that `benchmarks.pinned exhaustive` took. `train` prints what the first
choice reaches on foreign kernels that are held out; `--ship` stores the trees of all data.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import embedded_folder
from tilewise.gpu.devices import H200
from tilewise.gpu.pinning.ir import WorkSummary, summarize
from tilewise.gpu.pinning.ranker import FILE, KernelRanker, RankedCandidate, features, relative
from tilewise.io import save
from tilewise.store.problem import Problem
from tilewise.tune.families.registry import find_family
from tilewise.tune.families.space import space_of

# Problems to sample per family, and configurations per problem: random ones and the fastest.
PROBLEMS = {"matmul": 60, "batched_matmul": 30, "attention": 61, "layer_norm": 70, "rms_norm": 70, "reduction": 120,
            "softmax": 80}  # fmt: skip
RANDOM, FASTEST = 24, 6
TREES = {"objective": "regression", "num_leaves": 31, "learning_rate": 0.05, "min_data_in_leaf": 40, "seed": 1,
         "feature_fraction": 0.6, "bagging_fraction": 0.8, "bagging_freq": 1, "verbose": -1, "num_threads": 1,
         "deterministic": True, "force_row_wise": True}  # fmt: skip
ROUNDS = 200
FOLDS = 6  # of foreign kernels, each held out once


@dataclass(frozen=True)
class MeasuredGroup:
    """The candidates of one problem with their runtimes; `family` is what is held out together."""

    family: str
    candidates: list[RankedCandidate]
    runtime: list[float]
    best: float


def collection_groups(seed: int = 0) -> Iterator[MeasuredGroup]:
    """Lower kernels of our families for a sample of the collection."""
    import torch

    rng, texts = np.random.default_rng(seed), {}
    collection = read_collection(Path(embedded_folder()) / "h200.npz")
    extra = tuple(collection.schema.config_features)[24:]
    families: dict[str, list[Any]] = {}
    for one in itertools.chain.from_iterable(collection.splits.values()):
        families.setdefault(str(one.problem["family"]), []).append(one)
    for name, ones in families.items():
        family: Any = find_family("triton", name)
        for number in rng.permutation(len(ones))[: PROBLEMS[name]]:
            one = ones[number]
            problem = Problem({key: v if isinstance(v, str) else int(v) for key, v in one.problem.items()})
            configs = list(family.configs(problem))
            rows = space_of(configs).rows(family, problem, extra)
            by_row = {np.asarray(row, np.float32).tobytes(): c for row, c in zip(rows, configs, strict=True)}
            columns, runtime = np.asarray(one.kernel.config_feat, np.float32), np.asarray(one.kernel.runtime, float)
            sample = {*rng.permutation(len(runtime))[:RANDOM].tolist(), *np.argsort(runtime)[:FASTEST].tolist()}
            selection = [
                (by_row[columns[i].tobytes()], runtime[i]) for i in sorted(sample) if columns[i].tobytes() in by_row
            ]
            operands = family.operands(problem, torch, "meta", None)
            tensors = [*operands.inputs.values(), operands.out]
            unique = sum(float(t.numel() * t.element_size()) for t in tensors if hasattr(t, "numel"))
            candidates = [_family_candidate(family, problem, c, operands, texts, unique) for c, _ in selection]
            yield MeasuredGroup(name, candidates, [ns for _, ns in selection], float(runtime.min()))


def _family_candidate(
    family: Any, problem: Any, config: Any, operands: Any, texts: Any, unique: float
) -> RankedCandidate:
    """Describe a configuration of one of our own kernels."""
    from tilewise.gpu.measure.compiler import find_kernel
    from tilewise.gpu.pinning.ir import lower_source

    binary, launch = family.binary(problem, config), family.launch(problem, config, operands)
    function, constants = find_kernel(binary.kernel), dict(binary.constants)
    key = (binary.kernel, binary.signature, binary.constants)
    if key not in texts:
        types = dict(binary.signature)
        signature = {name: types.get(name, "constexpr") for name in function.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if signature[n][0] == "*"}
        texts[key] = lower_source(function, signature, constants, aligned, 90)
    names = [name for name in function.arg_names if name not in constants]
    integers = {n: v for n, v in zip(names, launch.arguments, strict=False) if isinstance(v, int)}
    integers |= {n: int(v) for n, v in constants.items() if isinstance(v, bool | int)}
    work = summarize(texts[key], integers, [size // 2 for size in launch.grid])
    return RankedCandidate(work, int(np.prod(launch.grid)), binary.num_warps, binary.num_stages, unique)


def foreign_groups(path: Path) -> Iterator[MeasuredGroup]:
    """Describe the kernels of `benchmarks.pinned` whose times are in a file."""
    from benchmarks.pinned_kernels import CASES
    from tilewise.gpu.pinning.choose import describe_candidates

    cases = {case.name: case for case in CASES}
    for row in json.loads(path.read_text()):
        case = cases[row["case"]]
        arguments, grid = case.make(tuple(row["problem"]), "meta")
        arguments_by_name = dict(zip(case.kernel.arg_names, arguments, strict=False))
        timings = [(c, us) for c, us in zip(case.kernel.configs, row["us"], strict=True) if us is not None]
        candidates = describe_candidates(case.kernel.fn, arguments_by_name, [c for c, _ in timings], grid)
        times = [us * 1e3 for _, us in timings]
        yield MeasuredGroup(f"foreign {case.name}", candidates, times, min(times))


def train(groups: Sequence[MeasuredGroup]) -> dict[str, Any]:
    """Fit both sets of trees and return their arrays."""
    import lightgbm

    tables = [features(group.candidates, H200) for group in groups]
    rows = np.concatenate([table for table, _ in tables])
    estimate = np.log(np.concatenate([seconds * 1e9 for _, seconds in tables]))
    runtime = [np.log(group.runtime) for group in groups]
    counts: dict[str, int] = {}
    for group in groups:
        counts[group.family] = counts.get(group.family, 0) + len(group.runtime)
    # Families and foreign kernels count alike, whatever their number of rows.
    weight = np.concatenate([np.full(len(g.runtime), 1 / counts[g.family]) for g in groups])
    weight /= weight.mean()
    differences = np.concatenate([relative(table) for table, _ in tables])
    ratio = lightgbm.train(TREES, lightgbm.Dataset(rows, np.concatenate(runtime) - estimate, weight=weight), ROUNDS)
    centred = np.concatenate([logs - logs.mean() for logs in runtime])
    compared = lightgbm.train(TREES, lightgbm.Dataset(differences, centred, weight=weight), ROUNDS)
    return {**flat_trees(ratio, "ratio"), **flat_trees(compared, "relative")}


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


def first_choices(groups: Sequence[MeasuredGroup], ranker: KernelRanker) -> list[float]:
    """Return the share of the best speed that the first choice of every group reaches."""
    choices = [int(np.argmin(ranker.scores(group.candidates, H200))) for group in groups]
    return [group.best / group.runtime[index] for group, index in zip(groups, choices, strict=True)]


def print_held_out(groups: Sequence[MeasuredGroup], folder: Path) -> None:
    """Print the mean and the least share of the best for kernels that were held out of the training."""
    families = sorted({group.family for group in groups if group.family.startswith("foreign")})
    order, shares = np.random.default_rng(0).permutation(len(families)), []
    for fold in range(FOLDS):
        held_out = {families[number] for number in order[fold::FOLDS]}
        save(train([group for group in groups if group.family not in held_out]), folder / "held_out.safetensors")
        inside = [group for group in groups if group.family in held_out]
        choices = first_choices(inside, KernelRanker(folder / "held_out.safetensors"))
        for family in sorted(held_out):
            own = [share for group, share in zip(inside, choices, strict=True) if group.family == family]
            print(f"{family:44} {np.mean(own):.3f} (least {min(own):.2f}) of {len(own)} problems", flush=True)
        shares += choices
    print(f"{len(families)} foreign kernels, {len(shares)} problems: {np.mean(shares):.3f} (least {min(shares):.2f})")


def main() -> int:
    """Gather groups, or train on a file of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("gather", "train"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("groups.json"))
    parser.add_argument("--foreign", type=Path)
    parser.add_argument("--ship", action="store_true")
    options = parser.parse_args()
    if options.command == "gather":
        groups = [*foreign_groups(options.foreign)] if options.foreign else [*collection_groups()]
        options.out.write_text(json.dumps([dataclasses.asdict(group) for group in groups]))
        return 0
    groups = [_read_group(group) for path in options.files for group in json.loads(path.read_text())]
    if options.ship:
        save(train(groups), FILE)
        print(f"{FILE.name}: first choices {np.mean(first_choices(groups, KernelRanker())):.3f} on the training data")
        return 0
    print_held_out(groups, options.out.parent)
    return 0


def _read_group(group: Any) -> MeasuredGroup:
    """Convert a group from JSON."""
    candidates = [
        RankedCandidate(WorkSummary(**{**one.pop("work")}), **one)
        for one in group["candidates"]
    ]  # fmt: skip
    return MeasuredGroup(group["family"], candidates, group["runtime"], group["best"])


if __name__ == "__main__":
    sys.exit(main())
