"""Published ranking models as peers of TileRanker, at equal seconds of training, on kernels of many kinds.

    python -m benchmarks.tile_peers synthetic --seconds 120 --workers 2     # synthetic TPU kernels, all peers
    python -m benchmarks.tile_peers --first 60                              # all other collections of `foreign`
    python -m benchmarks.tile_peers imported/a100 --peers TileRanker auto   # a folder, such as `tiles import` writes
    python -m benchmarks.tile_peers --sample op_tuning_data.pb --seeds 5    # real kernels, one left out at a time

GATv2 with ListMLE (Brody et al. 2022, Xia et al. 2008), a graph that is encoded once with attention across configs
(TGraph, Xu et al. 2024), LightGBM's LambdaRank on the raw columns and sizes, and EarlyJoinSAGE of the course. Every run
has one thread and the same processor seconds, so that other work on the machine does not decide; `auto` divides them
among its candidates. Checkpoints are chosen by the scored metric for all. Every run is a file of the folder `--runs`;
one that is there is not repeated. Intervals of a mean are Student's t over seeds; those of the difference from
TileRanker are paired over the programs of the synthetic test kernels, over the test kernels of other collections.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.foreign import COLLECTIONS, folder
from benchmarks.harness import today
from benchmarks.ranking import summary
from tilewise._atomic import write_atomic
from tilewise.costmodel import train
from tilewise.costmodel.baselines import random_errors
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.tpu_tiles import estimate_runtime
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.costmodel.hlo.tuning_data import read_tuning_data
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.models.torch.ragged import KernelBatch

RESULTS = Path(__file__).parent / "results" / "tile_peers.json"
OURS = "TileRanker"
_ENDLESS = {"epochs": 100_000, "early_stop": 100_000}
_LISTWISE = {"configs": 60, "clip_norm": 1.0, "schedule": "cosine", "select": "top", "eval_every": 3} | _ENDLESS
ESTIMATE = "closed-form estimate, untrained"  # of TPU kernels
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("TileRanker", {}),
    "auto": ("auto", {}),
    "GBDT (our features)": ("GBDT", {}),
    "LightGBM LambdaRank, raw columns": ("plain", {}),
    "GATv2 + ListMLE": ("benchmarks.tile_peers:GatV2", {"losses": "ListMLELoss:1"} | _LISTWISE),
    "cross-config attention": ("benchmarks.tile_peers:CrossConfig", {"losses": "FastestFirst:1"} | _LISTWISE),
    "EarlyJoinSAGE": ("EarlyJoinSAGE", {"select": "top", "eval_every": 3} | _ENDLESS),
    ESTIMATE: ("estimate", {}),
}
SAMPLE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TileRanker": ("TileRanker", {}),
    "EarlyJoinSAGE": ("EarlyJoinSAGE", {}),
}


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
        consumer, producer = batch.edges.T
        u = torch.from_numpy(np.concatenate([consumer, producer, loops])).to(x.device)
        v = torch.from_numpy(np.concatenate([producer, consumer, loops])).to(x.device)
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


def plain_rows(kernel: Kernel) -> npt.NDArray[np.float64]:
    """Return the raw columns of every configuration with the kernel's sizes, (C, columns + sizes)."""
    sizes = np.broadcast_to(kernel_sizes(kernel), (kernel.n_configs, len(kernel_sizes(kernel))))
    return np.hstack([kernel.config_feat.astype(np.float64), sizes])


def plain_lambdarank(data: Dataset, seed: int, seconds: float) -> Any:
    """LightGBM's LambdaRank on the raw columns and the kernel's sizes; trees that are finished in time are used."""
    from tilewise.costmodel.models.gbdt import fit_trees

    deadline = time.monotonic() + seconds
    table = np.concatenate([plain_rows(k) for k in data.train])
    labels = np.concatenate([np.floor(31 * k.target.min() / k.target) for k in data.train])
    settings = {"objective": "lambdarank", "label_gain": list(range(32)), "seed": seed, "num_threads": 1}
    return fit_trees(table, labels, 300, settings, group=[k.n_configs for k in data.train], deadline=deadline)


