"""One kernel on several GPUs: a device is left out, and a ranker of the others must choose for it.

    python -m benchmarks.devices ../shared/data/t4/*.gz                    # Kernel Tuner's T4 files, one a device
    python -m benchmarks.devices ../shared/data/t4/*.gz --kernel-tuner     # its strategies beside that

A figure is the fastest configuration's time over the choice's: 1 is perfect. The ranker is boosted trees; "with cards"
are the same with the devices' columns, "nearest" the order of the device whose card is most alike. Five and twenty
measurements go in the ranker's order, or one by one as `next_to_measure` says. "Constants chosen apart" takes those of
its process that are best on the other devices, each left out in turn. "Drawn" are twenty at random, to which the ranker
is adapted; it then chooses, or has five more measured. Intervals are bootstrap ones over the devices.

Strategies are scored as Kernel Tuner's methodology does: how far the best so far is from what random search has by
then, as a share of how far the optimum is, in the mean over the first twenty measurements and the spaces.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import today
from tilewise._files import write_whole
from tilewise.costmodel.data.dataset import dataset_from_kernels, load_dataset
from tilewise.costmodel.data.devices import DEVICE_COLUMNS
from tilewise.costmodel.data.importers import import_logs
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.models.adapted import Likeness, adapt_model, next_to_measure
from tilewise.costmodel.models.gbdt import GBDT, train_gbdt

RESULTS = Path(__file__).parent / "results" / "devices.json"
BUDGET, DRAWS, SEEDS = 20, 3, 3
WIDTH = len(DEVICE_COLUMNS)
CONSTANTS = [Likeness(*values) for values in itertools.product((0.2, 0.4, 0.8), (1.0, 2.0, 4.0), (0.25, 0.5, 1.0))]
OURS = "tilewise, from the other devices"
Scores = npt.NDArray[Any]


class Mean:
    """Several trained models as one, which remembers the scores of the kernel it was asked about last."""

    name = "GBDT"

    def __init__(self, models: Sequence[GBDT]) -> None:
        self.models = models
        self.preparation = models[0].preparation
        self._last: tuple[Any, Scores] | None = None

    def score(self, kernel: Kernel, rows: Any = None) -> Scores:
        if rows is not None:
            return np.asarray(np.mean([model.score(kernel, rows) for model in self.models], axis=0))
        if self._last is None or self._last[0] is not kernel.config_feat:
            scores = np.mean([model.score(kernel) for model in self.models], axis=0)
            self._last = (kernel.config_feat, scores)
        return self._last[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--kernel-tuner", action="store_true", help="score its strategies beside the run recorded")
    options = parser.parse_args()
    kernels, schema = read(options.files)
    if options.kernel_tuner:
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
        beside_strategies(found, [without_cards(k) for k in kernels], schema)
    else:
        found = every_device(kernels, schema)
    write_whole(RESULTS, json.dumps(found, indent=1) + "\n")


def every_device(kernels: Sequence[Kernel], schema: Schema) -> dict[str, Any]:
    """Each device left out in turn."""
    constants = chosen_apart([without_cards(k) for k in kernels], schema)
    rows, curves = {}, {}
    for number, kernel in enumerate(kernels):
        others = [k for i, k in enumerate(kernels) if i != number]
        rows[kernel.program], curves[kernel.program] = leave_out(kernel, others, schema, constants[number])
        print(kernel.program, {name: round(value, 3) for name, value in rows[kernel.program].items()}, flush=True)
    names = list(next(iter(rows.values())))
    means = {name: interval([row[name] for row in rows.values()]) for name in names}
    for name, (mean, low, high) in means.items():
        print(f"{name}: {mean:.3f} ({low:.3f} to {high:.3f})", flush=True)
    apart = {k.program: dataclasses.asdict(c) for k, c in zip(kernels, constants, strict=True)}
    near = {k.program: int((k.target < 1.1 * k.target.min()).sum()) for k in kernels}
    return {"date": today(), "left_out": rows, "means": means, "constants": apart, "within_10": near, "curves": curves}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean, and where 95 in 100 of such means of the devices drawn anew lie."""
    logs = np.log(values)
    drawn = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(axis=1)
    low, high = np.exp(np.percentile(drawn, [2.5, 97.5]))
    return float(np.exp(logs.mean())), float(low), float(high)


