"""`--model auto` where it has little to go by: few train kernels, or a family of kernels that training lacked.

    python -m benchmarks.unseen                       # every collection that the results lack
    python -m benchmarks.unseen h200-20 autotvm-no-batch_matmul --seeds 2
    python -m benchmarks.unseen --familiarity         # only which kernels are taken for unfamiliar; trains nothing

A small collection has 10, 20 or 40 kernels, a fifth of them for validation, and is tested on 40 others, because eight
test kernels say little. "no-X" is a collection of up to 120 kernels without the family X, tested on kernels of X and of
the other families. Every run draws other kernels by its seed, and trains once: "weighted sum" adds the scores of the
members that `auto` fuses by rank, the others are its members. Intervals are over runs. The confidences of `auto` are
recorded for every test kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.autotvm_logs import FAMILIES, logs
from benchmarks.harness import today
from benchmarks.standins import (
    IMPLICIT_NAMES,
    OPENCL_NAMES,
    TEMPLATE_NAMES,
    embedded,
    implicit_conv,
    opencl_gemm,
    simulated,
    template_conv,
)
from course.synthetic_tiles import synthetic_dataset
from tilewise._atomic import write_atomic
from tilewise.costmodel.confidence_fit import WITHIN
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import OPCODES
from tilewise.costmodel.data.tpu_tiles import read_tiles
from tilewise.costmodel.features.ranker import heaviest_node, kernel_sizes
from tilewise.costmodel.metrics import random_top_k_error, top_k_error
from tilewise.costmodel.models.blend import Blend, Familiarity
from tilewise.costmodel.ranking import rank
from tilewise.costmodel.training.auto import train_auto

RESULTS = Path(__file__).parent / "results" / "unseen.json"
FIRST_SEED = 960  # smaller ones were looked at when the rules and features were chosen
_TESTS, _ABSENT, _TRAIN = 40, 25, 120
_ALL = 1 << 20  # more kernels than any collection has


def _every(data: Dataset) -> list[Kernel]:
    return [kernel for split in (data.train, data.valid, data.test) for kernel in split]


def _source(name: str, seed: int, kernels: int) -> Dataset:
    """Draw at least `kernels` kernels of one source; their splits do not matter."""
    if name == "tpu":
        return synthetic_dataset(kernels, 1, 1, seed=seed)
    if name in ("h200", "cpu"):
        return embedded(name, (), _ALL, seed, rename=True)
    make, names, gpu, configs = {
        "template-conv": (template_conv, TEMPLATE_NAMES, 0, 500),
        "opencl-gemm": (opencl_gemm, OPENCL_NAMES, 1, 500),
        "implicit-conv": (implicit_conv, IMPLICIT_NAMES, 2, 300),
    }[name]
    return simulated(make, names, gpu, kernels, configs, seed)


def small(source: str, count: int) -> Callable[[int], Dataset]:
    """Return a function from a seed to a collection of `count` kernels to learn from and 40 others to test on."""

    def draw(seed: int) -> Dataset:
        data = _source(source, seed, count + _TESTS)
        every = _every(data)
        order = np.random.default_rng(seed).permutation(len(every))[: count + _TESTS]
        drawn, valid = [every[i] for i in order], max(1, count // 5)
        return dataset_from_kernels(drawn[valid:count], drawn[:valid], drawn[count:], data.schema)

    return draw


def family(kernel: Kernel) -> str:
    """Name what a kernel computes: the task of a log, a TPU tile's operation, or the heaviest operation."""
    if kernel.program.endswith("cuda-cuda"):
        return kernel.program.partition(".")[0].replace("-", "_")
    if kernel.config_feat.shape[1] == 24:
        reading = read_tiles(kernel.node_feat, kernel.node_opcode, kernel.edge_index, kernel.config_feat)
        return f"{reading.operation}{len(reading.output.sizes)}"
    rank = np.count_nonzero(kernel_sizes(kernel)[6:12])
    return f"{OPCODES[int(kernel.node_opcode[heaviest_node(kernel)])]}{rank}"