def scorer(data: Dataset, peer: str, seed: int, seconds: float) -> Any:
    """Train one peer and return its function from a kernel to scores."""
    model, settings = PEERS[peer]
    if model == "estimate":
        return lambda k: estimate_runtime(k.node_feat, k.node_opcode, k.edge_index, k.config_feat)
    if model == "plain":
        trees = plain_lambdarank(data, seed, seconds)
        return lambda kernel: -trees.predict(plain_rows(kernel), num_threads=1)
    if model == "auto":
        from tilewise.costmodel.training.auto import train_auto

        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            return train_auto(data, out_dir=folder, seed=seed, device="cpu", max_seconds=seconds).score
    threads = {"model_kwargs": {"threads": 1}} if model == "GBDT" else {}
    return train(data, model, seed=seed, progress=False, device="cpu", max_seconds=seconds, **threads, **settings).score


def run_once(data: Dataset, peer: str, seed: int, seconds: float) -> dict[str, Any]:
    """Train one peer with one seed; returns its mean errors in per cent and the errors of every test kernel."""
    started, used = time.perf_counter(), time.process_time()
    # Limits are checked against these two clocks; with one thread processor seconds are those of an idle machine.
    with mock.patch.object(time, "perf_counter", time.process_time), mock.patch("time.monotonic", time.process_time):
        score = scorer(data, peer, seed, seconds)
    times = {"seconds": time.perf_counter() - started, "processor_seconds": time.process_time() - used}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unfamiliar kernels
        scores = [(kernel.target, score(kernel)) for kernel in data.test]
    each = {f"top{k}": [round(100 * top_k_error(t, s, k), 4) for t, s in scores] for k in (1, 5)}
    return {name: float(np.mean(values)) for name, values in each.items()} | times | {"each": each}


def run_collection(name: str, seed: int, peers: list[str], seconds: float, folder_of_runs: Path) -> None:
    """Train the peers that have no file yet on one drawing of a collection."""
    paths = {peer: folder_of_runs / f"{Path(name).name}.{seed}.{peer.replace(' ', '_')}.json" for peer in peers}
    missing = [p for p in peers if not paths[p].is_file() and (name == "synthetic" or p != ESTIMATE)]
    if not missing:
        return
    torch.set_num_threads(1)
    data = COLLECTIONS[name](seed) if name in COLLECTIONS else folder(Path(name), seed)
    setting = {
        "collection": Path(name).name, "seed": seed, "limit": seconds, "date": today(),
        "kernels": {split: len(data.split(split)) for split in ("train", "valid", "test")},
        "chance": {key: 100 * float(v.mean()) for key, v in random_errors(data.test, (1, 5)).items()},
        "programs": [kernel.program if name == "synthetic" else kernel.name for kernel in data.test],
    }  # fmt: skip
    for peer in missing:
        run = run_once(data, peer, seed, seconds)
        write_atomic(paths[peer], json.dumps(setting | {"peer": peer} | run))
        print(name, seed, peer, {key: round(run[key], 3) for key in ("top1", "top5", "processor_seconds")}, flush=True)


def leave_one_out(path: Path, variant: str, seed: int) -> dict[str, float]:
    """Train without each kernel of a tuning file in turn; returns the mean errors on the one left out, in per cent."""
    model, settings = SAMPLE_VARIANTS[variant]
    kernels, each, started, used = read_tuning_data(path).kernels, [], time.perf_counter(), time.process_time()
    for number, kernel in enumerate(kernels):
        others = kernels[:number] + kernels[number + 1 :]
        # So few kernels serve as both splits: none is spared to choose a checkpoint by.
        data = dataset_from_kernels(others, others)
        score = train(data, model, seed=seed, progress=False, device="cpu", **settings).score
        each.append([100 * top_k_error(kernel.target, score(kernel), k) for k in (1, 5)])
    one, five = np.mean(each, axis=0).tolist()
    times = {"seconds": time.perf_counter() - started, "processor_seconds": time.process_time() - used}
    print(f"{variant} seed {seed}: top-1 {one:.2f} top-5 {five:.2f} {times}", flush=True)
    return {"top1": one, "top5": five} | times


