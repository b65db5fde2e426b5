"""Train the model of products' runtimes: `python -m tools.ship_products VISIT...`.

It reads the stores that `tools.gpu_visit --products` wrote, prints how choices compare with the library by
cross-validation over shapes (which is how the margin of an unmeasured choice was chosen), trains on everything and
writes the model.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import embedded_folder
from tilewise.gpu.devices import H200
from tilewise.gpu.products.family import ProductFamily, supports_tma
from tilewise.gpu.products.roofline import (
    CUBLAS,
    STREAM_K,
    columns,
    cublas_features,
    features,
    floor_seconds,
    is_cublas,
)
from tilewise.gpu.products.runtime_model import (
    CUBLAS_NETWORK,
    FILE,
    RERANK,
    SCREENING,
    RuntimeModel,
    required_gain,
    shipped_folder,
)
from tilewise.io import save
from tilewise.store.aggregate import measured_problem, open_measurements
from tilewise.store.problem import Config, Problem
from tilewise.tensor import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
_FAMILY, _SHARED_BYTES = ProductFamily(), H200.shared_bytes_per_block


@dataclass(frozen=True)
class MeasuredProduct:
    """A problem with its configurations, the library among them, and their runtimes."""

    problem: Problem
    batch: int
    configs: tuple[Config, ...]
    seconds: Array
    program: str


def read_store(path: str) -> list[MeasuredProduct]:
    """Read every kernel of a store, finished or not, whose library call was timed."""
    products = []
    with open_measurements(path) as store:
        for kernel in store.kernels():
            measurements = measured_problem(store, kernel, CUBLAS)
            if measurements is not None:
                times = np.array([t.runtime_ns * 1e-9 for t in measurements.timings])
                configs = tuple(t.config for t in measurements.timings)
                products.append(MeasuredProduct(kernel.problem, 1, configs, times, kernel.program))
    return products


def read_templates(path: Path, most: int, seed: int = 0) -> list[MeasuredProduct]:
    """Read the plain products of a collection: kernels like PyTorch's own templates, timed as CUDA graphs.

    At most `most` configurations of each are used, half of them the fastest.
    """
    collection, chance = read_collection(path), np.random.default_rng(seed)
    column_of = {name: 24 + index for index, name in enumerate(collection.schema.config_features[24:])}
    products = []
    for one in itertools.chain.from_iterable(collection.splits.values()):
        if one.problem.get("family") not in ("matmul", "batched_matmul") or one.problem["dtype"] == "tf32":
            continue
        lead = int("batch" in one.problem)
        order = np.argsort(one.kernel.runtime, kind="stable")
        slower = chance.permutation(order[most // 2 :])[: most - most // 2]
        configs, seconds = [], []
        for index in (*order[: most // 2], *slower):
            row = one.kernel.config_feat[index]
            tile = {"block_k": row[lead], "block_n": row[1 + lead], "block_m": row[8 + lead]}
            tile |= {name: row[column_of[name]] for name in ("warps", "stages", "group")}
            configs.append(Config({name: int(value) for name, value in tile.items()}))
            seconds.append(one.kernel.runtime[index] * 1e-9)
        batch = int(one.problem.get("batch", 1))
        products.append(MeasuredProduct(Problem(one.problem), batch, tuple(configs), np.array(seconds), "template"))
    return products


class Net(torch.nn.Module):
    """An ensemble of multilayer perceptrons, evaluated as batched products."""

    def __init__(self, inputs: int, hidden: Sequence[int], members: int) -> None:
        super().__init__()
        sizes = [inputs, *hidden, 1]
        self.weights = torch.nn.ParameterList(
            torch.randn(members, a, b) * (2.0 / a) ** 0.5 for a, b in itertools.pairwise(sizes)
        )
        self.biases = torch.nn.ParameterList(torch.zeros(members, 1, b) for b in sizes[1:])
        with torch.no_grad():
            self.weights[-1] *= 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias  # (members, rows, width)
            if layer < len(self.weights) - 1:
                x = torch.relu(x)
        return x[..., 0]


def fit(
    rows: Array, target: Array, weight: Array, groups: Array,
    hidden: Sequence[int], members: int, epochs: int, seed: int, decay: float,
) -> dict[str, Array]:  # fmt: skip
    """Fit an ensemble. Each member leaves out some problems, so that members disagree where data are scarce."""
    torch.manual_seed(seed)
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    scale[scale < 1e-3] = 1.0  # a column that was constant in training must not dominate later
    x = torch.tensor((rows - mean) / scale, dtype=torch.float32)
    y, w = torch.tensor(target, dtype=torch.float32), torch.tensor(weight, dtype=torch.float32)
    net = Net(x.shape[1], hidden, members)
    chance = np.random.default_rng(seed)
    row_weights = torch.tensor((chance.random((members, groups.max() + 1)) < 0.85)[:, groups], dtype=torch.float32) * w
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=decay)
    size = 2048 if len(x) > 8192 else 256
    steps = epochs * (len(x) // size + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(size):
            outputs = net(x[batch][None])
            error = torch.nn.functional.smooth_l1_loss(outputs, y[batch].expand_as(outputs), reduction="none", beta=0.1)
            loss = (error * row_weights[:, batch]).sum() / row_weights[:, batch].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    arrays = {"mean": mean.astype(np.float32), "scale": scale.astype(np.float32)}
    for layer, (weight_, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
        arrays[f"weight{layer}"] = weight_.detach().numpy()
        arrays[f"bias{layer}"] = bias.detach().numpy()
    return arrays


def train(products: Sequence[MeasuredProduct], seed: int, epochs: int) -> dict[str, Array]:
    """Train the three networks: screening of all kernels, reranking of the best, and the library's runtime."""
    rows, target, weight, groups = [], [], [], []
    library_rows, library_target = [], []
    for number, one in enumerate(products):
        best = one.seconds.min()
        kernels = [i for i, config in enumerate(one.configs) if not is_cublas(config)]
        if kernels:
            of = features(one.problem, columns([one.configs[i] for i in kernels]), one.batch)
            rows.append(of)
            target.append(np.log(one.seconds[kernels]) - of[:, 0])
            # Fast kernels get more weight, because the choice is made among them.
            share = 0.25 if one.program == "template" else 1.0
            weight.append(share * ((best / one.seconds[kernels]) ** 2 + 0.02))
            groups.append(np.full(len(kernels), number))
        for i in set(range(len(one.configs))) - set(kernels):
            library_rows.append(cublas_features(one.problem, one.batch)[0])
            library_target.append(np.log(one.seconds[i]) - np.log(floor_seconds(one.problem, one.batch)))
    data = [np.concatenate(of) for of in (rows, target, weight, groups)]
    screening = fit(*data, hidden=(40, 40), members=1, epochs=epochs, seed=seed, decay=0.02)
    rerank = fit(*data, hidden=(80, 64), members=8, epochs=epochs, seed=seed + 1, decay=0.02)
    numbers = np.arange(len(library_rows))
    library_data = (np.array(library_rows), np.array(library_target), np.ones(len(numbers)), numbers)
    cublas = fit(*library_data, hidden=(64, 48), members=12, epochs=max(1, epochs * 8), seed=seed, decay=0.03)
    networks = {SCREENING: screening, RERANK: rerank, CUBLAS_NETWORK: cublas}
    return {f"{name}.{key}": value for name, of in networks.items() for key, value in of.items()}


