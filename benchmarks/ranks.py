"""Eight simulated ranks tune the same kernels: how often they agree, and what choosing without a clock costs.

    python -m benchmarks.ranks [--ranks 8] [--seed 0]

Runs without a GPU. The kernels are the 140 test kernels of the H200 collection, which the shipped model was not trained
on. A rank that measures sees every recorded runtime times its own noise and takes the smallest; a pinned rank
takes the model's first choice. Runtimes are relative to each kernel's best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import embedded_folder
from tilewise.costmodel.models.scorer import shipped_scorer

NOISES = (0.0036, 0.01, 0.03)  # relative standard deviations: the collection's own median, a quiet and a busy machine


def simulate(runtimes: Sequence[Any], choices: Sequence[int], noise: float, ranks: int, seed: int) -> dict[str, float]:
    """Return the share of kernels on which all ranks agree, and the mean speed when measured and when pinned."""
    rng = np.random.default_rng(seed)
    agree, measuring, pinned = 0, [], []
    for runtime, choice in zip(runtimes, choices, strict=True):
        readings = runtime * np.exp(noise * rng.standard_normal((ranks, len(runtime))))  # (ranks, configurations)
        fastest = readings.argmin(axis=1)
        agree += len(set(fastest.tolist())) == 1
        # A step waits for the slowest rank.
        measuring.append(runtime.min() / runtime[fastest].max())
        pinned.append(runtime.min() / runtime[choice])
    count = len(runtimes)
    return {"agree": agree / count, "measured": float(np.mean(measuring)), "pinned": float(np.mean(pinned))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    collection, model = read_collection(Path(embedded_folder()) / "h200.npz"), shipped_scorer("h200")
    kernels = [one.kernel for one in collection.splits["test"]]
    runtimes = [np.asarray(kernel.runtime, np.float64) for kernel in kernels]
    choices = [int(np.argmin(model.score(kernel))) for kernel in kernels]
    print(f"{len(kernels)} kernels, {options.ranks} ranks")
    for noise in NOISES:
        row = simulate(runtimes, choices, noise, options.ranks, options.seed)
        agreement = f"measuring ranks agree on {row['agree']:3.0%} of the kernels"
        print(f"noise {noise:.1%}: {agreement} and run at {row['measured']:.3f} of the best; "
              f"pinned ranks at {row['pinned']:.3f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