def run_sample(path: Path, seeds: int, out: Path) -> None:
    """Add the table of `leave_one_out` to the results."""
    rows: dict[str, Any] = {}
    for name in SAMPLE_VARIANTS:
        rows[name] = summary([leave_one_out(path, name, seed) for seed in range(seeds)]) | {"seeds": seeds}
    record = json.loads(out.read_text()) if out.is_file() else {}
    record["sample"] = {"date": today(), "models": rows}
    write_atomic(out, json.dumps(record, indent=1) + "\n")


def tabulate(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the runs on one collection, with the paired difference of each top-5 error from TileRanker's."""
    by_peer: dict[str, dict[int, dict[str, Any]]] = {peer: {} for peer in PEERS}
    for run in runs:
        by_peer[run["peer"]][run["seed"]] = run
    table, ours = {}, by_peer[OURS]
    for peer, by_seed in by_peer.items():
        if not by_seed:
            continue
        table[peer] = summary(list(by_seed.values())) | {"seeds": len(by_seed)}
        gaps: dict[str, list[float]] = {}
        for seed in by_seed.keys() & ours.keys() if peer != OURS else ():
            pairs = zip(
                by_seed[seed]["programs"], by_seed[seed]["each"]["top5"], ours[seed]["each"]["top5"], strict=True
            )
            for program, error, our_error in pairs:
                gaps.setdefault(program, []).append(error - our_error)
        if len(gaps) > 1:
            means = np.array([np.mean(values) for values in gaps.values()])
            half = 1.96 * means.std(ddof=1) / len(means) ** 0.5
            table[peer]["above_ours"] = [round(float(means.mean()), 3), round(float(half), 3)]
    # Every seed draws other kernels, and the runs of a seed share theirs.
    chances = list({run["seed"]: run["chance"] for run in runs}.values())
    chance = {key: round(float(np.mean([c[key] for c in chances])), 2) for key in ("top1", "top5")}
    common = {key: runs[-1][key] for key in ("date", "kernels")} | {"seconds": runs[-1]["limit"]}
    return common | {"chance": chance, "peers": table}


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("collections", nargs="*", default=[name for name in COLLECTIONS if name != "synthetic"])
    flags.add_argument("--seconds", type=float, default=15, help="processor seconds of one training run")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--first", type=int, default=3, help="the first seed")
    flags.add_argument("--workers", type=int, default=1)
    flags.add_argument("--peers", nargs="*", default=list(PEERS))
    flags.add_argument("--runs", type=Path, default=Path("build/tile_peers"), help="folder with a file for every run")
    flags.add_argument("--out", type=Path, default=RESULTS)
    flags.add_argument("--sample", type=Path, help="a tuning file of real kernels, instead of the collections")
    options = flags.parse_args()
    torch.set_num_threads(1)
    if options.sample:
        return run_sample(options.sample, options.seeds, options.out)
    options.runs.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.workers) as pool:
        seeds = range(options.first, options.first + options.seeds)
        jobs = [
            pool.submit(run_collection, name, seed, options.peers, options.seconds, options.runs)
            for name in options.collections
            for seed in seeds
        ]
        for job in jobs:
            job.result()
    record = json.loads(options.out.read_text()) if options.out.is_file() else {}
    tables = record.setdefault("collections", {})
    runs = [json.loads(path.read_text()) for path in sorted(options.runs.glob("*.json"))]
    for name in (Path(name).name for name in options.collections):
        tables[name] = tabulate([run for run in runs if run["collection"] == name])
        for peer, row in tables[name]["peers"].items():
            print(
                f"{name:24s} {peer:34s} " + "  ".join(f"{key} {row[key]}" for key in row if key != "seeds"), flush=True
            )
    write_atomic(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