def chosen_apart(kernels: Sequence[Kernel], schema: Schema) -> list[Likeness]:
    """For each kernel the constants that are best on all others, by rankers that saw neither."""
    count = len(kernels)
    reach = np.zeros((count, count, len(CONSTANTS)))  # of the second, for a choice that is to serve the first
    for one, two in itertools.combinations(range(count), 2):
        model = trained([k for i, k in enumerate(kernels) if i not in (one, two)], schema, seeds=1)
        for served, asked in ((one, two), (two, one)):
            curves = [one_by_one(model, kernels[asked], BUDGET, likeness)[1] for likeness in CONSTANTS]
            reach[served, asked] = np.log(curves).mean(axis=1)
    return [CONSTANTS[int(row.sum(axis=0).argmax())] for row in reach]


def read(files: Sequence[Path]) -> tuple[list[Kernel], Schema]:
    """The files as one collection, a kernel for each device, with the columns of the cards."""
    with tempfile.TemporaryDirectory() as folder:
        import_logs("kernel-tuner", files, Path(folder) / "all", split="train", device_columns=True)
        data = load_dataset(Path(folder) / "all", cache_dir=Path(folder) / "cache", progress=False)
        return [dataclasses.replace(k, config_feat=np.array(k.config_feat)) for k in data.train], data.schema


def leave_out(
    kernel: Kernel, others: Sequence[Kernel], schema: Schema, apart: Likeness
) -> tuple[dict[str, float], list[float]]:
    """What each way of choosing reaches on `kernel`, and the curve of measuring one by one."""
    told = trained(others, schema)
    cards = np.argsort(told.score(kernel), kind="stable")
    near = np.argsort(nearest(kernel, others), kind="stable")
    model, plain = trained([without_cards(k) for k in others], schema), without_cards(kernel)
    order = np.argsort(model.score(plain), kind="stable")
    curve = one_by_one(model, plain, BUDGET)[1]
    apart_curve = one_by_one(model, plain, BUDGET, apart)[1]
    first, five = after_drawn(model, plain)
    found = {
        "first": reached(kernel, order[:1]),
        "first, with cards": reached(kernel, cards[:1]),
        "first, nearest": reached(kernel, near[:1]),
        "five, in order": reached(kernel, order[:5]),
        "five, with cards": reached(kernel, cards[:5]),
        "five, nearest": reached(kernel, near[:5]),
        "five, one by one": curve[4],
        "five, constants chosen apart": apart_curve[4],
        "20, in order": reached(kernel, order[:20]),
        "20, nearest": reached(kernel, near[:20]),
        "20, one by one": curve[19],
        "20, constants chosen apart": apart_curve[19],
        "first after 20 drawn": first,
        "five after 20 drawn": five,
    }
    return found, curve


def trained(kernels: Sequence[Kernel], schema: Schema, seeds: int = SEEDS) -> Any:
    width = kernels[0].config_feat.shape[1]
    data = dataset_from_kernels(kernels, [], [], Schema(schema.config_features[:width]))
    return Mean([train_gbdt(data, seed, threads=1) for seed in range(seeds)])


def without_cards(kernel: Kernel) -> Kernel:
    return dataclasses.replace(kernel, config_feat=np.ascontiguousarray(kernel.config_feat[:, :-WIDTH]))


