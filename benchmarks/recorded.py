"""Recorded measurements of matrix products: the model's choices compared with cuBLAS and with a peer's.

`python3 -m tilewise.tune.triton.check --recorded FILE` prints the table without a GPU. A row is a product that the
model was not trained on. Its columns are cuBLAS's time over that of the best kernel measured, of the unmeasured choice,
of the best of five measurements, and of a peer's first answer and best of five (cuBLAS included, as in ours).
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
from tilewise.gpu.products.dispatch import KERNELS_TO_MEASURE
from tilewise.gpu.products.family import ProductFamily, supports_tma
from tilewise.gpu.products.roofline import CUBLAS, SPLIT_K, STREAM_K
from tilewise.gpu.products.runtime_model import RuntimeModel, required_gain
from tilewise.store.problem import Config, Problem

_FAMILY, _SHARED_BYTES = ProductFamily(), H200.shared_bytes_per_block
_LONGEST_NS = 10**12
NAMES = ("space", "first", "five", "peer_first", "peer_five")


@dataclass(frozen=True)
class RecordedProduct:
    """One product: its kind, its measured configurations, and those that a peer would have measured."""

    kind: str
    problem: Problem
    configs: tuple[Config, ...]  # cuBLAS first
    runtime_ns: tuple[int, ...]
    answers: tuple[Config, ...]


def read_recorded(path: str | os.PathLike[str]) -> list[RecordedProduct]:
    """Read the products of a file that `as_json` made."""
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
        reason = " ".join(str(error).split())[:200]
        raise FileFormatError(f"{path} holds no recorded products ({type(error).__name__}: {reason}).") from error


def _checked(
    kind: str, problem: Problem, configs: tuple[Config, ...], runtime_ns: tuple[int, ...], answers: tuple[Config, ...]
) -> RecordedProduct:
    """Create a product after checking its sizes, settings and times."""
    if dict(_FAMILY.problem(dict(problem))) != dict(problem):
        raise ValueError("the problem is not a matrix product")
    if len(runtime_ns) != len(configs) or not all(type(t) is int and 0 < t < _LONGEST_NS for t in runtime_ns):
        raise ValueError("runtimes must be positive, one for each configuration")
    for config in (*configs[1:], *answers):
        if not all(type(value) is int and 0 <= value < 1 << 20 for value in config.values()):
            raise ValueError("a configuration must consist of integers")
    misfits = [_FAMILY.misfit(problem, config, _SHARED_BYTES) for config in configs[1:]]
    if None not in misfits:
        raise ValueError("no configuration fits")
    return RecordedProduct(kind, problem, configs, runtime_ns, answers)


def _config(fields: Sequence[str], row: Sequence[int]) -> Config:
    return Config(dict(zip(fields, row, strict=True)))


def as_json(products: Sequence[RecordedProduct], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Convert products to the file's form: configurations as rows of numbers under one list of field names."""
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


def compare(model: RuntimeModel, product: RecordedProduct) -> dict[str, float]:
    """Compute the columns of one product."""
    times = np.array(product.runtime_ns, np.float64)
    predicted = model.predict(product.problem, product.configs)
    fitting = np.array([_FAMILY.misfit(product.problem, config, _SHARED_BYTES) is None for config in product.configs])
    order = np.argsort(np.where(fitting, predicted.seconds, np.inf)[1:], kind="stable")
    kernels = 1 + order[: int(fitting[1:].sum())]
    best = kernels[0]
    gain = math.log(predicted.seconds[0] / predicted.seconds[best])
    deviation = math.hypot(predicted.deviation[0], predicted.deviation[best])
    is_chosen = gain >= required_gain(supports_tma(product.problem), deviation)
    answers = [product.configs.index(config) for config in product.answers if config in product.configs]
    choices = {
        "space": times[kernels].min(),
        "first": times[best] if is_chosen else times[0],
        "five": min(times[0], times[kernels[:KERNELS_TO_MEASURE]].min()),
        "peer_first": times[answers[0]] if answers else times[0],
        "peer_five": min([times[0], *times[answers[:KERNELS_TO_MEASURE]]]),
    }
    return {name: float(times[0] / choice_ns) for name, choice_ns in choices.items()}


def table(model: RuntimeModel, products: Sequence[RecordedProduct]) -> list[dict[str, Any]]:
    """Compute the geometric mean and the minimum of every column, by kind and over all products."""
    rows = [(product.kind, compare(model, product)) for product in products]
    summaries = []
    for kind in (*sorted({kind for kind, _ in rows}), "all"):
        members = [row for of, row in rows if kind in (of, "all")]
        means = {name: math.exp(sum(math.log(row[name]) for row in members) / len(members)) for name in NAMES}
        least = {f"{name}_least": min(row[name] for row in members) for name in NAMES}
        summaries.append({"kind": kind, "products": len(members), **means, **least})
    return summaries


def method_of(config: Config) -> str:
    """Name the schedule of a kernel: plain, persistent, split-K or stream-K."""
    if config.get(STREAM_K, 0):
        return "stream-K"
    if config.size(SPLIT_K) > 1:
        return "split-K"
    return "persistent" if config.size("persistent") else "plain"


def compare_methods(products: Sequence[RecordedProduct]) -> list[dict[str, Any]]:
    """Count for each schedule the products it is fastest in, and how much longer the others take there."""
    best: list[dict[str, int]] = []
    for product in products:
        times: dict[str, int] = {}
        for config, ns in zip(product.configs[1:], product.runtime_ns[1:], strict=True):
            times[method_of(config)] = min(ns, times.get(method_of(config), _LONGEST_NS))
        best.append(times)
    rows = []
    for way in ("plain", "persistent", "split-K", "stream-K"):
        wins = [times for times in best if way in times and min(times, key=times.__getitem__) == way]
        ratios = [min(ns for of, ns in times.items() if of != way) / times[way] for times in wins if len(times) > 1]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
        rows.append({"way": way, "products": len(wins), "mean": mean, "most": max(ratios, default=1.0)})
    return rows


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the table as text: the mean of each column, and the minimum in brackets."""
    text = [f"{'':10}{'products':>9}" + "".join(f"{name.replace('_', ' '):>15}" for name in NAMES)]
    for row in rows:
        cells = "".join(f"{row[name]:8.3f} ({row[name + '_least']:.2f})" for name in NAMES)
        text.append(f"{row['kind']:10}{row['products']:>9}{cells}")
    return text


def method_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the result of `compare_methods` as text."""
    return [f"{row['way']}: fastest in {row['products']} products, where the other ways take {row['mean']:.3f} times "
            f"as long (most {row['most']:.2f})" for row in rows]  # fmt: skip