@dataclass(frozen=True)
class HeldOutProduct:
    """The choice of a model for a shape that it was not trained on.

    `gain` and `doubt` are the predicted gain of its best kernel over the library and its uncertainty; `first`, `best`
    and `five` are the measured gains of that kernel, of the best kernel, and of five measurements.
    """

    program: str
    gain: float
    doubt: float
    required: float  # gain above which it is chosen unmeasured
    first: float
    best: float
    five: float
    library_error: float


def evaluate_product(model: RuntimeModel, one: MeasuredProduct) -> HeldOutProduct | None:
    """Evaluate a model on a shape; None if it has too few measurements for the choice to mean much."""
    library = next((i for i, config in enumerate(one.configs) if is_cublas(config)), None)
    if library is None or one.problem.family != "product":
        return None
    kernels = [
        i for i, config in enumerate(one.configs)
        if i != library and not _FAMILY.misfit(one.problem, Config({STREAM_K: 0, **config}), _SHARED_BYTES)
    ]  # fmt: skip
    if len(kernels) < 20:
        return None
    predicted, t = model.predict(one.problem, one.configs, one.batch), one.seconds
    order = sorted(kernels, key=lambda i: predicted.seconds[i])
    best = order[0]
    gain = float(np.log(predicted.seconds[library] / predicted.seconds[best]))
    doubt = float(np.hypot(predicted.deviation[best], predicted.deviation[library]))
    five = min(t[library], t[order[:4]].min())
    of = (t[library] / np.array([t[best], t[kernels].min(), five])).tolist()
    error = float(np.log(predicted.seconds[library] / t[library]))
    return HeldOutProduct(
        program=one.program,
        gain=gain,
        doubt=doubt,
        required=required_gain(supports_tma(one.problem), doubt),
        first=of[0],
        best=of[1],
        five=of[2],
        library_error=error,
    )


