"""Times one training step (forward, loss, backward, AdamW) of the reference models against PyTorch, from the same
weights, and the forward pass of the GPT alone.

    python -m benchmarks.train_step [--threads 1 2] [--only vgg6 gpt] [--json benchmarks/results/train_step.json]

Before timing, the two losses of three steps are compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF

import tilewise as tw
from benchmarks import torch_models
from benchmarks.harness import Row, Run, compare, write_results
from tilewise import interop, models, optim
from tilewise.nn import functional as F

CASES = {
    "vgg6": "vgg6, batch 32",
    "resnet8": "resnet8, batch 32",
    "gpt": "gpt 6x384, 8 x 256 tokens",
    "gpt_small": "gpt 4x128, 16 x 256 tokens",
    "gpt_forward": "gpt 6x384 forward, 8 x 256 tokens",
}


def batch(name: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    if name.startswith("gpt"):
        ids = rng.integers(0, 65, (16 if name == "gpt_small" else 8, 257))
        return ids[:, :-1].copy(), ids[:, 1:].copy()
    return rng.standard_normal((32, 3, 32, 32), dtype=np.float32), rng.integers(0, 10, 32)


def pair(name: str) -> tuple[Any, Any]:
    """Return our model and PyTorch's with the same weights."""
    size = {"gpt": ("6x384",), "gpt_small": ("4x128",), "gpt_forward": ("6x384",)}.get(name, ())
    kind = "gpt" if size else name
    ours, theirs = getattr(models, kind)(*size), torch_models.MODELS[kind](*size)
    theirs.load_state_dict(interop.to_torch(ours))
    return ours, theirs


def steps(name: str) -> tuple[Run, Run]:
    """A step of ours and a step of PyTorch's, each returning its loss."""
    ours, theirs = pair(name)
    x, y = batch(name)
    mine, reference = optim.AdamW(ours.parameters(), 1e-4), torch.optim.AdamW(theirs.parameters(), 1e-4)
    x_ours = x if name.startswith("gpt") else tw.Tensor(x)
    x_torch, y_torch = torch.from_numpy(x), torch.from_numpy(y).reshape(-1)

    def our_step() -> float:
        mine.zero_grad()
        loss = F.cross_entropy(ours(x_ours), y)
        loss.backward()
        mine.step()
        return float(loss.item())

    def torch_step() -> float:
        reference.zero_grad()
        logits = theirs(x_torch)
        loss = TF.cross_entropy(logits.reshape(-1, logits.shape[-1]), y_torch)
        loss.backward()
        reference.step()
        return float(loss.item())

    return our_step, torch_step


def forwards() -> tuple[Run, Run]:
    """The GPT without gradients, ours and PyTorch's, each returning a number that its logits fix."""
    ours, theirs = pair("gpt_forward")
    x, _ = batch("gpt_forward")
    x_torch = torch.from_numpy(x)
    ours.eval()
    theirs.eval()

    def our_forward() -> float:
        with tw.no_grad():
            return float(ours(x).data[-1, -1, -1])

    def torch_forward() -> float:
        with torch.inference_mode():
            return float(theirs(x_torch)[-1, -1, -1])

    return our_forward, torch_forward


def check_same(name: str, our_step: Run, torch_step: Run) -> None:
    for number in range(3):
        ours, theirs = our_step(), torch_step()
        if not abs(ours - theirs) <= 1e-3 * abs(theirs):
            raise SystemExit(f"{name}: the results of step {number} differ: {ours:.6g} and {theirs:.6g}")


def measure(names: list[str], threads: int, budget_s: float) -> list[Row]:
    tw.set_num_threads(threads)
    torch.set_num_threads(threads)
    rows = []
    for name in names:
        ours, theirs = forwards() if name == "gpt_forward" else steps(name)
        check_same(name, ours, theirs)
        rows.append(compare(CASES[name], threads, {"tilewise": ours, "torch": theirs}, budget_s))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--budget", type=float, default=4.0, help="seconds per case")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/train_step.json"))
    options = parser.parse_args()
    rows = [row for threads in options.threads for row in measure(options.only, threads, options.budget)]
    whole = (options.threads, options.only) == (parser.get_default("threads"), list(CASES))
    write_results(options.json, rows, keep=not whole)


if __name__ == "__main__":
    main()
