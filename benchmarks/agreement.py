"""Compares outputs with ONNX Runtime's for torchvision's networks as PyTorch exports them: loaded, planned and saved.

    python -m benchmarks.agreement [--only resnet18 vgg11] [--exporters old new] [--size 97 224] [--batch 1 3]

Weights are random, batch norms have seen noise; errors are shares of the largest output of ONNX Runtime on PyTorch's
file, of the module, of its plan, and of ONNX Runtime on the file that `tilewise.onnx.save` wrote. Above 1e-4 it
fails. torchvision is no dependency of tilewise: `pip install --no-deps torchvision`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewise.onnx
import tilewise.plan
from benchmarks.networks import onnx_runtime
from tilewise import no_grad

NETWORKS = (
    "resnet18", "resnet50", "resnext50_32x4d", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0",
    "shufflenet_v2_x1_0", "densenet121", "squeezenet1_1", "vit_b_16", "regnet_y_400mf", "mnasnet0_5", "googlenet",
    "convnext_tiny", "resnet34", "vgg11_bn", "alexnet", "efficientnet_v2_s", "shufflenet_v2_x0_5", "mobilenet_v3_small",
)  # fmt: skip
_NEAR = 1e-4


def torchvision_models() -> Any:
    """The package without its compiled operations, which a PyTorch of another build may refuse."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        return __import__("torchvision.models").models
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"torchvision cannot be used: {error}") from None


def network(models: Any, name: str, size: int) -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    model = getattr(models, name)(weights=None, **options, **({"image_size": size} if name.startswith("vit") else {}))
    side = size if name.startswith("vit") else 64
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():  # a head that starts with nothing would say nothing
                weight.normal_(std=0.02)
        model.train()(torch.randn(4, 3, side, side))
    return model.eval()


def errors(model: torch.nn.Module, x: np.ndarray, dynamo: bool, folder: Path) -> dict[str, float]:
    path, again = folder / "network.onnx", folder / "again.onnx"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.from_numpy(x),), str(path), dynamo=dynamo, verbose=False)
    want = onnx_runtime(path, x, 1)()
    loaded = tilewise.onnx.load(path)
    with no_grad():
        outputs = {"module": loaded(x).data, "plan": tilewise.plan.compile(loaded, x)(x)}
    tilewise.onnx.save(loaded, again, x)
    outputs["saved again"] = onnx_runtime(again, x, 1)()
    return {who: float(np.abs(output - want).max() / np.abs(want).max()) for who, output in outputs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--exporters", nargs="+", choices=("old", "new"), default=("old", "new"))
    parser.add_argument("--size", type=int, nargs="+", default=[224])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.backends.mha.set_fastpath_enabled(False)  # which the old exporter does not know
    models, worst = torchvision_models(), 0.0
    for name, size, batch, exporter in itertools.product(options.only, options.size, options.batch, options.exporters):
        x = np.random.default_rng(size).standard_normal((batch, 3, size, size), dtype=np.float32)
        with tempfile.TemporaryDirectory() as folder:
            by_path = errors(network(models, name, size), x, exporter == "new", Path(folder))
        worst = max(worst, *by_path.values())
        line = ", ".join(f"{who} {error:.1e}" for who, error in by_path.items())
        print(f"{name:20s} {size}×{size}, batch {batch}, {exporter} exporter: {line}", flush=True)
    print(f"largest error {worst:.1e}")
    if not worst <= _NEAR:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
