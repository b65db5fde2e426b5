"""Measures how tiles compare with the default, and trains the chooser's network on it (tilewise/tune/cpu/first.py).

    python -m benchmarks.ship_chooser --measure first.npz --seed 1 --seconds 60
    python -m benchmarks.ship_chooser --fit *.npz [--out first_choice.safetensors]

Products are drawn: log-uniform and uniform sizes, small and skinny ones, many of sizes that people choose, all layouts;
operands lie on large pages or wherever NumPy puts them. Every candidate runs a few times, those that stay near the
front more often, the default at every turn. Of the products a fifth is held out of training, to set the margin and to
say how good it is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import machine_class, today
from benchmarks.results_files import geometric
from tilewise._extension import native
from tilewise.tune.belief import Prior
from tilewise.tune.cpu.first import (
    LAYOUTS,
    PATHS,
    SHIPPED,
    FirstChoice,
    Numbers,
    Product,
    Tiles,
    candidates,
    features,
    plan_of,
    tile_at,
)
from tilewise.tune.cpu.memory import placed
from tilewise.tune.prior import Case, fit_prior

LEAST, MOST = 100_000, 48_000_000  # multiplications
UNIT_NS = 3.0e5
NEAR = (2.5, 1.6, 1.25, 1.12, 1.06, 1.04, 1.03)  # times the best so far: who runs in each round
FINAL_ROUNDS, FINALISTS = 5, 4
MEMBERS, HIDDEN, EPOCHS, BATCH, RATE = 4, 64, 45, 1024, 6e-3
SHARES, MARGINS = (0.0, 0.5, 1.0, 2.0), (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03)
NOISE, TRIAL_NOISE = 0.007, 0.012  # of a time here, and of one measurement by the tuner
LEAST_LOSS = 0.97  # a choice this much slower than the default weighs as if it were twice as bad


@dataclass(frozen=True)
class Measured:
    """A product, its candidates, and nanoseconds: the default's, then theirs."""

    product: Product
    tiles: Tiles
    ns: Numbers


def draw(rng: np.random.Generator) -> tuple[int, int, int, str]:
    """Sizes and layout of one product."""
    kinds = (
        lambda: np.exp2(rng.uniform(2, 10, 3)),
        lambda: np.exp2(rng.uniform(2, 12, 3)),
        lambda: rng.integers(1, 701, 3),
        lambda: np.exp2(rng.uniform((2, 3.5, 3.7), (11, 7, 10.5))),  # narrow
        lambda: np.exp2(rng.uniform((2, 3.5, 3.7), (5, 11, 10.5))),  # flat
    )
    while True:
        sizes = kinds[rng.choice(5, p=[0.3, 0.2, 0.1, 0.25, 0.15])]()
        m, n, k = (usual(rng, int(x)) for x in sizes)
        layout = str(rng.choice(LAYOUTS, p=[0.35, 0.35, 0.15, 0.15]))
        if LEAST <= m * n * k <= MOST and k > 12 and m >= 4 and n > 4 and max(m * n, m * k, n * k) < 1 << 22:
            return m, n, k, layout


def usual(rng: np.random.Generator, size: int) -> int:
    """The size, or, of the larger ones as often as not, one that people choose."""
    if size < 24 or rng.random() < 0.4:
        return size
    if rng.random() < 0.3:
        return int(2 ** round(np.log2(size)))
    grain = int(rng.choice([8, 16, 32, 64, 128]))
    return max(grain, round(size / grain) * grain)


