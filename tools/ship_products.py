"""Train the model of products' runtimes: `python -m tools.ship_products VISIT...`.

Reads the stores that `tools.gpu_visit --products` brought home, prints how choices do beside the library on shapes held
out in turn (which is how the margin of an unmeasured choice was chosen), trains on everything and writes the model.
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
from tilewise.gpu.products.config_fields import CUBLAS, STREAM_K, is_cublas
from tilewise.gpu.products.dispatch import DEVIATIONS, MARGIN, required_gain
from tilewise.gpu.products.family import ProductFamily
from tilewise.gpu.products.roofline import columns, cublas_features, features, floor_seconds
from tilewise.gpu.products.runtime_model import CUBLAS_NETWORK, FILE, RERANK, SCREENING, RuntimeModel, shipped_folder
from tilewise.io import save
from tilewise.store.aggregate import measured_problem, open_measurements
from tilewise.store.problem import Config, Problem
from tilewise.tensor import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
_FAMILY, _SHARED_BYTES = ProductFamily(), H200.shared_bytes_per_block


@dataclass(frozen=True)
class Measured:
    """A problem with its configurations and their seconds; the library among them."""

    problem: Problem
    batch: int
    configs: tuple[Config, ...]
    seconds: Array
    program: str


def read_store(path: str) -> list[Measured]:
    """Every kernel of a store, finished or not, whose library call was timed."""
    found = []
    with open_measurements(path) as store:
        for kernel in store.kernels():
            measured = measured_problem(store, kernel, CUBLAS)
            if measured is not None:
                times = np.array([t.runtime_ns * 1e-9 for t in measured.timings])
                configs = tuple(t.config for t in measured.timings)
                found.append(Measured(kernel.problem, 1, configs, times, kernel.program))
    return found


def read_templates(path: Path, most: int, seed: int = 0) -> list[Measured]:
    """The plain products of a collection: kernels like PyTorch's own templates, timed as graphs. Of each at most
    `most` configurations, half of them the fastest."""
    collection, chance = read_collection(path), np.random.default_rng(seed)
    own = {name: 24 + place for place, name in enumerate(collection.schema.config_features[24:])}
    found = []
    for one in itertools.chain.from_iterable(collection.splits.values()):
        if one.problem.get("family") not in ("matmul", "batched_matmul") or one.problem["dtype"] == "tf32":
            continue
        lead = int("batch" in one.problem)
        order = np.argsort(one.kernel.runtime, kind="stable")
        rest = chance.permutation(order[most // 2 :])[: most - most // 2]
        configs, seconds = [], []
        for place in (*order[: most // 2], *rest):
            row = one.kernel.config_feat[place]
            tile = {"block_k": row[lead], "block_n": row[1 + lead], "block_m": row[8 + lead]}
            tile |= {name: row[own[name]] for name in ("warps", "stages", "group")}
            configs.append(Config({name: int(value) for name, value in tile.items()}))
            seconds.append(one.kernel.runtime[place] * 1e-9)
        batch = int(one.problem.get("batch", 1))
        found.append(Measured(Problem(one.problem), batch, tuple(configs), np.array(seconds), "template"))
    return found


class Net(torch.nn.Module):
    """Members of an ensemble side by side."""

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
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            if place < len(self.weights) - 1:
                x = torch.relu(x)
        return x[..., 0]


def fit(
    rows: Array, target: Array, weight: Array, groups: Array,
    hidden: Sequence[int], members: int, epochs: int, seed: int, decay: float,
) -> dict[str, Array]:  # fmt: skip
    """An ensemble; each member leaves out a part of the problems, so that they disagree where little was seen."""
    torch.manual_seed(seed)
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    scale[scale < 1e-3] = 1.0  # a column that never varied says nothing, and must not say much later
    x = torch.tensor((rows - mean) / scale, dtype=torch.float32)
    y, w = torch.tensor(target, dtype=torch.float32), torch.tensor(weight, dtype=torch.float32)
    net = Net(x.shape[1], hidden, members)
    chance = np.random.default_rng(seed)
    kept = torch.tensor((chance.random((members, groups.max() + 1)) < 0.85)[:, groups], dtype=torch.float32) * w
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=decay)
    size = 2048 if len(x) > 8192 else 256
    steps = epochs * (len(x) // size + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(size):
            found = net(x[batch][None])
            error = torch.nn.functional.smooth_l1_loss(found, y[batch].expand_as(found), reduction="none", beta=0.1)
            loss = (error * kept[:, batch]).sum() / kept[:, batch].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    arrays = {"mean": mean.astype(np.float32), "scale": scale.astype(np.float32)}
    for place, (weight_, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
        arrays[f"weight{place}"] = weight_.detach().numpy()
        arrays[f"bias{place}"] = bias.detach().numpy()
    return arrays


def train(measured: Sequence[Measured], seed: int, epochs: int) -> dict[str, Array]:
    rows, target, weight, groups = [], [], [], []
    library_rows, library_target = [], []
    for number, one in enumerate(measured):
        best = one.seconds.min()
        kernels = [i for i, config in enumerate(one.configs) if not is_cublas(config)]
        if kernels:
            of = features(one.problem, columns([one.configs[i] for i in kernels]), one.batch)
            rows.append(of)
            target.append(np.log(one.seconds[kernels]) - of[:, 0])
            # The fast ones matter: a choice is made among them.
            share = 0.25 if one.program == "template" else 1.0
            weight.append(share * ((best / one.seconds[kernels]) ** 2 + 0.02))
            groups.append(np.full(len(kernels), number))
        for i in set(range(len(one.configs))) - set(kernels):
            library_rows.append(cublas_features(one.problem, one.batch)[0])
            library_target.append(np.log(one.seconds[i]) - np.log(floor_seconds(one.problem, one.batch)))
    given = [np.concatenate(of) for of in (rows, target, weight, groups)]
    screening = fit(*given, (40, 40), 1, epochs, seed, 0.02)
    rerank = fit(*given, (80, 64), 8, epochs, seed + 1, 0.02)
    many = np.arange(len(library_rows))
    cublas = fit(np.array(library_rows), np.array(library_target), np.ones(len(many)), many, (64, 48), 12,
                  max(1, epochs * 8), seed, 0.03)  # fmt: skip
    networks = {SCREENING: screening, RERANK: rerank, CUBLAS_NETWORK: cublas}
    return {f"{name}.{key}": value for name, of in networks.items() for key, value in of.items()}


@dataclass(frozen=True)
class Judged:
    """What a model that never saw a shape chooses for it: the predicted gain of its best kernel and its doubt, what
    that kernel truly gains over the library, and the same of the best kernel measured and of five measurements."""

    program: str
    gain: float
    doubt: float
    required: float  # gain above which it is chosen unmeasured
    first: float
    best: float
    five: float
    library_error: float


def judged(model: RuntimeModel, one: Measured) -> Judged | None:
    """None for a shape with few measurements, where choosing among them says little."""
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
    return Judged(one.program, gain, doubt, required_gain(one.problem, doubt), *of, error)


def tell(rows: Sequence[Judged]) -> None:
    """Geometric means and the worst, for several margins of an unmeasured choice."""
    for margin, doubts in itertools.product((0.03, 0.05, 0.08, 0.12, 0.2), (0.0, 1.0, 2.0, 3.0)):
        taken = np.array([row.first if row.gain > margin + doubts * row.doubt else 1.0 for row in rows])
        here = " <" if (margin, doubts) == (MARGIN, DEVIATIONS) else ""
        print(f"margin {margin}, {doubts:.0f} deviations: {geometric(taken):.3f} (least {taken.min():.2f}), "
              f"{(taken < 0.95).sum()} below 0.95, {(taken != 1).sum()} of {len(taken)} kernels{here}")  # fmt: skip
    print(f"library's error {np.std([row.library_error for row in rows]):.3f}")
    for program in (*sorted({row.program for row in rows}), None):
        of = [row for row in rows if program in (row.program, None)]
        first = [row.first if row.gain > row.required else 1.0 for row in of]
        columns = {"best kernel": [r.best for r in of], "first": first, "five": [r.five for r in of]}
        cells = (f"{name} {geometric(np.array(v)):.3f} ({min(v):.2f})" for name, v in columns.items())
        print(f"{program or 'all':10} {len(of):4} ", *cells)


def geometric(values: Array) -> float:
    return float(np.exp(np.log(values).mean()))


def crossed(measured: Sequence[Measured], folds: int, epochs: int, path: Path) -> list[Judged]:
    """Every shape judged by a model that was trained without it."""
    found = []
    for fold in range(folds):
        held = [int(one.problem.digest[:8], 16) % folds == fold for one in measured]
        write(train([one for one, out in zip(measured, held, strict=True) if not out], 0, epochs), path)
        model = RuntimeModel(path)
        found += [judged(model, one) for one, out in zip(measured, held, strict=True) if out]
        print(f"fold {fold}: {sum(held)} shapes", flush=True)
    path.unlink()
    return [row for row in found if row is not None]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("visits", nargs="+")
    parser.add_argument(
        "--templates", type=int, default=32, help="configurations of each kernel of the collection h200"
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=shipped_folder() / FILE)
    parser.add_argument("--folds", type=int, default=5, help="parts of the shapes to hold out in turn; 0 for none")
    parser.add_argument("--held", nargs="*", default=[], help="visits to judge on, not to train on")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    measured = [one for path in given.visits for one in read_store(path)]
    measured += read_templates(embedded_folder() / "h200.npz", given.templates)
    print(
        f"{len(measured)} problems, {sum(len(one.configs) for one in measured)} pairs; {time.monotonic() - start:.0f} s"
    )
    if given.held:
        write(train(measured, 0, given.epochs), given.out)
        model, held = RuntimeModel(given.out), [one for path in given.held for one in read_store(path)]
        tell([row for row in (judged(model, one) for one in held) if row is not None])
        return 0
    if given.folds:
        tell(crossed(measured, given.folds, given.epochs, given.out.with_name("held.safetensors")))
    write(train(measured, 0, given.epochs), given.out)
    print(f"{given.out}: {given.out.stat().st_size} bytes, {time.monotonic() - start:.0f} s")
    return 0


def write(arrays: dict[str, Array], path: Path) -> None:
    save({name: Tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}, path)


if __name__ == "__main__":
    raise SystemExit(main())
