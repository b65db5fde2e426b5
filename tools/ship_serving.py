"""Train the ranker of serving kernels (fused MoE, block FP8) and store it in the package.

    python -m tools.ship_serving tuned_configs.tar.gz [sweeps.json ...] --leave-out device   # or: shape
    python -m tools.ship_serving tuned_configs.tar.gz [sweeps.json ...] --ship               # needs LightGBM

An archive holds winners (`tiles import vllm` describes them); a JSON file holds measured sweeps of our own kernels, as
`{"shape": {...}, "tokens": 64, "device": "NVIDIA H200", "configs": [[...six settings...]], "us": [...]}`. `--leave-out`
prints how often the tuned row's tile is the first, or among the first five, with each device or shape left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.data.importers.stream import open_sources
from tilewise.costmodel.data.importers.vllm import TILE, TunedRow, alternatives, read_rows
from tilewise.costmodel.models.gbdt import fit_trees
from tilewise.gpu.devices import Device, find_device
from tilewise.gpu.serving import ELEMENT_BYTES, FILE, ServingRanker, ServingShape, device_named, features
from tilewise.io import save
from tools.ship_ranker import flat_trees

SETTINGS = {"objective": "lambdarank", "num_leaves": 31, "learning_rate": 0.08, "min_data_in_leaf": 30, "seed": 1,
            "feature_fraction": 0.7, "bagging_fraction": 0.8, "bagging_freq": 1, "num_threads": 1,
            "lambdarank_truncation_level": 10, "label_gain": list(range(32))}  # fmt: skip
TREES = 200
COMPARED = 32  # alternatives of a winner in one query, drawn from about 75
MAX_TESTED = 60  # rows of a left-out device or shape that are scored
SWEEP_WEIGHT = 3.0  # of a measured row against one of a winner's query
_FILE_NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_NAMES = ("block_m", "block_n", "block_k", "group", "warps", "stages")


@dataclass(frozen=True)
class Query:
    """Configurations of one shape and number of tokens with their slowdowns; a winner's alternatives have 2."""

    shape: ServingShape
    tokens: int
    device_name: str
    device: Device
    configs: np.ndarray[Any, Any]  # (configurations, 6)
    slowdown: np.ndarray[Any, Any]

    def table(self) -> Any:
        return features(self.shape, self.tokens, self.device, dict(zip(_NAMES, self.configs.T, strict=True)))


def winners(path: Path, seed: int = 0) -> Iterator[Query]:
    """Yield a query per tuned row: the winner and a sample of the configurations it is compared with."""
    rng = np.random.default_rng(seed)
    for source in open_sources(path):
        for row in read_rows(source, lambda reason: None):
            shape, device = _shape(row), find_device(row.device.replace("_", " "))
            if shape is None or device is None:
                continue
            others = list(alternatives(row))
            sample = [others[i] for i in rng.permutation(len(others))[:COMPARED]]
            configs = np.array([[config.get(name, 2) for name in _FILE_NAMES] for config in (row.config, *sample)])
            slowdown = np.array([1.0, *(2.0 for _ in sample)])
            yield Query(shape, int(row.sizes["m"]), row.device, device, configs, slowdown)


def _shape(row: TunedRow) -> ServingShape | None:
    """Return the shape of a row; None for kernels and number types that the ranker does not know."""
    sizes = row.sizes
    dtype = str(sizes["dtype"])
    if row.family not in ("fused_moe", "block_fp8") or dtype not in ELEMENT_BYTES or not set(TILE) <= set(row.config):
        return None
    whole = {name: int(sizes.get(name, 0)) for name in ("n", "k", "experts")}
    return ServingShape(**whole, dtype=dtype, block_scaled="block_0" in sizes)


def sweeps(path: Path) -> Iterator[Query]:
    """Yield a query per measured sweep."""
    for sweep in json.loads(path.read_text()):
        us = np.array(sweep["us"])
        device = device_named(sweep["device"])
        shape = ServingShape(**sweep["shape"])
        yield Query(shape, sweep["tokens"], sweep["device"], device, np.array(sweep["configs"]), us / us.min())


def train(queries: Sequence[Query]) -> dict[str, Any]:
    """Fit the trees: relevance 31 for the fastest configuration, 15 for one that takes twice as long."""
    table = np.concatenate([query.table() for query in queries])
    labels = np.concatenate([np.floor(31 / query.slowdown) for query in queries])
    groups = [len(query.slowdown) for query in queries]
    weight = [np.full(len(q.slowdown), SWEEP_WEIGHT if (q.slowdown != 2).sum() > 1 else 1.0) for q in queries]
    return flat_trees(fit_trees(table, labels, TREES, SETTINGS, np.concatenate(weight), group=groups), "serving")


def hits(ranker: ServingRanker, queries: Sequence[Query]) -> Any:
    """Return for each query whether the winner's tile is the first, and whether it is among the first five."""
    result = []
    for query in queries:
        tiles = [
            tuple(config.size(name) for name in _NAMES[:3])
            for config in ranker.first_tiles(query.shape, query.tokens, query.device)
        ]
        tile = tuple(int(size) for size in query.configs[query.slowdown.argmin(), :3])
        result.append((tile == tiles[0], tile in tiles))
    return np.array(result, float)


def leave_out(queries: Sequence[Query], by: str, scratch: Path) -> None:
    """Print the table of left-out devices or shapes; only winners are tested."""
    groups: dict[Any, list[Query]] = defaultdict(list)
    for query in queries:
        key = query.device_name if by == "device" else tuple(sorted(asdict(query.shape).items()))
        groups[key].append(query)
    rng, keys = np.random.default_rng(0), sorted(groups, key=lambda key: -len(groups[key]))
    folds = [[key] for key in keys]
    if by == "shape":  # ten folds of shapes; a shape is in one fold with all its devices
        folds = [keys[number::10] for number in range(10)]
    rows = []
    for fold in folds:
        left_out = {id(query) for key in fold for query in groups[key]}
        save(train([query for query in queries if id(query) not in left_out]), scratch)
        ranker = ServingRanker(scratch)
        tested = [query for key in fold for query in groups[key]]
        sample = [tested[i] for i in rng.permutation(len(tested))[: MAX_TESTED * (1 if by == "device" else 3)]]
        first, five = hits(ranker, sample).mean(axis=0)
        rows.append((len(tested), first, five))
        print(f"{str(fold[0])[:50]:50} {len(tested):5} rows  first {first:.3f}  five {five:.3f}", flush=True)
    counts, first, five = np.array(rows).T
    print(f"mean over {len(rows)} left-out groups: first {first.mean():.3f}, five {five.mean():.3f} "
          f"(lowest {five.min():.2f}); over rows: {counts @ first / counts.sum():.3f}, "
          f"{counts @ five / counts.sum():.3f}")  # fmt: skip


def main() -> int:
    """Read the queries, then evaluate or ship."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--leave-out", choices=("device", "shape"))
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/serving_left_out.safetensors"))
    parser.add_argument("--ship", action="store_true")
    options = parser.parse_args()
    queries = [q for path in options.files for q in (sweeps(path) if path.suffix == ".json" else winners(path))]
    if options.leave_out:
        leave_out(queries, options.leave_out, options.scratch)
    if options.ship:
        save(train(queries), FILE)
        print(f"{FILE.name}: {FILE.stat().st_size / 1024:.0f} KiB from {len(queries)} queries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