def measure(m: int, n: int, k: int, layout: str, rng: np.random.Generator) -> Measured:
    def array(rows: int, columns: int, turned: bool) -> np.ndarray:
        made = rng.standard_normal((columns, rows) if turned else (rows, columns), dtype=np.float32)
        return made.T if turned else made

    operands = {"a": array(m, k, layout[0] == "t"), "b": array(k, n, layout[1] == "t")}
    a, b = (placed(operands) if rng.random() < 0.5 else operands).values()
    found, default = plan_of(native, m, n, k, layout)
    tiles = np.vstack([default, candidates(native, m, n, k, 1)])
    fits = [native.gemm_tile_problem(tile_at(row), m, n, k, layout[1] == "t") is None for row in tiles]
    tiles = tiles[fits]
    prepared = [None, *(native.prepared_tile(tile_at(row)) for row in tiles)]
    ns = np.full(len(prepared), np.inf)

    def run(index: int, calls: int) -> None:
        tile, start = prepared[index], time.perf_counter_ns()
        for _ in range(calls):
            native.matmul(a, b, tile)
        ns[index] = min(ns[index], (time.perf_counter_ns() - start) / calls)

    for index in np.tile(np.arange(len(ns)), 3):
        run(index, 1)
    for turn in range(len(NEAR) + FINAL_ROUNDS):
        near = ns < NEAR[turn] * ns.min() + 1000 if turn < len(NEAR) else ns <= np.sort(ns)[:FINALISTS].max()
        for index in [*rng.permutation(np.union1d([0], np.flatnonzero(near))), 0]:
            run(index, int(np.clip(UNIT_NS / ns[index], 1, 200)))
    return Measured(found, tiles, ns)


def collect(path: Path, seed: int, seconds: float) -> None:
    """Draw and measure for so many seconds."""
    tilewise.set_num_threads(1)
    rng, until, kept = np.random.default_rng(seed), time.monotonic() + seconds, dict[str, Any]()
    while time.monotonic() < until:
        one, number = measure(*draw(rng), rng), len(kept) // 3
        p = one.product
        sizes = [p.m, p.n, p.k, LAYOUTS.index(p.layout), PATHS.index(p.path)]
        kept |= {f"product{number}": np.array(sizes), f"tiles{number}": one.tiles, f"ns{number}": one.ns}
    np.savez(path, **kept)
    print(f"{len(kept) // 3} products in {path}")


def read(paths: Sequence[Path]) -> Iterator[Measured]:
    for path in paths:
        with np.load(path, allow_pickle=False) as kept:
            for number in range(len(kept.files) // 3):
                m, n, k, layout, *_, way = (int(x) for x in kept[f"product{number}"])
                p = Product(m, n, k, LAYOUTS[layout], PATHS[way])
                yield Measured(p, kept[f"tiles{number}"], kept[f"ns{number}"])


def train_member(x: Numbers, y: Numbers, weight: Numbers, seed: int) -> list[np.ndarray]:
    """Weights and biases of one member."""
    import torch
    from torch.nn.functional import smooth_l1_loss

    torch.manual_seed(seed)
    data = [torch.tensor(values, dtype=torch.float32) for values in (x, y, weight)]
    layers = [torch.nn.Linear(x.shape[1], HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, 1)]
    net = torch.nn.Sequential(layers[0], torch.nn.SiLU(), layers[1], torch.nn.SiLU(), layers[2])
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]:
            inputs, target, heavy = (part[rows] for part in data)
            off = smooth_l1_loss(net(inputs)[:, 0], target, beta=0.02, reduction="none")
            loss = (heavy * off).sum() / heavy.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return [p.detach().numpy() for layer in layers for p in (layer.weight.T.contiguous(), layer.bias)]


def train(kernels: Sequence[Measured]) -> FirstChoice:
    x = np.concatenate([features(one.product, one.tiles) for one in kernels])
    logs = [np.log(one.ns[1:] / one.ns[0]) for one in kernels]
    # What lies far behind the front was timed briefly and decides nothing.
    weight = np.concatenate([np.exp(-(y - min(float(y.min()), 0.0)) / 0.15) + 0.03 for y in logs])
    y = np.clip(np.concatenate(logs), -0.6, 1.2)
    mean, deviation = x.mean(axis=0), x.std(axis=0) + 1e-6
    members = [train_member((x - mean) / deviation, y, weight, seed) for seed in range(MEMBERS)]
    w0, b0, w1, b1, w2, b2 = (np.stack(parts) for parts in zip(*members, strict=True))
    arrays = {
        "mean": mean,
        "deviation": deviation,
        "w0": w0,
        "b0": b0,
        "w1": w1,
        "b1": b1,
        "w2": w2[:, :, 0],
        "b2": b2[:, 0],
    }
    return FirstChoice({k: v.astype(np.float32) for k, v in arrays.items()}, 0.0, 0.0, MOST)


