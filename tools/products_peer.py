"""Compare choices for matrix products with those of nvMatmulHeuristics, on products that no model was trained on.

`python -m tools.products_peer answers --seed S --out FILE` asks nvMatmulHeuristics (no GPU needed; its tiles are those
of another library and are mapped to the nearest kernel here) about the products that `tools.gpu_visit --products N
--seed S --check FILE` then measures. `python -m tools.products_peer record VISIT --answers FILE --out FILE` converts
that visit to the file that `python3 -m tilewise.tune.triton.check --recorded FILE` reads.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorded import RecordedProduct, as_json, lines, read_recorded, table
from tilewise.gpu.devices import H200
from tilewise.gpu.products.family import ProductFamily
from tilewise.gpu.products.roofline import CUBLAS, SPLIT_K, STREAM_K, TRANSPOSED, is_cublas
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.store.aggregate import measured_problem, open_measurements
from tilewise.store.problem import Config
from tools.gpu_visit import random_product_kernels, read_answers

_FAMILY, _SHARED_BYTES = ProductFamily(), H200.shared_bytes_per_block


def recommended_kernels(sizes: Sequence[int], layout: str, count: int) -> list[Any]:
    """Ask the peer for (m, n, k): kernels with their tile, stages and split-K, the best first."""
    import nvMatmulHeuristics as nv

    gpus = nv.NvMatmulHeuristicsNvidiaGpu
    gpu = gpus.H200_SXM if hasattr(gpus, "H200_SXM") else gpus.H100_SXM
    interface = nv.NvMatmulHeuristicsInterfaceEx(backend=nv.NvMatmulHeuristicsTarget.CUTLASS3, gpu=gpu)
    answers = interface.get_with_mnk(*sizes, nv.NvMatmulHeuristicsMatmulLayout[f"{layout.upper()}_ROW_MAJOR"], count)
    return [one["kernel"] if isinstance(one, dict) else one.kernel for one in answers]


def nearest(configs: list[Config], answer: Any) -> Config:
    """Find the kernel whose tile, split-K and stages are closest to an answer's."""

    def distance(config: Config) -> float:
        tile = zip(("block_m", "block_n", "block_k"), (answer.cta_tile_m, answer.cta_tile_n, answer.cta_tile_k),
                   strict=True)  # fmt: skip
        total = sum(abs(math.log2(config.size(name) / size)) for name, size in tile)
        total += 0.3 * abs(math.log2(config.size(SPLIT_K) / max(answer.split_k, 1)))
        total += 0.1 * abs(config.size("stages") - answer.stages) + 0.05 * (config.size("warps") != 8)
        return total + 0.2 * (config.size(TRANSPOSED) + config.size(STREAM_K)) - 0.05 * config.size("persistent")

    return min(configs, key=distance)


def answers(seed: int, count: int) -> list[list[Any]]:
    """List the peer's configurations for each random product, mapped to our kernels."""
    rows = []
    for kernel in random_product_kernels(seed, count, 0):
        problem = kernel.problem
        fitting = [c for c in _FAMILY.configs(problem)[1:] if not _FAMILY.misfit(problem, c, _SHARED_BYTES)]
        sizes = [problem.size(name) for name in ("m", "n", "k")]
        recommended = recommended_kernels(sizes, problem.word("layout"), 5)
        configs = dict.fromkeys(nearest(fitting, answer) for answer in recommended)
        rows.append([dict(problem), [dict(config) for config in configs]])
    return rows


def recorded(visit: str, peer_configs: dict[str, list[Config]], least: int) -> list[RecordedProduct]:
    """Convert the products of a visit that have at least `least` timings to records."""
    records = []
    with open_measurements(visit) as store:
        for kernel in store.kernels():
            measurements = measured_problem(store, kernel, CUBLAS)
            if measurements is None or len(measurements.timings) < least:
                continue
            times = {Config({STREAM_K: 0, **t.config}): round(t.runtime_ns) for t in measurements.timings
                     if not is_cublas(t.config)}  # fmt: skip
            library = next(round(t.runtime_ns) for t in measurements.timings if is_cublas(t.config))
            peer = tuple(Config({STREAM_K: 0, **config}) for config in peer_configs.get(kernel.problem.key, []))
            records.append(
                RecordedProduct(kernel.program, kernel.problem, (CUBLAS, *times), (library, *times.values()), peer)
            )
    return records


def main() -> int:
    """Write the peer's answers, or a visit's records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("answers", "record"))
    parser.add_argument("visit", nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--least", type=int, default=10, help="record products with at least so many measured kernels")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "answers":
        options.out.write_text(json.dumps(answers(options.seed, options.count)))
        return 0
    machine = {"name": "NVIDIA H200", "torch": "2.11.0+cu130", "triton": "3.6.0"}
    content = as_json(recorded(options.visit, read_answers(options.answers), options.least), machine)
    options.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    model = shipped_runtime_model()
    if model is not None:
        print("\n".join(lines(table(model, read_recorded(options.out)))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
