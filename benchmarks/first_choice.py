"""Times an unmeasured choice of a tile: list the candidates, score them with the shipped model, take the best.

    python -m benchmarks.first_choice [--shapes 100] [--seed 3] [--configs 500]

For each family, random shapes are chosen for the first time, on one thread. The first pair of columns is the cost in a
program (the family's own candidates, including listing them), the second the cost for `--configs` configurations.
Integer products and GPU kernels have no shorter list than their whole search space, which is built once and cached.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

import tilewise
from tilewise.costmodel.models.files import shipped_file
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.decide import decide
from tilewise.tune.choose.scores import ModelScores, file_scores, shipped_scores
from tilewise.tune.families.registry import find_family
from tilewise.tune.families.space import ConfigTable, space_of
from tilewise.tune.measure.cpu.device import CpuDevice

Sizes = dict[str, tuple[int, int]]  # a range each
PRODUCT: Sizes = {"m": (64, 2048), "n": (64, 2048), "k": (64, 2048)}
IMAGE: Sizes = {
    "batch": (1, 32), "channels": (16, 256), "height": (14, 64), "width": (14, 64), "filters": (16, 256),
    "kernel": (3, 3), "stride": (1, 1), "padding": (1, 1),
}  # fmt: skip
HEADS: Sizes = {"batch": (1, 8), "heads": (4, 16), "queries": (128, 2048), "keys": (128, 2048), "head": (64, 64)}
ROWS: Sizes = {"rows": (64, 8192), "cols": (64, 8192)}
FAMILIES = [
    ("cpu", "matmul", PRODUCT), ("cpu", "conv2d", IMAGE), ("cpu", "int8_matmul", PRODUCT),
    ("triton", "matmul", PRODUCT), ("triton", "attention", HEADS), ("triton", "softmax", ROWS),
    ("triton", "layer_norm", ROWS),
]  # fmt: skip


def draw(family: str, sizes: Sizes, rng: np.random.Generator) -> dict[str, int | str]:
    logs = {name: rng.uniform(np.log(low), np.log(high)) for name, (low, high) in sizes.items()}
    return {"family": family, **{name: round(np.exp(value)) for name, value in logs.items()}}


def so_many(configs: Sequence[Config], count: int) -> Sequence[Config]:
    """The list cut to a length, or gone through again until it is reached."""
    return tuple(itertools.islice(itertools.cycle(configs), count))


def as_table(configs: Sequence[Config]) -> ConfigTable:
    space = space_of(configs)
    return ConfigTable(space.names, np.stack([space.size(name) for name in space.names], axis=1))


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


class Cpu:
    """Lists as the framework's chooser has them: rows of numbers, built for each shape."""

    def __init__(self) -> None:
        self.device = CpuDevice()
        scores, reason = shipped_scores(self.device.collection, self.device.machine.identity)
        if scores is None:
            raise SystemExit(reason)
        self.model: ModelScores = scores

    def problem(self, spec: dict[str, int | str]) -> Problem:
        return self.device.problem({**spec, "threads": 1})

    def first_configs(self, problem: Problem) -> Sequence[Config]:
        own = self.device.candidates(problem)
        return own if len(own) > 1 else self.device.configs(problem)

    def many(self, problem: Problem, count: int) -> Sequence[Config]:
        return as_table(so_many(self.device.configs(problem), count))


class Triton:
    """Lists as `autotune` has them: the same tuple for every shape."""

    def __init__(self) -> None:
        self.model = file_scores(shipped_file("h200"), "triton", 0.0)
        self.first_lists: dict[int, tuple[Sequence[Config], Sequence[Config]]] = {}  # a list and its first ones

    def problem(self, spec: dict[str, int | str]) -> Problem:
        problem: Problem = find_family("triton", str(spec["family"])).problem(spec)
        return problem

    def first_configs(self, problem: Problem) -> Sequence[Config]:
        configs: Sequence[Config] = find_family("triton", problem.family).configs(problem)
        return configs

    def many(self, problem: Problem, count: int) -> Sequence[Config]:
        own = self.first_configs(problem)
        return self.first_lists.setdefault(id(own), (own, so_many(own, count)))[1]


def measure(side: Cpu | Triton, problems: Sequence[Problem], count: int) -> str:
    own, many, lengths = [], [], []
    for problem in problems:

        def choose(p: Problem = problem) -> None:
            configs = side.first_configs(p)
            decide(p, configs, side.model.rank(p, configs))

        own.append(milliseconds(choose))
        lengths.append(len(side.first_configs(problem)))
    for problem in problems:
        configs = side.many(problem, count)
        many.append(milliseconds(lambda p=problem, c=configs: decide(p, c, side.model.rank(p, c))))  # type: ignore[misc]
    words = [f"{int(np.median(lengths)):>10}"]
    for times in (own, many):
        words += [f"{np.median(times):>9.2f}", f"{np.quantile(times, 0.9):>9.2f}"]
    return "".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--configs", type=int, default=500, help="length of the second list")
    options = parser.parse_args()
    tilewise.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    sides: dict[str, Cpu | Triton] = {"cpu": Cpu(), "triton": Triton()}
    print("milliseconds, median and nine tenths")
    print(f"{'':20}{'candidates':>10}{'own list':>18}{f'{options.configs} configurations':>18}")
    for kind, family, sizes in FAMILIES:
        side = sides[kind]
        problems = [side.problem(draw(family, sizes, rng)) for _ in range(options.shapes)]
        print(f"{kind + ' ' + family:20}{measure(side, problems, options.configs)}", flush=True)


if __name__ == "__main__":
    main()
