"""Train the ranker of serving kernels (fused MoE, block FP8) and store it in the package.

    python -m tools.ship_serving tuned_configs.tar.gz [sweeps.json ...] --leave-out device   # or: shape
    python -m tools.ship_serving tuned_configs.tar.gz [sweeps.json ...] --ship               # needs LightGBM

An archive holds winners (`tiles import vllm` describes them); a JSON file holds measured sweeps of our own kernels, as
`{"shape": {...}, "tokens": 64, "device": "NVIDIA H200", "configs": [[...six settings...]], "us": [...], "tuned": [...],
"default": [...]}` (`benchmarks/results/serving_sweeps_h200.json`, with the two rows of vLLM). `--leave-out`
trains without each device, or shape, and writes `benchmarks/results/serving.json`, which docs/gpu.md shows.
"""

from __future__ import annotations

import argparse
import functools
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
from tilewise.store.problem import Config
from tools.ship_ranker import flat_trees

RANKING = {"objective": "lambdarank", "num_leaves": 31, "learning_rate": 0.08, "min_data_in_leaf": 30, "seed": 1,
           "feature_fraction": 0.7, "bagging_fraction": 0.8, "bagging_freq": 1, "num_threads": 1,
           "lambdarank_truncation_level": 10, "label_gain": list(range(32))}  # fmt: skip
REGRESSION = {"objective": "regression", "num_leaves": 63, "learning_rate": 0.08, "min_data_in_leaf": 10, "seed": 1,
              "feature_fraction": 0.6, "bagging_fraction": 0.8, "bagging_freq": 1, "num_threads": 1, "lambda_l2": 2.0,
              "extra_trees": True}  # fmt: skip
TREES = 200
FOLDS = 10  # of the measured shapes
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "serving.json"
COMPARED = 32  # alternatives of a winner in one query, drawn from about 75
MAX_TESTED = 48  # rows of a left-out device or shape that are scored
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
    others: dict[str, float] | None = None  # of a sweep: slowdowns of vLLM's tuned row and of its default rule

    @property
    def is_sweep(self) -> bool:
        return self.others is not None

    @functools.cached_property
    def table(self) -> Any:
        return features(self.shape, self.tokens, self.device, dict(zip(_NAMES, self.configs.T, strict=True))).astype(
            np.float32
        )


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
        slowdown = np.array(sweep["us"]) / min(sweep["us"])
        rows = {tuple(config): float(value) for config, value in zip(sweep["configs"], slowdown, strict=True)}
        others = {name: rows[tuple(sweep[name])] for name in ("tuned", "default") if tuple(sweep[name]) in rows}
        shape, device = ServingShape(**sweep["shape"]), device_named(sweep["device"])
        configs = np.array(sweep["configs"])
        yield Query(shape, sweep["tokens"], sweep["device"], device, configs=configs, slowdown=slowdown, others=others)


def train(queries: Sequence[Query]) -> dict[str, Any]:
    """Fit both sets of trees: to the order of the winners, and to the log slowdowns of the sweeps."""
    by_kind: dict[bool, list[Query]] = {True: [], False: []}
    for query in queries:
        by_kind[query.is_sweep].append(query)
    table, slowdown, groups = _stack(by_kind[False])
    # Relevance 31 for the winner, 15 for the others, as for a configuration that takes twice as long.
    winners_trees = fit_trees(table, np.floor(31 / slowdown), TREES, RANKING, group=groups)
    arrays = flat_trees(winners_trees, "winners")
    if not by_kind[True]:  # the only measured device is left out: a leaf of 0 in place of the times
        dtypes = {name.partition(".")[2]: array.dtype for name, array in arrays.items()}
        leaf = {"feature": -1, "threshold": 0, "left": 0, "right": 0, "value": 0, "root": 0}
        return arrays | {f"times.{part}": np.array([value], dtypes[part]) for part, value in leaf.items()}
    table, slowdown, _ = _stack(by_kind[True])
    logs = np.log(slowdown)
    times_trees = fit_trees(table, logs, TREES, REGRESSION, np.exp(-2 * np.minimum(logs, 2)))
    return arrays | flat_trees(times_trees, "times")


def _stack(queries: Sequence[Query]) -> tuple[Any, Any, list[int]]:
    """Join the tables and the slowdowns of queries, and count the rows of each."""
    slowdowns = [query.slowdown for query in queries]
    return np.concatenate([query.table for query in queries]), np.concatenate(slowdowns), [*map(len, slowdowns)]


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


def leave_out_devices(queries: Sequence[Query], scratch: Path) -> dict[str, Any]:
    """Train without each device in turn; return the shares of its winners' tiles that are first, and in the first five.

    Sweeps of the same device are left out too.
    """
    rng, groups = np.random.default_rng(0), defaultdict[str, list[Query]](list)
    for query in queries:
        if not query.is_sweep:
            groups[query.device_name].append(query)
    rows = {}
    for name, tested in sorted(groups.items(), key=lambda item: -len(item[1])):
        device = tested[0].device
        save(train([query for query in queries if query.device is not device]), scratch)
        sample = [tested[i] for i in rng.permutation(len(tested))[:MAX_TESTED]]
        first, five = hits(ServingRanker(scratch), sample).mean(axis=0)
        rows[name] = {"rows": len(tested), "first": first, "five": five}
        print(f"{name:50} {len(tested):5} rows  first {first:.3f}  five {five:.3f}", flush=True)
    return rows


def leave_out_shapes(queries: Sequence[Query], scratch: Path) -> list[dict[str, Any]]:
    """Train without a tenth of the measured shapes in turn; choose among their measured configurations.

    A shape is left out with its winners on all devices. Values are slowdowns against the fastest measured one.
    """
    shapes = list(dict.fromkeys(query.shape for query in queries if query.is_sweep))
    results = []
    for number in range(FOLDS):
        fold = set(shapes[number::FOLDS])
        save(train([query for query in queries if query.shape not in fold]), scratch)
        ranker = ServingRanker(scratch)
        for query in queries:
            if query.others is not None and query.shape in fold:
                configs = [Config(dict(zip(_NAMES, map(int, row), strict=True))) for row in query.configs]
                choice = int(np.argmin(ranker.scores(query.shape, query.tokens, query.device, configs)))
                row = {"tokens": query.tokens, "ours": float(query.slowdown[choice]), **query.others}
                results.append(asdict(query.shape) | row)
        print(f"fold {number}: {len(results)} problems", flush=True)
    return results


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
        results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        evaluation = leave_out_devices if options.leave_out == "device" else leave_out_shapes
        results[options.leave_out] = evaluation(queries, options.scratch)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if options.ship:
        save(train(queries), FILE)
        print(f"{FILE.name}: {FILE.stat().st_size / 1024:.0f} KiB from {len(queries)} queries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
