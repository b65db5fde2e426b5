"""Networks with pruned weights against their own dense plans: what zeros save end to end.

    python -m benchmarks.pruned [--only resnet18 vit_tiny] [--sparsity 0.7 0.9] [--threads 1]

Weights are pruned at random by magnitude, layer by layer: a plan's time does not depend on accuracy. "tilewise" is the
plan of the pruned network, which chooses the sparse kernel of a layer by its cost model; "tilewise dense" is the plan
of the network before pruning.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import Row, compare, write_results
from tilewise import models, nn, no_grad
from tilewise.models import zoo
from tilewise.nn import functional as F
from tilewise.plan import compile
from tilewise.prune import prune

MLPS = {
    "mlp 4 x 1024": (784, 1024, 1024, 1024, 10),
    "mlp 4 x 512": (784, 512, 512, 512, 10),
    "mlp 3 x 2048": (256, 2048, 2048, 16),
}
NETWORKS = ("resnet18", "mobilenet_v2", "vgg6", "vit_tiny", "convnext_like", *MLPS)


class ConvNextBlock(nn.Module):
    """A depthwise 7x7 convolution and two linear layers over the channels (Liu et al. 2022)."""

    def __init__(self, channels: int) -> None:
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels, rng=0)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels, rng=1), nn.Linear(4 * channels, channels, rng=2)

    def forward(self, x: Any) -> Any:
        rows = self.norm(self.depthwise(x).permute(0, 2, 3, 1))  # (N, H, W, C)
        return x + self.narrow(F.gelu(self.wide(rows))).permute(0, 3, 1, 2)


def convnext_like() -> nn.Module:
    """Four stages of one or two blocks, as ConvNeXt-Atto has them, on 224 x 224 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, 4, rng=0)]
    for channels, blocks in ((40, 1), (80, 2), (160, 2), (320, 1)):
        if channels > 40:
            layers.append(nn.Conv2d(channels // 2, channels, 2, 2, rng=0))
        layers += [ConvNextBlock(channels) for _ in range(blocks)]
    return nn.Sequential(*layers)


def network(name: str) -> tuple[nn.Module, np.ndarray]:
    """Return a network in eval mode and one input."""
    rng = np.random.default_rng(0)
    if name in MLPS:
        sizes = MLPS[name]
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b, rng=0), nn.ReLU())]
        return nn.Sequential(*layers[:-1]).eval(), rng.standard_normal((1, sizes[0])).astype(np.float32)
    if name == "convnext_like":
        model, shape = convnext_like(), (3, 224, 224)
    elif name == "vgg6":
        model, shape = models.vgg6(), (3, 32, 32)
    else:
        model = zoo.ZOO[name]()
        shape = model.example_shape
    return model.eval(), rng.standard_normal((1, *shape)).astype(np.float32)


def case(name: str, sparsity: float, threads: int, budget_s: float) -> Row:
    """Time the dense plan and the plan of the pruned network, interleaved."""
    model, x = network(name)
    with no_grad():
        pruned = prune(model, sparsity, "layer").eval()
        dense, sparse = compile(model, x), compile(pruned, x)
        expected = np.asarray(pruned(x))
    if np.abs(sparse(x) - expected).max() > 1e-4 * np.abs(expected).max():
        raise SystemExit(f"the plan of the pruned {name} is wrong")
    kinds = [algorithm == "sparse" for _, algorithm in sparse.algorithms]
    print(f"{sum(kinds)} layers sparse", end="  ")
    runs = {"tilewise": lambda: sparse(x), "tilewise dense": lambda: dense(x)}
    return compare(f"pruned {name}, {sparsity:.0%}", threads, runs, budget_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.7, 0.9])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/pruned.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    rows = [case(name, s, options.threads, options.budget) for name in options.only for s in options.sparsity]
    write_results(options.json, rows)


if __name__ == "__main__":
    main()
