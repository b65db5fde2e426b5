"""Convolution compared with PyTorch (oneDNN) and ONNX Runtime: whole networks, training steps and single layers.

    python -m benchmarks.conv [--threads 1] [--layers] [--json benchmarks/results/conv.json]

Every forward result is compared before it is timed. A ratio above 1 means tilewise is faster than the faster peer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewise
from benchmarks import onnx_models, torch_models
from benchmarks.harness import Row, Run, compare, write_results
from tilewise import Tensor, models, no_grad, optim
from tilewise.nn import Conv2d, MaxPool2d, ReLU, Sequential
from tilewise.nn import functional as F
from tilewise.plan import compile

# name, input channels, filters, image side, kernel, stride
LAYERS = [
    ("first 3-64", 3, 64, 32, 3, 1),
    ("3x3 64-64 at 32", 64, 64, 32, 3, 1),
    ("3x3 128-128 at 16", 128, 128, 16, 3, 1),
    ("3x3 128-256 at 8", 128, 256, 8, 3, 1),
    ("3x3 16-16 at 32", 16, 16, 32, 3, 1),
    ("3x3 16-32 at 32 stride 2", 16, 32, 32, 3, 2),
    ("1x1 16-32 at 32 stride 2", 16, 32, 32, 1, 2),
    ("3x3 64-64 at 8", 64, 64, 8, 3, 1),
    ("1x1 64-256 at 28", 64, 256, 28, 1, 1),
    ("3x3 64-64 at 56", 64, 64, 56, 3, 1),
    ("3x3 256-256 at 14", 256, 256, 14, 3, 1),
    ("5x5 32-64 at 28", 32, 64, 28, 5, 1),
    ("7x7 3-64 at 112 stride 2", 3, 64, 112, 7, 2),
]


def check_same(name: str, ours: Any, peers: list[Any]) -> None:
    result = np.asarray(ours)
    for peer in map(np.asarray, peers):
        worst = np.abs(result - peer).max()
        if worst > 1e-5 * max(1.0, np.abs(peer).max()):
            raise SystemExit(f"{name}: results differ by {worst:.3g}")


def forward(name: str, batch: int, threads: int, budget_s: float) -> Row:
    model, peer = getattr(models, name)(), getattr(torch_models, name)()
    peer.load_state_dict({key: torch.from_numpy(value.data) for key, value in model.state_dict().items()})
    x = np.random.default_rng(0).standard_normal((batch, 3, 32, 32)).astype(np.float32)
    others, tx, plan = onnx_models.runs(model, x, threads), torch.from_numpy(x), compile(model, x)
    with torch.inference_mode():
        check_same(name, plan(x), [peer(tx), *(run() for run in others.values())])
        runs: dict[str, Run] = {
            "tilewise": lambda: plan(x),
            "torch": lambda: peer(tx),
            **others,
        }
        return compare(f"{name} forward, batch {batch}", threads, runs, budget_s)


def training(name: str, batch: int, threads: int, budget_s: float) -> Row:
    model, peer = getattr(models, name)(), getattr(torch_models, name)()
    peer.load_state_dict({key: torch.from_numpy(value.data) for key, value in model.state_dict().items()})
    rng = np.random.default_rng(0)
    x, targets = rng.standard_normal((batch, 3, 32, 32)).astype(np.float32), rng.integers(0, 10, batch)
    ours_optimizer = optim.SGD(model.parameters(), lr=0.01)
    peer_optimizer = torch.optim.SGD(peer.parameters(), lr=0.01)
    ours, tx, tt = Tensor(x), torch.from_numpy(x), torch.from_numpy(targets)

    def our_step() -> None:
        ours_optimizer.zero_grad()
        F.cross_entropy(model(ours), targets).backward()
        ours_optimizer.step()

    def peer_step() -> None:
        peer_optimizer.zero_grad()
        torch.nn.functional.cross_entropy(peer(tx), tt).backward()
        peer_optimizer.step()

    runs: dict[str, Run] = {"tilewise": our_step, "torch": peer_step}
    return compare(f"{name} training step, batch {batch}", threads, runs, budget_s)


def layer(shape: tuple[str, int, int, int, int, int], batch: int, threads: int, budget_s: float) -> Row:
    name, c, o, side, kernel, stride = shape
    model = Sequential(Conv2d(c, o, kernel, stride, kernel // 2, rng=0), ReLU())
    conv: Conv2d = model[0]  # type: ignore[assignment]
    weight, bias = (torch.from_numpy(p.data) for p in (conv.weight, conv.bias))
    x = np.random.default_rng(0).standard_normal((batch, c, side, side)).astype(np.float32)
    others, tx, ours = onnx_models.runs(model, x, threads), torch.from_numpy(x), Tensor(x)

    def peer() -> torch.Tensor:
        return torch.relu_(torch.nn.functional.conv2d(tx, weight, bias, stride, kernel // 2))

    with no_grad(), torch.inference_mode():
        check_same(name, model(ours), [peer(), *(run() for run in others.values())])
        runs: dict[str, Run] = {
            "tilewise": lambda: model(ours),
            "torch": peer,
            **others,
        }
        return compare(f"{name}, batch {batch}", threads, runs, budget_s)


def resnet18_convolutions() -> Sequential:
    """ResNet-18's convolutions one after the other, without its shortcuts: 11 million weights, most in small images."""
    layers: list[Any] = [Conv2d(3, 64, 7, 2, 3, rng=0), ReLU(), MaxPool2d(2)]
    for channels, filters, strides in ((64, 64, (1,) * 4), (64, 128, (2, 1, 1, 1)), (128, 256, (2, 1, 1, 1))):
        for i, stride in enumerate(strides):
            layers += [Conv2d(filters if i else channels, filters, 3, stride, 1, rng=i), ReLU()]
    for i, stride in enumerate((2, 1, 1, 1)):
        layers += [Conv2d(512 if i else 256, 512, 3, stride, 1, rng=i), ReLU()]
    return Sequential(*layers)


def deep(side: int, batch: int, threads: int, budget_s: float) -> Row:
    """Time a network whose filters exceed every cache, so that each layer reads its weights from memory."""
    model = resnet18_convolutions()
    x = np.random.default_rng(0).standard_normal((batch, 3, side, side)).astype(np.float32)
    others, plan = onnx_models.runs(model, x, threads), compile(model, x)
    peer, tx = torch_models.of_layers(model), torch.from_numpy(x)
    with torch.inference_mode():
        check_same("resnet18", plan(x), [peer(tx), *(run() for run in others.values())])
        runs: dict[str, Run] = {
            "tilewise": lambda: plan(x),
            "torch": lambda: peer(tx),
            **others,
        }
        return compare(f"resnet18 convolutions at {side}, batch {batch}", threads, runs, budget_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", action="store_true", help="single layers as well")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per case")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/conv.json"))
    options = parser.parse_args()
    rows: list[Row] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        tilewise.set_num_threads(threads)
        for name, batch in (("vgg6", 32), ("resnet8", 1), ("resnet8", 32)):
            rows.append(forward(name, batch, threads, options.budget))
        rows.append(deep(224, 1, threads, options.budget))
        rows += [training(name, 32, threads, options.budget) for name in ("vgg6", "resnet8")]
        if options.layers:
            rows += [layer(shape, batch, threads, options.budget / 4) for batch in (1, 8) for shape in LAYERS]
    write_results(options.json, rows, keep=options.threads != parser.get_default("threads"))


if __name__ == "__main__":
    main()
