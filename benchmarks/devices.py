"""One kernel on several GPUs: a device is left out, and a ranker of the others must choose for it.

    python -m benchmarks.devices ../shared/data/t4/*.gz                    # Kernel Tuner's T4 files, one a device
    python -m benchmarks.devices ../shared/data/t4/*.gz --kernel-tuner     # and its strategies; needs kernel_tuner

A figure is the fastest configuration's time over the choice's: 1 is perfect. "Nearest" takes the order of the device
whose card is most alike. Five measurements go in the ranker's order, or one by one, the ranker adapted after each.
Twenty are drawn at random, the ranker is adapted to them once, and chooses, or has five more measured.

Strategies are scored as Kernel Tuner's methodology does: how far the best so far is from what random search has by
then, as a share of how far the optimum is, in the mean over the first twenty measurements and the spaces.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from tilewise.costmodel.models.adapted import LEAST_POINTS, adapt_model
from tilewise.costmodel.models.gbdt import GBDT, train_gbdt

RESULTS = Path(__file__).parent / "results" / "devices.json"
BUDGET, DRAWN, DRAWS, SEEDS = 20, 20, 3, 2
Scores = npt.NDArray[Any]


class Mean:
    """Several trained models as one."""

    name = "GBDT"

    def __init__(self, models: Sequence[GBDT]) -> None:
        self.models = models
        self._last: tuple[Any, Scores] | None = None

    def score(self, kernel: Kernel, rows: Any = None) -> Scores:
        if self._last is not None and self._last[0] is kernel.config_feat and rows is None:
            return self._last[1]
        scores = np.mean([model.score(kernel, rows) for model in self.models], axis=0)
        if rows is None and kernel.n_configs > BUDGET:
            self._last = (kernel.config_feat, scores)
        return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--kernel-tuner", action="store_true")
    options = parser.parse_args()
    kernels, schema = read(options.files)
    left_out, ours = {}, {}
    for number, kernel in enumerate(kernels):
        others = [k for i, k in enumerate(kernels) if i != number]
        left_out[kernel.program], ours[kernel.program] = leave_out(kernel, others, schema)
        print(kernel.program, {name: round(value, 3) for name, value in left_out[kernel.program].items()}, flush=True)
    found: dict[str, Any] = {"date": today(), "left_out": left_out}
    means = {n: _geometric([row[n] for row in left_out.values()]) for n in next(iter(left_out.values()))}
    print("geometric mean", {name: round(value, 3) for name, value in means.items()}, flush=True)
    curves = {"ours, from the other devices": [[ours[k.program]] for k in kernels]}
    found["curves"] = ours
    write_whole(RESULTS, json.dumps(found, indent=1) + "\n")
    if options.kernel_tuner:
        from benchmarks.kernel_tuner_peer import strategies

        curves |= strategies(kernels, schema, BUDGET)
    found["strategies"] = {name: scored(runs, kernels) for name, runs in curves.items()}
    for name, row in found["strategies"].items():
        print(f"{name}: score {row['score']:.3f}, reached {row['reached']:.3f}")
    write_whole(RESULTS, json.dumps(found, indent=1) + "\n")


def read(files: Sequence[Path]) -> tuple[list[Kernel], Schema]:
    """The files as one collection, a kernel for each device."""
    with tempfile.TemporaryDirectory() as folder:
        import_logs("kernel-tuner", files, Path(folder) / "all", split="train")
        data = load_dataset(Path(folder) / "all", cache_dir=Path(folder) / "cache", progress=False)
        return [dataclasses.replace(k, config_feat=np.array(k.config_feat)) for k in data.train], data.schema


def leave_out(kernel: Kernel, others: Sequence[Kernel], schema: Schema) -> tuple[dict[str, float], list[float]]:
    """What each way of choosing reaches on `kernel`, and the curve of measuring one by one."""
    width = len(DEVICE_COLUMNS)
    plain = Schema(schema.config_features[:-width])
    without = trained([_without(k, width) for k in others], plain)
    model = trained(others, schema)
    order = np.argsort(model.score(kernel), kind="stable")
    near = np.argsort(nearest(kernel, others, width), kind="stable")
    blind = np.argsort(without.score(_without(kernel, width)), kind="stable")
    steps = one_by_one(model, kernel, BUDGET)
    first, five = after_drawn(model, kernel)
    found = {
        "first": reached(kernel, order[:1]),
        "first, no cards": reached(kernel, blind[:1]),
        "first, nearest": reached(kernel, near[:1]),
        "five": reached(kernel, order[:5]),
        "five, no cards": reached(kernel, blind[:5]),
        "five, nearest": reached(kernel, near[:5]),
        "five, adapting": reached(kernel, steps[:5]),
        "20, adapting": reached(kernel, steps),
        "first after 20 drawn": first,
        "five after 20 drawn": five,
    }
    return found, [reached(kernel, steps[:k]) for k in range(1, BUDGET + 1)]


def trained(kernels: Sequence[Kernel], schema: Schema) -> Any:
    data = dataset_from_kernels(kernels, [], [], schema)
    return Mean([train_gbdt(data, seed, threads=1) for seed in range(SEEDS)])


def _without(kernel: Kernel, width: int) -> Kernel:
    return dataclasses.replace(kernel, config_feat=np.ascontiguousarray(kernel.config_feat[:, :-width]))


def nearest(kernel: Kernel, others: Sequence[Kernel], width: int) -> Scores:
    """The runtimes of the device most alike, for each configuration of `kernel`; what it has not comes last."""
    cards = np.log2(1.0 + np.stack([k.config_feat[0, -width:] for k in (kernel, *others)]))
    cards = (cards - cards.mean(axis=0)) / np.maximum(cards.std(axis=0), 1e-9)
    other = others[int(np.argmin(np.square(cards[1:] - cards[0]).sum(axis=1)))]
    times = {row.tobytes(): t for row, t in zip(other.config_feat[:, :-width], other.target, strict=True)}
    return np.array([times.get(row.tobytes(), math.inf) for row in kernel.config_feat[:, :-width]])


def one_by_one(model: Any, kernel: Kernel, budget: int) -> list[int]:
    """Always the best that is left, by the model adapted to all that was measured so far."""
    taken: list[int] = []
    scores = model.score(kernel)
    for _ in range(budget):
        taken.append(int(next(i for i in np.argsort(scores, kind="stable") if i not in taken)))
        if len(taken) >= LEAST_POINTS:
            scores = adapt_model(model, [some(kernel, taken)]).score(kernel)
    return taken


def after_drawn(model: Any, kernel: Kernel) -> tuple[float, float]:
    """First choice and best of five after twenty measurements at random, in the geometric mean over draws."""
    rows = []
    for seed in range(DRAWS):
        drawn = np.random.default_rng(seed).choice(kernel.n_configs, DRAWN, replace=False)
        order = np.argsort(adapt_model(model, [some(kernel, drawn)]).score(kernel), kind="stable")
        rows.append([reached(kernel, order[:k]) for k in (1, 5)])
    return _geometric([row[0] for row in rows]), _geometric([row[1] for row in rows])


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