def gains(kernels: Sequence[Measured], guesses: Sequence[Numbers], share: float, margin: float) -> list[float]:
    """The default's time over that of what would be chosen."""
    found = []
    for one, guess in zip(kernels, guesses, strict=True):
        cautious = guess.mean(axis=0) + share * guess.std(axis=0)
        best = int(np.argmin(cautious))
        found.append(float(one.ns[0] / one.ns[1 + best]) if cautious[best] < -margin else 1.0)
    return found


def calibrate(model: FirstChoice, held_out: Sequence[Measured]) -> None:
    """The margin and the share of disagreement that gain most, losses counting more."""
    guesses = [model.predict(features(one.product, one.tiles)) for one in held_out]

    def worth(share: float, margin: float) -> float:
        values = gains(held_out, guesses, share, margin)
        return geometric(value if value >= LEAST_LOSS else value**2 for value in values)

    model.share, model.margin = max(((s, m) for s in SHARES for m in MARGINS), key=lambda pair: worth(*pair))


def fit_belief(model: FirstChoice, held_out: Sequence[Measured]) -> Prior:
    """How the tuner is to trust the network when it measures."""
    cases = []
    for one in held_out:
        guess = np.append(0.0, model.predict(features(one.product, one.tiles[1:])).mean(axis=0))
        times = np.append(one.ns[0], one.ns[2:])  # row 0 of the tiles is the default
        cases.append(Case("", guess, np.log2(1.0 + one.tiles), times / times[0]))
    return replace(fit_prior(cases, NOISE), noise=TRIAL_NOISE)


def report(model: FirstChoice, held_out: Sequence[Measured]) -> dict[str, float]:
    guesses = [model.predict(features(one.product, one.tiles)) for one in held_out]
    values = gains(held_out, guesses, model.share, model.margin)
    default = [float(one.ns.min() / one.ns[0]) for one in held_out]
    for name, tiled in (("all", (True, False)), ("tiled", (True,)), ("other", (False,))):
        of = [i for i, one in enumerate(held_out) if (one.product.path == "tiled") in tiled]
        gained = [values[i] for i in of]
        print(
            f"{name:6} {len(of)} held-out products: default {geometric(default[i] for i in of):.4f} of the best, first "
            f"choice {geometric(default[i] * values[i] for i in of):.4f}; worst {min(gained):.3f} of the default; "
            f"2 % slower {sum(gain < 0.98 for gain in gained)}, faster {sum(gain > 1.02 for gain in gained)}"
        )
    return {"default": geometric(default), "first": geometric(d * v for d, v in zip(default, values, strict=True))}


def fit(paths: Sequence[Path], out: Path) -> None:
    import torch

    torch.set_num_threads(1)
    kernels = list(read(paths))
    order = np.random.default_rng(0).permutation(len(kernels))
    held_out, taught = [kernels[i] for i in order[: len(order) // 5]], [kernels[i] for i in order[len(order) // 5 :]]
    model = train(taught)
    calibrate(model, held_out)
    model.prior = fit_belief(model, held_out[:200])
    print(f"margin {model.margin}, share {model.share}, {model.prior}")
    about = report(model, held_out) | {"products": len(taught), "date": today(), "machine": machine_class()}
    model.write(out, about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--fit", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    options = parser.parse_args()
    if options.measure:
        collect(options.measure, options.seed, options.seconds)
    if options.fit:
        fit(options.fit, options.out)


if __name__ == "__main__":
    main()