def without(source: str, absent: str) -> Callable[[int], Dataset]:
    """Return a function from a seed to a collection that lacks a family in training, and has it among its tests."""

    def draw(seed: int) -> Dataset:
        if source == "autotvm":
            return logs(seed, next(name for name in FAMILIES if name.startswith(absent)))
        data = embedded("h200", (), _ALL, seed, rename=False) if source == "h200" else _source(source, seed, 4 * _TRAIN)
        every = _every(data)
        kernels = [every[i] for i in np.random.default_rng(seed).permutation(len(every))]
        families: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            families.setdefault(family(kernel), []).append(kernel)
        parts: tuple[list[Kernel], ...] = ([], [], families.pop(absent)[:_ABSENT])
        share = _TRAIN // len(families)  # of every other family
        for members in families.values():
            size = min(share, len(members) * 3 // 4)
            parts[1].extend(members[: size // 5])
            parts[0].extend(members[size // 5 : size])
            parts[2].extend(members[size : size + 10])
        return dataset_from_kernels(*parts, data.schema)

    return draw


SMALL = {
    f"{source}-{count}": small(source, count)
    for count in (10, 20, 40)
    for source in ("h200", "cpu", "template-conv", "opencl-gemm", "implicit-conv", "tpu")
}
ABSENT = {
    f"{source}-no-{absent}": without(source, absent)
    for source, families in {
        "autotvm": ("batch_matmul", "dense", "conv2d"),
        "h200": ("dot2", "dot3", "dot4", "reduce1"),
        "tpu": ("contraction4", "reduction4", "loop4"),
    }.items()
    for absent in families
}
COLLECTIONS = SMALL | ABSENT


def familiarity(data: Dataset) -> dict[str, list[int]]:
    """Count the unfamiliar test kernels and all test kernels, of families in the train split and of others."""
    seen, known = {family(kernel) for kernel in data.train}, Familiarity.fit(list(data.train))
    counts = {"seen": [0, 0], "absent": [0, 0]}
    for kernel in data.test:
        entry = counts["seen" if family(kernel) in seen else "absent"]
        entry[0] += known.distance(kernel) > 1
        entry[1] += 1
    return counts


def run_once(data: Dataset, seed: int) -> dict[str, Any]:
    """Return mean top-1 and top-5 errors in per cent of every model, and auto's confidences, by part of the tests.

    A confidence is an entry [said for one choice, right, said for five, right], null for an unfamiliar kernel.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        auto = train_auto(data, out_dir=folder, seed=seed, device="cpu", progress=False)
    models = {"auto": auto, "weighted sum": Blend(auto.models, auto.weights)}
    for model in auto.models:
        models.setdefault(model.name, model)
    seen, rows, confidences = {family(kernel) for kernel in data.train}, {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kernel in data.test:
            kind = "seen" if family(kernel) in seen else "absent"
            part, ranking = rows.setdefault(kind, {}), rank(auto, kernel)
            near = [top_k_error(kernel.target, ranking.scores, k) <= WITHIN for k in (1, 5)]
            said = ranking.confidence_top1, ranking.confidence_top5
            confidences.setdefault(kind, []).append(None if None in said else [said[0], near[0], said[1], near[1]])
            for name, model in models.items():
                scores = model.score(kernel)
                part.setdefault(name, []).append([top_k_error(kernel.target, scores, k) for k in (1, 5)])
            part.setdefault("random", []).append([random_top_k_error(kernel.target, k) for k in (1, 5)])
    errors = {
        part: {n: [round(100 * float(x), 3) for x in np.mean(v, 0)] for n, v in row.items()}
        for part, row in rows.items()
    }
    facts = {"seed": seed, "chosen": auto.name, "unfamiliar": familiarity(data)}
    return facts | {"errors": errors, "confidences": confidences}


def summarize(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return lines with the ratio of every model's top-5 error to the weighted sum's, for each part."""
    lines = []
    for part, names in (("seen", SMALL), ("seen", ABSENT), ("absent", ABSENT)):
        errors = [r["errors"][part] for name in names for r in runs.get(name, []) if part in r["errors"]]
        for model in ("auto", "TileRanker", "GBDT", "random"):
            # Ratios need a floor: many errors are 0. A tenth of a per cent is below every measurement's noise.
            ratios = [np.log((e[model][1] + 0.1) / (e["weighted sum"][1] + 0.1)) for e in errors if model in e]
            if len(ratios) > 1:
                half = 1.96 * np.std(ratios, ddof=1) / len(ratios) ** 0.5
                low, mean, high = np.exp(np.mean(ratios) + half * np.array([-1, 0, 1]))
                kind = "small" if names is SMALL else part
                interval = f"{mean:.2f} ({low:.2f} to {high:.2f})"
                lines.append(f"{kind:7s} {model:10s} {interval} of the weighted sum's, {len(ratios)} runs")
    return lines


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("collections", nargs="*", default=list(COLLECTIONS))
    flags.add_argument("--seeds", type=int, default=1)
    flags.add_argument("--familiarity", action="store_true")
    flags.add_argument("--out", type=Path, default=RESULTS)
    options = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    for name in options.collections:
        for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
            runs = json.loads(options.out.read_text())["runs"] if options.out.is_file() else {}
            if options.familiarity:
                print(f"{name:26s} seed {seed} {familiarity(COLLECTIONS[name](seed))}", flush=True)
            elif seed not in [run["seed"] for run in runs.get(name, [])]:
                run = run_once(COLLECTIONS[name](seed), seed)
                runs = json.loads(options.out.read_text())["runs"] if options.out.is_file() else {}
                runs.setdefault(name, []).append(run)
                write_atomic(options.out, json.dumps({"date": today(), "runs": runs}, indent=1) + "\n")
                print(f"{name:26s} seed {seed} {run['errors']}", flush=True)
    if not options.familiarity:
        print("\n".join(summarize(runs)))


if __name__ == "__main__":
    main()
