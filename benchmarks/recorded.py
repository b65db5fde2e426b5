"""Products measured on a GPU, kept as a file: how the model's choices do beside the library's and a peer's, replayed.

`python3 -m tilewise.tune.triton.check --recorded FILE` prints the table without a GPU. A row is a product that the
model never saw; its columns are the library's time over that of the best kernel measured, of the unmeasured choice, of
the best of five measurements, and of a peer's first answer and best of five (always beside the library, as ours).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._files import read_json_input
from tilewise.errors import FileFormatError, TilewiseError
from tilewise.gpu.devices import H200
from tilewise.gpu.products.config_fields import CUBLAS
from tilewise.gpu.products.dispatch import KERNELS_TO_MEASURE, required_gain
from tilewise.gpu.products.family import ProductFamily
from tilewise.gpu.products.runtime_model import RuntimeModel
from tilewise.store.problem import Config, Problem

_FAMILY, _SHARED_BYTES = ProductFamily(), H200.shared_bytes_per_block
_LONGEST_NS = 10**12
NAMES = ("space", "first", "five", "peer_first", "peer_five")


@dataclass(frozen=True)
class Product:
    """One product: its kind, what was measured of it, and what a peer would have measured."""

    kind: str
    problem: Problem
    configs: tuple[Config, ...]  # the library first
    runtime_ns: tuple[int, ...]
    answers: tuple[Config, ...]


def read_recorded(path: str | os.PathLike[str]) -> list[Product]:
    """The products of a file that `as_json` made."""
    content = read_json_input(Path(path))
    try:
        fields = content["fields"]
        return [
            _checked(
                str(one["kind"]),
                Problem(one["problem"]),
                (CUBLAS, *(_config(fields, row) for row in one["configs"])),
                tuple(one["runtime_ns"]),
                tuple(_config(fields, row) for row in one["answers"]),
            )
            for one in content["products"]
        ]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, TilewiseError) as error:
        why = " ".join(str(error).split())[:200]
        raise FileFormatError(f"{path} holds no recorded products ({type(error).__name__}: {why}).") from error


def _checked(
    kind: str, problem: Problem, configs: tuple[Config, ...], runtime_ns: tuple[int, ...], answers: tuple[Config, ...]
) -> Product:
    """A product whose sizes, settings and times can be reckoned with."""
    if dict(_FAMILY.problem(dict(problem))) != dict(problem):
        raise ValueError("a problem with other settings than a product has")
    if len(runtime_ns) != len(configs) or not all(type(t) is int and 0 < t < _LONGEST_NS for t in runtime_ns):
        raise ValueError("a runtime that is none, or not one for each configuration")
    for config in (*configs[1:], *answers):
        if not all(type(value) is int and 0 <= value < 1 << 20 for value in config.values()):
            raise ValueError("a configuration that is not of whole numbers")
    misfits = [_FAMILY.misfit(problem, config, _SHARED_BYTES) for config in configs[1:]]
    if None not in misfits:
        raise ValueError("no configuration that could run")
    return Product(kind, problem, configs, runtime_ns, answers)


def _config(fields: Sequence[str], row: Sequence[int]) -> Config:
    return Config(dict(zip(fields, row, strict=True)))


def as_json(products: Sequence[Product], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Products as a file holds them: settings as rows of numbers under one list of names."""
    fields = sorted({name for one in products for config in one.configs[1:] for name in config})
    return {
        "machine": dict(machine),
        "fields": fields,
        "products": [
            {
                "kind": one.kind,
                "problem": dict(one.problem),
                "configs": [[config.size(name) for name in fields] for config in one.configs[1:]],
                "runtime_ns": list(one.runtime_ns),
                "answers": [[config.size(name) for name in fields] for config in one.answers],
            }
            for one in products
        ],
    }


def compare(model: RuntimeModel, product: Product) -> dict[str, float]:
    """The columns of one product."""
    times = np.array(product.runtime_ns, np.float64)
    predicted = model.predict(product.problem, product.configs)
    fitting = np.array([_FAMILY.misfit(product.problem, config, _SHARED_BYTES) is None for config in product.configs])
    order = np.argsort(np.where(fitting, predicted.seconds, np.inf)[1:], kind="stable")
    kernels = 1 + order[: int(fitting[1:].sum())]
    best = kernels[0]
    gain = math.log(predicted.seconds[0] / predicted.seconds[best])
    sure = gain >= required_gain(product.problem, math.hypot(predicted.deviation[0], predicted.deviation[best]))
    answers = [product.configs.index(config) for config in product.answers if config in product.configs]
    chosen = {
        "space": times[kernels].min(),
        "first": times[best] if sure else times[0],
        "five": min(times[0], times[kernels[:KERNELS_TO_MEASURE]].min()),
        "peer_first": times[answers[0]] if answers else times[0],
        "peer_five": min([times[0], *times[answers[:KERNELS_TO_MEASURE]]]),
    }
    return {name: float(times[0] / taken) for name, taken in chosen.items()}


def table(model: RuntimeModel, products: Sequence[Product]) -> list[dict[str, Any]]:
    """Geometric means and the least of every column, by kind and over all."""
    rows = [(product.kind, compare(model, product)) for product in products]
    found = []
    for kind in (*sorted({kind for kind, _ in rows}), "all"):
        members = [row for of, row in rows if kind in (of, "all")]
        means = {name: math.exp(sum(math.log(row[name]) for row in members) / len(members)) for name in NAMES}
        least = {f"{name}_least": min(row[name] for row in members) for name in NAMES}
        found.append({"kind": kind, "products": len(members), **means, **least})
    return found


def way_of(config: Config) -> str:
    """How a kernel is run: `plain`, `persistent`, K in `parts`, or the tiles of the last wave alone (`tail`)."""
    if config.get("tail", 0):
        return "tail"
    if config.size("parts") > 1:
        return "parts"
    return "persistent" if config.size("persistent") else "plain"


def worth(products: Sequence[Product]) -> list[dict[str, Any]]:
    """Of each way to run a kernel: in how many products it is the fastest, and how much longer the fastest of the other
    ways takes in those, the mean and the most."""
    best: list[dict[str, int]] = []
    for product in products:
        times: dict[str, int] = {}
        for config, ns in zip(product.configs[1:], product.runtime_ns[1:], strict=True):
            times[way_of(config)] = min(ns, times.get(way_of(config), _LONGEST_NS))
        best.append(times)
    found = []
    for way in ("plain", "persistent", "parts", "tail"):
        won = [times for times in best if way in times and min(times, key=times.__getitem__) == way]
        longer = [min(ns for of, ns in times.items() if of != way) / times[way] for times in won if len(times) > 1]
        mean = math.exp(sum(map(math.log, longer)) / len(longer)) if longer else 1.0
        found.append({"way": way, "products": len(won), "mean": mean, "most": max(longer, default=1.0)})
    return found


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table as text: the mean of each column, and the least in brackets."""
    found = [f"{'':10}{'products':>9}" + "".join(f"{name.replace('_', ' '):>15}" for name in NAMES)]
    for row in rows:
        cells = "".join(f"{row[name]:8.3f} ({row[name + '_least']:.2f})" for name in NAMES)
        found.append(f"{row['kind']:10}{row['products']:>9}{cells}")
    return found


def worth_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What `worth` says, as text."""
    return [f"{row['way']}: fastest in {row['products']} products, where the other ways take {row['mean']:.3f} times "
            f"as long (most {row['most']:.2f})" for row in rows]  # fmt: skip
