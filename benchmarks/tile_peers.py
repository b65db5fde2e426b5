"""Published ranking models as peers of TileRanker on synthetic TPU kernels, at equal seconds of training.

    python -m benchmarks.tile_peers --kernels 5000 --seconds 120 --workers 2      # all peers, three seeds
    python -m benchmarks.tile_peers --peers TileRanker auto --seeds 1             # some; the others are kept
    python -m benchmarks.tile_peers --sample op_tuning_data.pb --seeds 5          # real kernels, one left out at a time

GATv2 with ListMLE (Brody et al. 2022, Xia et al. 2008), a graph that is encoded once with attention across configs
(TGraph, Xu et al. 2024), LightGBM's LambdaRank on the raw columns and sizes, and EarlyJoinSAGE of the course. Every run
has one thread and the same processor seconds, so that other work on the machine does not decide; `auto` divides them
among its candidates. Checkpoints are chosen by the scored metric for all. Test kernels are of programs that nothing was
trained on. Intervals of a mean are Student's t over seeds; those of the difference from TileRanker are paired over the
test programs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.foreign import plain_rows
from benchmarks.harness import today
from benchmarks.ranking import summary
from course.synthetic_tiles import synthetic_dataset
from tilewise._atomic import write_atomic
from tilewise.costmodel import train
from tilewise.costmodel.baselines import random_errors
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.tpu_tiles import estimate_runtime
from tilewise.costmodel.hlo.tuning_data import read_tuning_data
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.models.torch.ragged import KernelBatch

RESULTS = Path(__file__).parent / "results" / "tile_peers.json"
OURS = "TileRanker"
_ENDLESS = {"epochs": 100_000, "early_stop": 100_000}
_LISTWISE = {"configs": 60, "clip_norm": 1.0, "schedule": "cosine", "select": "top", "eval_every": 3} | _ENDLESS
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("TileRanker", {}),
    "auto": ("auto", {}),
    "GBDT (our features)": ("GBDT", {}),
    "LightGBM LambdaRank, raw columns": ("plain", {}),
    "GATv2 + ListMLE": ("benchmarks.tile_peers:GatV2", {"losses": "ListMLELoss:1"} | _LISTWISE),
    "cross-config attention": ("benchmarks.tile_peers:CrossConfig", {"losses": "FastestFirst:1"} | _LISTWISE),
    "EarlyJoinSAGE": ("EarlyJoinSAGE", {"select": "top", "eval_every": 3} | _ENDLESS),
    "closed-form estimate, untrained": ("estimate", {}),
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


_DATA: list[Dataset] = []  # set before the workers fork, so that they share the kernels


def run_once(peer: str, seed: int, seconds: float) -> dict[str, Any]:
    """Train one peer with one seed; returns its mean errors in per cent and the top-5 errors of every test kernel."""
    torch.set_num_threads(1)
    data, started, used = _DATA[0], time.perf_counter(), time.process_time()
    # Limits are checked against these two clocks; with one thread processor seconds are those of an idle machine.
    with mock.patch.object(time, "perf_counter", time.process_time), mock.patch("time.monotonic", time.process_time):
        score = scorer(data, peer, seed, seconds)
    times = {"seconds": time.perf_counter() - started, "processor_seconds": time.process_time() - used}
    scores = [(kernel.target, score(kernel)) for kernel in data.test]
    each = {k: [100 * top_k_error(t, s, k) for t, s in scores] for k in (1, 5)}
    print(f"{peer} seed {seed}: top-1 {np.mean(each[1]):.3f} top-5 {np.mean(each[5]):.3f} {times}", flush=True)
    means = {f"top{k}": float(np.mean(values)) for k, values in each.items()}
    return means | times | {"each": [round(value, 4) for value in each[5]]}


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


def tabulate(runs: dict[str, dict[str, Any]], programs: list[str]) -> dict[str, Any]:
    """Summarize the runs of each peer, with the paired difference of its top-5 error from TileRanker's."""
    names = sorted(set(programs))
    group = np.array([names.index(program) for program in programs])
    table = {}
    for peer, by_seed in runs.items():
        table[peer] = summary(list(by_seed.values())) | {"seeds": len(by_seed)}
        shared = sorted(set(by_seed) & set(runs.get(OURS, {})))
        if peer != OURS and shared:
            gaps = np.mean([np.subtract(by_seed[s]["each"], runs[OURS][s]["each"]) for s in shared], axis=0)
            means = np.bincount(group, gaps) / np.bincount(group)
            half = 1.96 * means.std(ddof=1) / len(means) ** 0.5
            table[peer]["above_ours"] = [round(float(means.mean()), 3), round(float(half), 3)]
    return table


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--kernels", type=int, default=5000)
    flags.add_argument("--configs", type=int, default=120)
    flags.add_argument("--seconds", type=float, default=120)
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--first", type=int, default=3, help="the first seed; 0 to 2 were looked at before")
    flags.add_argument("--workers", type=int, default=1)
    flags.add_argument("--peers", nargs="*", default=list(PEERS))
    flags.add_argument("--runs", type=Path, default=Path("build/tile_peers.json"), help="errors of every test kernel")
    flags.add_argument("--out", type=Path, default=RESULTS)
    flags.add_argument("--sample", type=Path, help="a tuning file of real kernels, instead of the synthetic ones")
    options = flags.parse_args()
    torch.set_num_threads(1)
    if options.sample:
        return run_sample(options.sample, options.seeds, options.out)
    shares = options.kernels, options.kernels // 20, options.kernels // 5
    data = synthetic_dataset(*shares, seed=7 + options.first, n_configs=options.configs)
    _DATA.append(data)
    chance = {key: round(100 * float(v.mean()), 2) for key, v in random_errors(data.test, (1, 5)).items()}
    print(f"{len(data.train)} train and {len(data.test)} test kernels of other programs; chance {chance}", flush=True)
    runs = json.loads(options.runs.read_text()) if options.runs.is_file() else {}
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        jobs = {
            (peer, seed): pool.submit(run_once, peer, seed, options.seconds)
            for seed in range(options.first, options.first + options.seeds)
            for peer in options.peers
            if str(seed) not in runs.get(peer, {})
        }
        for (peer, seed), job in jobs.items():
            runs.setdefault(peer, {})[str(seed)] = job.result()
            options.runs.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(options.runs, json.dumps(runs))
    table = tabulate(runs, [kernel.program for kernel in data.test])
    sizes = {"train": len(data.train), "valid": len(data.valid), "test": len(data.test), "configs": options.configs}
    record = {"date": today(), "kernels": sizes, "seconds": options.seconds, "chance": chance, "peers": table}
    if options.out.is_file():
        record |= {key: value for key, value in json.loads(options.out.read_text()).items() if key == "sample"}
    write_atomic(options.out, json.dumps(record, indent=1) + "\n")
    for name, row in table.items():
        print(f"{name:34s} " + "  ".join(f"{key} {row[key]}" for key in row if key != "seeds"), flush=True)


if __name__ == "__main__":
    main()