def nearest(kernel: Kernel, others: Sequence[Kernel]) -> Scores:
    """The runtimes of the device most alike, for each configuration of `kernel`; what it has not comes last."""
    cards = np.log2(1.0 + np.stack([k.config_feat[0, -WIDTH:] for k in (kernel, *others)]))
    cards = (cards - cards.mean(axis=0)) / np.maximum(cards.std(axis=0), 1e-9)
    other = others[int(np.argmin(np.square(cards[1:] - cards[0]).sum(axis=1)))]
    times = {row.tobytes(): t for row, t in zip(other.config_feat[:, :-WIDTH], other.target, strict=True)}
    return np.array([times.get(row.tobytes(), math.inf) for row in kernel.config_feat[:, :-WIDTH]])


def one_by_one(
    model: Any, kernel: Kernel, budget: int, likeness: Likeness | None = None, begun: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """What is measured when each measurement decides on the next, and what the best so far reaches."""
    taken = list(begun)
    while len(taken) < budget:
        taken.append(next_to_measure(model, kernel, taken, kernel.target[taken], likeness))
    return taken, [reached(kernel, taken[: k + 1]) for k in range(budget)]


def after_drawn(model: Any, kernel: Kernel) -> tuple[float, float]:
    """First choice, and best of five more, after twenty measurements at random: geometric means over draws."""
    rows = []
    for seed in range(DRAWS):
        drawn = np.random.default_rng(seed).choice(kernel.n_configs, BUDGET, replace=False)
        order = np.argsort(adapt_model(model, [some(kernel, drawn)]).score(kernel), kind="stable")
        taken, _ = one_by_one(model, kernel, BUDGET + 5, begun=[int(row) for row in drawn])
        rows.append([reached(kernel, order[:1]), reached(kernel, taken)])
    return _geometric([row[0] for row in rows]), _geometric([row[1] for row in rows])


def beside_strategies(found: dict[str, Any], kernels: Sequence[Kernel], schema: Schema) -> None:
    """Kernel Tuner's strategies, scored beside the curves that were recorded."""
    from benchmarks.kernel_tuner_peer import strategies

    curves = {OURS: [[found["curves"][k.program]] for k in kernels]} | strategies(kernels, schema, BUDGET)
    found["strategies"] = {name: scored(runs, kernels) for name, runs in curves.items()}
    for name, row in found["strategies"].items():
        print(f"{name}: score {row['score']:.3f}, reached {row['reached']:.3f}")


def some(kernel: Kernel, rows: Any) -> Kernel:
    cut = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **cut)


def reached(kernel: Kernel, rows: Any) -> float:
    return float(kernel.target.min() / kernel.target[rows].min())


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def scored(curves: Sequence[Sequence[Sequence[float]]], kernels: Sequence[Kernel]) -> dict[str, float]:
    """A strategy's curves (space, run, measurement) of the fastest time over the best so far."""
    scores, last = [], []
    for runs, kernel in zip(curves, kernels, strict=True):
        best = float(kernel.target.min())
        drawn = expected_by_chance(kernel.target, BUDGET)
        times = np.mean([[best / value for value in run] for run in runs], axis=0)
        scores.append(float(np.mean((drawn - times) / (drawn - best))))
        last.append(_geometric([run[-1] for run in runs]))
    return {"score": float(np.mean(scores)), "reached": _geometric(last)}


def expected_by_chance(target: Scores, budget: int) -> Scores:
    """The expected best of k drawn without replacement, for k up to `budget`."""
    t, n = np.sort(target), len(target)
    places = np.arange(n)
    expected = []
    for k in range(1, budget + 1):
        # The i-th fastest is the best of k when the others are among the n - 1 - i slower ones.
        logs = _log_choose(n - 1 - places, k - 1) - _log_choose(np.array([n]), k)
        expected.append(float((t * np.exp(logs)).sum()))
    return np.array(expected)


def _log_choose(n: Any, k: int) -> Any:
    log_factorial: Callable[[Any], Any] = np.vectorize(lambda value: math.lgamma(value + 1), otypes=[float])
    inside = n >= k
    safe = np.where(inside, n, k)
    return np.where(inside, log_factorial(safe) - math.lgamma(k + 1) - log_factorial(safe - k), -np.inf)


if __name__ == "__main__":
    main()
