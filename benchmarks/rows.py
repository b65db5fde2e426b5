"""Row kernels, attention and GPT training steps compared with PyTorch.

    python -m benchmarks.rows [--threads 1 2] [--json benchmarks/results/rows.json] [--only attention]

Every result is compared with PyTorch's before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewise
from benchmarks import torch_models
from benchmarks.harness import Row, Run, compare, write_results
from tilewise import models, no_grad, optim
from tilewise.backend import current_backend
from tilewise.nn import functional as F

Array = np.ndarray[Any, Any]
Pair = tuple[Run, Run]  # ours, PyTorch's
aten = torch.ops.aten

MATRICES = [(2048, 384), (2048, 1536), (12288, 256), (64, 50257)]
NORMS = [(2048, 384), (8192, 768)]
HEADS = [(8, 6, 256, 64), (1, 12, 1024, 64), (4, 4, 512, 128), (8, 4, 256, 32)]  # B, H, T, D


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def ours(op: str, *args: Any, **settings: Any) -> Run:
    return lambda: current_backend().dispatch(op, *args, **settings)


def elementwise() -> Iterator[tuple[str, Pair]]:
    for shape in MATRICES[:2]:
        x, g = random(*shape), random(*shape, seed=1)
        tx, tg = torch.from_numpy(x), torch.from_numpy(g)
        yield f"gelu {shape}", (ours("gelu", x), lambda tx=tx: torch.nn.functional.gelu(tx))
        yield f"gelu gradient {shape}", (ours("gelu_grad", x, g), lambda tx=tx, tg=tg: aten.gelu_backward(tg, tx))
        yield f"relu {shape}", (ours("relu", x), lambda tx=tx: torch.relu(tx))
        yield f"column sums {shape}", (ours("sum_rows", x), lambda tx=tx: tx.sum(0))


def softmax() -> Iterator[tuple[str, Pair]]:
    for shape in MATRICES:
        x, g = random(*shape), random(*shape, seed=1)
        tx, tg = torch.from_numpy(x), torch.from_numpy(g)
        y = torch.softmax(tx, -1)
        yield f"softmax {shape}", (ours("softmax", x), lambda tx=tx: torch.softmax(tx, -1))
        yield (
            f"softmax gradient {shape}",
            (
                ours("softmax_grad", y.numpy(), g),
                lambda tg=tg, y=y: aten._softmax_backward_data(tg, y, -1, torch.float32),
            ),
        )


def layer_norm() -> Iterator[tuple[str, Pair]]:
    for shape in NORMS:
        x, g, w, b = random(*shape), random(*shape, seed=1), random(shape[1], seed=2), random(shape[1], seed=3)
        tx, tg, tw, tb = map(torch.from_numpy, (x, g, w, b))
        size = [shape[1]]
        _, mean, rstd = aten.native_layer_norm(tx, size, tw, tb, 1e-5)
        statistics = (mean.numpy().ravel(), rstd.numpy().ravel())
        yield (
            f"layer norm {shape}",
            (ours("layer_norm", x, w, b, 1e-5), lambda a=(tx, size, tw, tb, 1e-5): aten.native_layer_norm(*a)),
        )
        every = (tg, tx, size, mean, rstd, tw, tb, [True] * 3)
        yield (
            f"layer norm gradient {shape}",
            (ours("layer_norm_grad", g, x, w, *statistics), lambda a=every: aten.native_layer_norm_backward(*a)),
        )


def attention() -> Iterator[tuple[str, Pair]]:
    """Causal, on the views that split a packed projection."""
    for b, h, t, d in HEADS:
        packed, gout = random(b, t, 3, h, d), random(b, t, h, d, seed=1).transpose(0, 2, 1, 3)
        q, k, v = packed.transpose(2, 0, 3, 1, 4)
        leaves = [torch.from_numpy(a).requires_grad_() for a in (q, k, v)]
        tg = torch.from_numpy(gout)
        saved = current_backend().dispatch("attention", q, k, v, causal=True)
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        yield (
            f"attention {(b, h, t, d)}",
            (
                ours("attention", q, k, v, causal=True),
                torch.no_grad()(lambda a=leaves: torch.nn.functional.scaled_dot_product_attention(*a, is_causal=True)),
            ),
        )
        yield (
            f"attention gradient {(b, h, t, d)}",
            (
                ours("attention_grad", gout, q, k, v, *saved, causal=True),
                lambda out=out, a=leaves, tg=tg: torch.autograd.grad(out, a, tg, retain_graph=True),
            ),
        )


def adam() -> Iterator[tuple[str, Pair]]:
    n = 10_800_000
    param, grad, m, v = random(n), random(n, seed=1), np.zeros(n, np.float32), np.zeros(n, np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(param.copy()))
    theirs.grad = torch.from_numpy(grad)
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, fused=True)
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True}
    yield "AdamW of 10.8M (fused)", (ours("adam_step", param, grad, m, v, step=9, **settings), optimizer.step)


def gpt() -> Iterator[tuple[str, Pair]]:
    """Forward and one whole training step: batch 8 of 256 tokens, AdamW."""
    ids, targets = np.random.default_rng(0).integers(0, 65, (2, 8, 256))
    tids, ttargets = torch.from_numpy(ids), torch.from_numpy(targets).flatten()
    for size in ("4x128", "6x384"):
        model, peer = models.gpt(size), torch_models.gpt(size)
        peer.load_state_dict({name: torch.from_numpy(value.data.copy()) for name, value in model.state_dict().items()})
        ours_opt, peer_opt = optim.AdamW(model.parameters(), lr=1e-4), torch.optim.AdamW(peer.parameters(), lr=1e-4)

        def our_step(model: Any = model, optimizer: Any = ours_opt) -> Array:
            loss = F.cross_entropy(model(ids), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return np.asarray(loss.data)

        def peer_step(peer: Any = peer, optimizer: Any = peer_opt) -> Any:
            loss = torch.nn.functional.cross_entropy(peer(tids).flatten(0, 1), ttargets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        yield (
            f"gpt {size} forward 8 x 256",
            (
                no_grad()(lambda model=model: model(ids).data),
                torch.no_grad()(lambda peer=peer: peer(tids)),
            ),
        )
        yield f"gpt {size} training step 8 x 256", (our_step, peer_step)


SUITES: dict[str, Callable[[], Iterator[tuple[str, Pair]]]] = {
    "elementwise": elementwise,
    "softmax": softmax,
    "layer_norm": layer_norm,
    "attention": attention,
    "adam": adam,
    "gpt": gpt,
}


def check_same(name: str, ours: Any, theirs: Any) -> None:
    """Stop where the results differ by more than float32 allows; Adam returns nothing and is tested elsewhere."""
    if ours is None:
        return
    one = ours[0] if isinstance(ours, tuple) else ours
    two = (theirs[0] if isinstance(theirs, tuple | list) else theirs).detach().numpy()
    worst = float(np.abs(one - two).max())
    if not worst <= 3e-5 * max(1.0, float(np.abs(two).max())):
        raise SystemExit(f"{name}: results differ by {worst:.3g}")


def measure(names: list[str], threads: int, budget_s: float) -> list[Row]:
    tilewise.set_num_threads(threads)
    torch.set_num_threads(threads)
    rows = []
    for suite in names:
        for name, (mine, theirs) in SUITES[suite]():
            check_same(name, mine(), theirs())
            rows.append(compare(name, threads, {"tilewise": mine, "torch": theirs}, budget_s))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--only", choices=list(SUITES), nargs="+", default=list(SUITES))
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per case")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/rows.json"))
    options = parser.parse_args()
    rows = [row for threads in options.threads for row in measure(options.only, threads, options.budget)]
    write_results(options.json, rows)


if __name__ == "__main__":
    main()