def print_table(rows: Sequence[HeldOutProduct]) -> None:
    """Print geometric means and the worst case for several margins of an unmeasured choice."""
    for margin, doubts in itertools.product((0.03, 0.05, 0.08, 0.12, 0.2), (0.0, 1.0, 2.0, 3.0)):
        gains = np.array([row.first if row.gain > margin + doubts * row.doubt else 1.0 for row in rows])
        print(f"margin {margin}, {doubts:.0f} deviations: {geometric(gains):.3f} (least {gains.min():.2f}), "
              f"{(gains < 0.95).sum()} below 0.95, {(gains != 1).sum()} of {len(gains)} kernels")  # fmt: skip
    print(f"library's error {np.std([row.library_error for row in rows]):.3f}")
    for program in (*sorted({row.program for row in rows}), None):
        of = [row for row in rows if program in (row.program, None)]
        first = [row.first if row.gain > row.required else 1.0 for row in of]
        columns = {"best kernel": [r.best for r in of], "first": first, "five": [r.five for r in of]}
        cells = (f"{name} {geometric(np.array(v)):.3f} ({min(v):.2f})" for name, v in columns.items())
        print(f"{program or 'all':10} {len(of):4} ", *cells)


def geometric(values: Array) -> float:
    return float(np.exp(np.log(values).mean()))


def cross_validate(products: Sequence[MeasuredProduct], folds: int, epochs: int, path: Path) -> list[HeldOutProduct]:
    """Evaluate every shape by a model that was trained without it."""
    rows = []
    for fold in range(folds):
        is_held_out = [int(one.problem.digest[:8], 16) % folds == fold for one in products]
        write(train([one for one, out in zip(products, is_held_out, strict=True) if not out], 0, epochs), path)
        model = RuntimeModel(path)
        rows += [evaluate_product(model, one) for one, out in zip(products, is_held_out, strict=True) if out]
        print(f"fold {fold}: {sum(is_held_out)} shapes", flush=True)
    path.unlink()
    return [row for row in rows if row is not None]


def main() -> int:
    """Read the visits, print the evaluation, and write the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("visits", nargs="+")
    parser.add_argument(
        "--templates", type=int, default=32, help="configurations of each kernel of the collection h200"
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=shipped_folder() / FILE)
    parser.add_argument("--folds", type=int, default=5, help="parts of the shapes for cross-validation; 0 for none")
    parser.add_argument("--held", nargs="*", default=[], help="visits to evaluate on, not to train on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    products = [one for path in options.visits for one in read_store(path)]
    products += read_templates(embedded_folder() / "h200.npz", options.templates)
    print(
        f"{len(products)} problems, {sum(len(one.configs) for one in products)} pairs; {time.monotonic() - start:.0f} s"
    )
    if options.held:
        write(train(products, 0, options.epochs), options.out)
        model, test_products = RuntimeModel(options.out), [one for path in options.held for one in read_store(path)]
        print_table([row for row in (evaluate_product(model, one) for one in test_products) if row is not None])
        return 0
    if options.folds:
        print_table(cross_validate(products, options.folds, options.epochs, options.out.with_name("held.safetensors")))
    write(train(products, 0, options.epochs), options.out)
    print(f"{options.out}: {options.out.stat().st_size} bytes, {time.monotonic() - start:.0f} s")
    return 0


def write(arrays: dict[str, Array], path: Path) -> None:
    save({name: Tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}, path)


if __name__ == "__main__":
    raise SystemExit(main())
