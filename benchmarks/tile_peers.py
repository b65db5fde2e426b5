"""Published ranking models as peers of TileRanker on synthetic TPU kernels, at equal seconds of training.

    python -m benchmarks.tile_peers --kernels 400 --seconds 30 --seeds 3

GATv2 with ListMLE (Brody et al. 2022, Xia et al. 2008), a graph that is encoded once with attention across configs
(TGraph, Xu et al. 2024), LightGBM's LambdaRank on the raw columns and sizes, and EarlyJoinSAGE of the course. Test
kernels are of programs that nothing was trained on; intervals are Student's t over seeds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.foreign import plain_rows
from benchmarks.ranking import summary
from course.synthetic_tiles import synthetic_dataset
from tilewise.costmodel import train
from tilewise.costmodel.baselines import random_errors
from tilewise.costmodel.data.dataset import Dataset
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.models.torch.ragged import KernelBatch

PEERS = {
    "TileRanker": ("TileRanker", {}),
    "GATv2 + ListMLE": ("benchmarks.tile_peers:GatV2", {"losses": "ListMLELoss:1", "configs": 60, "clip_norm": 1.0}),
    "cross-config attention": ("benchmarks.tile_peers:CrossConfig", {"losses": "FastestFirst:1", "configs": 60,
                                                                     "clip_norm": 1.0}),
    "EarlyJoinSAGE": ("EarlyJoinSAGE", {}),
    "GBDT (our features)": ("GBDT", {}),
}  # fmt: skip


class GatV2(nn.Module):
    """Two GATv2 layers over both directions of the edges, mean pooling, and a network on kernel and configuration."""

    def __init__(self, node_width: int, config_width: int, hidden_dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(121, 32)
        self.node_in = nn.Linear(node_width + 32, hidden_dim)
        self.source = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(2))
        self.target = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(2))
        self.weight = nn.ModuleList(nn.Linear(hidden_dim, 1) for _ in range(2))
        self.head = nn.Sequential(
            nn.Linear(hidden_dim + config_width, 2 * hidden_dim), nn.LeakyReLU(0.2),
            nn.Linear(2 * hidden_dim, hidden_dim), nn.LeakyReLU(0.2), nn.Linear(hidden_dim, 1),
        )  # fmt: skip

    def encode(self, batch: KernelBatch) -> Tensor:
        """Return the mean node vector of each kernel, (K, H)."""
        x = functional.leaky_relu(self.node_in(torch.cat([batch.node, self.embedding(batch.opcode)], dim=1)), 0.2)
        loops = np.arange(batch.n_nodes)
        u = torch.from_numpy(np.concatenate([batch.consumer, batch.producer, loops]))
        v = torch.from_numpy(np.concatenate([batch.producer, batch.consumer, loops]))
        for source, target, weight in zip(self.source, self.target, self.weight, strict=True):
            messages = source(x)
            logits = weight(functional.leaky_relu(messages[u] + target(x)[v], 0.2))[:, 0]
            # Softmax over the edges that end in a node.
            exp = (logits - logits.max()).exp()
            total = torch.zeros(batch.n_nodes).index_add(0, v, exp)
            x = x + functional.leaky_relu(
                torch.zeros_like(x).index_add(0, v, messages[u] * (exp / total[v])[:, None]), 0.2
            )
        counts = torch.as_tensor(batch.node_counts, dtype=x.dtype)[:, None]
        return torch.zeros(len(counts), x.shape[1]).index_add(0, batch.kernel_of_node, x) / counts

    def forward(self, batch: KernelBatch) -> Tensor:
        kernel = self.encode(batch)[:, None].expand(-1, batch.config.shape[1], -1)
        scores: Tensor = self.head(torch.cat([kernel, batch.config], dim=-1))[..., 0]
        return scores


class CrossConfig(GatV2):
    """The same encoder, with attention across the configurations of a kernel before the last layers."""

    def __init__(self, node_width: int, config_width: int, hidden_dim: int = 64) -> None:
        super().__init__(node_width, config_width, hidden_dim)
        self.join = nn.Linear(hidden_dim + config_width, hidden_dim)
        self.temperature = nn.Parameter(torch.ones(()))
        self.last = nn.Sequential(nn.Linear(2 * hidden_dim, hidden_dim), nn.LeakyReLU(0.2), nn.Linear(hidden_dim, 1))

    def forward(self, batch: KernelBatch) -> Tensor:
        kernel = self.encode(batch)[:, None].expand(-1, batch.config.shape[1], -1)
        h = functional.leaky_relu(self.join(torch.cat([kernel, batch.config], dim=-1)), 0.2)
        across = h * (h * self.temperature).softmax(dim=1) * h.shape[1]
        scores: Tensor = self.last(torch.cat([h, across], dim=-1))[..., 0]
        return scores


def plain_lambdarank(data: Dataset, seed: int) -> Any:
    """LightGBM's LambdaRank on the raw columns and the kernel's sizes."""
    import lightgbm

    table = np.concatenate([plain_rows(k) for k in data.train])
    labels = np.concatenate([np.floor(31 * k.target.min() / k.target) for k in data.train])
    settings = {"objective": "lambdarank", "label_gain": list(range(32)), "seed": seed, "verbose": -1, "num_threads": 1}
    groups = [k.n_configs for k in data.train]
    return lightgbm.train(settings, lightgbm.Dataset(table, labels, group=groups), 300)


def errors(data: Dataset, score: Any) -> dict[str, float]:
    scores = [(kernel.target, score(kernel)) for kernel in data.test]
    return {f"top{k}": 100 * float(np.mean([top_k_error(t, s, k) for t, s in scores])) for k in (1, 5)}


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--kernels", type=int, default=400)
    flags.add_argument("--seconds", type=float, default=30)
    flags.add_argument("--seeds", type=int, default=3)
    options = flags.parse_args()
    torch.set_num_threads(1)
    data = synthetic_dataset(options.kernels, options.kernels // 10, options.kernels // 4, seed=7)
    chance = {key: round(100 * float(v.mean()), 2) for key, v in random_errors(data.test, (1, 5)).items()}
    print(f"{len(data.train)} train and {len(data.test)} test kernels of other programs; chance {chance}", flush=True)
    for name, (model, settings) in [*PEERS.items(), ("LightGBM, raw columns", ("", {}))]:
        runs = []
        for seed in range(options.seeds):
            started, used = time.perf_counter(), time.process_time()
            if model:
                limits = {"max_seconds": options.seconds, "epochs": 100_000, "early_stop": 100_000}
                limits |= {"epochs": 30, "eval_every": 6} if name == "TileRanker" else {"eval_every": 10}
                limits = {"max_seconds": options.seconds} if model == "GBDT" else limits
                trained = train(data, model, seed=seed, progress=False, device="cpu", **settings, **limits)
                score = trained.score
            else:
                trees = plain_lambdarank(data, seed)
                score = lambda kernel, trees=trees: -trees.predict(plain_rows(kernel))  # noqa: E731
            seconds = {"seconds": time.perf_counter() - started, "processor_seconds": time.process_time() - used}
            runs.append(errors(data, score) | seconds)
        row = summary(runs)
        print(f"{name:24s} " + "  ".join(f"{key} {row[key][0]:7.3f} ± {row[key][1]:.3f}" for key in row), flush=True)


if __name__ == "__main__":
    main()
