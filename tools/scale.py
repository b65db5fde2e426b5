"""Check that a collection of TpuGraphs' size converts and trains within 4 GiB, in time linear in its kernels.

    python -m tools.scale --kernels 6000 --configs 13000000 --folder DIR

The kernels are random; only their number and size matter here. Writes the files under DIR (about 2 GB, more while they
are converted), opens them with a cold cache, trains one epoch on a quarter, a half and all of them, and prints seconds
and the peak resident memory of each step. DIR is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

_STEP = """
import json, resource, sys, time
import torch
torch.set_num_threads({threads})
from tilewise.costmodel import load_dataset, train
started = time.perf_counter()
data = load_dataset({folder!r}, cache_dir={cache!r}, limit={limit}, progress=False)
opened = time.perf_counter() - started
out = {{"kernels": len(data.train), "configs": data.train.n_configs, "open_s": round(opened, 1)}}
if {model!r}:
    model = train(data, {model!r}, epochs=1, progress=False, validate_batches=1, device="cpu")
    out |= {{"model": {model!r}, "epoch_s": round(model.record["seconds"], 1)}}
    out["total_s"] = round(time.perf_counter() - started, 1)
out["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
print(json.dumps(out))
"""


def write_kernels(folder: Path, kernels: int, configs: int, seed: int = 0) -> None:
    """Write random kernels of 2 to some thousand configurations and about 40 nodes as npz files."""
    rng = np.random.default_rng(seed)
    shares = rng.lognormal(0.0, 1.0, kernels)
    counts = np.maximum(2, shares / shares.sum() * configs).astype(int)
    for number, count in enumerate(counts):
        nodes = int(rng.integers(10, 70))
        tiles = 2.0 ** rng.integers(0, 9, (count, 24))
        edges = np.stack([np.arange(1, nodes), rng.integers(0, np.arange(1, nodes))], axis=1)
        feat = np.zeros((nodes, 140), np.float32)
        feat[:, 21:25] = 2 ** rng.integers(1, 10, (nodes, 4))
        np.savez(
            folder / f"program{number % 50}_{number:08x}.npz",
            node_feat=feat,
            node_opcode=rng.integers(1, 96, nodes).astype(np.uint8),
            edge_index=edges,
            config_feat=tiles.astype(np.float32),
            config_runtime=np.maximum(1, 1000 * tiles[:, :3].prod(1) ** 0.1).astype(np.int64),
            config_runtime_normalizers=np.full(count, 2000),
        )


def step(folder: Path, limit: int | None, model: str, threads: int) -> dict[str, float]:
    """Open the collection and train in a separate process, whose peak memory is then that of this step alone."""
    cache = str(folder.parent / "cache")
    code = _STEP.format(folder=str(folder), cache=cache, limit=limit, model=model, threads=threads)
    output = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(output.stdout)
    print(json.dumps(figures), flush=True)
    return figures


def main() -> None:
    """Write the collection, measure each step, and remove the collection."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--kernels", type=int, default=6000)
    flags.add_argument("--configs", type=int, default=13_000_000)
    flags.add_argument("--folder", type=Path, required=True)
    flags.add_argument("--models", default="EarlyJoinSAGE,TileRanker")
    flags.add_argument("--threads", type=int, default=1)
    options = flags.parse_args()
    root = options.folder / "tilewise-scale"
    try:
        for split, kernels in (("train", options.kernels), ("valid", max(1, options.kernels // 60))):
            (root / "data" / split).mkdir(parents=True)
            started = time.perf_counter()
            write_kernels(root / "data" / split, kernels, int(options.configs * kernels / options.kernels))
            print(f"{split}: {kernels} files written in {time.perf_counter() - started:.0f} s", flush=True)
        step(root / "data", None, "", options.threads)
        for model in options.models.split(","):
            for limit in (options.kernels // 4, options.kernels // 2, options.kernels):
                step(root / "data", limit, model, options.threads)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
