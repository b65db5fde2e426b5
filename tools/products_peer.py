"""Unseen products for a check on a GPU: a peer's answers before it, and the file that the check leaves behind.

`python -m tools.products_peer answers --seed S --out FILE` asks nvMatmulHeuristics (no GPU needed; its tiles are those
of another library and are mapped to the nearest kernel here) about the products that `tools.gpu_visit --products N
--seed S --check FILE` then measures; `python -m tools.products_peer record VISIT --answers FILE --out FILE` makes of
that visit what `python3 -m tilewise.tune.triton.check --recorded FILE` reads.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorded import Product as Recorded
from benchmarks.recorded import as_json, lines, read_recorded, table
from tilewise.gpu.devices import H200
from tilewise.gpu.products.config_fields import CUBLAS, SPLIT_K, STREAM_K, TRANSPOSED, is_cublas
from tilewise.gpu.products.family import ProductFamily
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.store.aggregate import measured_problem, open_measurements
from tilewise.store.problem import Config
from tools.gpu_visit import drawn, read_answers

_FAMILY, _SHARED_BYTES = ProductFamily(), H200.shared_bytes_per_block


def asked(sizes: Sequence[int], layout: str, count: int) -> list[Any]:
    """What the peer answers for (m, n, k): kernels with their tile, stages and parts of K, the best first."""
    import nvMatmulHeuristics as nv

    gpus = nv.NvMatmulHeuristicsNvidiaGpu
    gpu = gpus.H200_SXM if hasattr(gpus, "H200_SXM") else gpus.H100_SXM
    interface = nv.NvMatmulHeuristicsInterfaceEx(backend=nv.NvMatmulHeuristicsTarget.CUTLASS3, gpu=gpu)
    found = interface.get_with_mnk(*sizes, nv.NvMatmulHeuristicsMatmulLayout[f"{layout.upper()}_ROW_MAJOR"], count)
    return [one["kernel"] if isinstance(one, dict) else one.kernel for one in found]


def nearest(configs: list[Config], answer: Any) -> Config:
    """The kernel whose tile, parts and stages are closest to an answer's."""

    def far(config: Config) -> float:
        tile = zip(("block_m", "block_n", "block_k"), (answer.cta_tile_m, answer.cta_tile_n, answer.cta_tile_k),
                   strict=True)  # fmt: skip
        found = sum(abs(math.log2(config.size(name) / wanted)) for name, wanted in tile)
        found += 0.3 * abs(math.log2(config.size(SPLIT_K) / max(answer.split_k, 1)))
        found += 0.1 * abs(config.size("stages") - answer.stages) + 0.05 * (config.size("warps") != 8)
        return found + 0.2 * (config.size(TRANSPOSED) + config.size(STREAM_K)) - 0.05 * config.size("persistent")

    return min(configs, key=far)


def answers(seed: int, count: int) -> list[list[Any]]:
    found = []
    for kernel in drawn(seed, count, 0):
        problem = kernel.problem
        fitting = [c for c in _FAMILY.configs(problem)[1:] if not _FAMILY.misfit(problem, c, _SHARED_BYTES)]
        sizes = [problem.size(name) for name in ("m", "n", "k")]
        kept = dict.fromkeys(nearest(fitting, answer) for answer in asked(sizes, problem.word("layout"), 5))
        found.append([dict(problem), [dict(config) for config in kept]])
    return found


def recorded(visit: str, answered: dict[str, list[Config]], least: int) -> list[Recorded]:
    found = []
    with open_measurements(visit) as store:
        for kernel in store.kernels():
            measured = measured_problem(store, kernel, CUBLAS)
            if measured is None or len(measured.timings) < least:
                continue
            times = {Config({STREAM_K: 0, **t.config}): round(t.runtime_ns) for t in measured.timings
                     if not is_cublas(t.config)}  # fmt: skip
            library = next(round(t.runtime_ns) for t in measured.timings if is_cublas(t.config))
            peer = tuple(Config({STREAM_K: 0, **config}) for config in answered.get(kernel.problem.key, []))
            found.append(Recorded(kernel.program, kernel.problem, (CUBLAS, *times), (library, *times.values()), peer))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("answers", "record"))
    parser.add_argument("visit", nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--least", type=int, default=10, help="kernels that were measured of a product to record it")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.what == "answers":
        given.out.write_text(json.dumps(answers(given.seed, given.count)))
        return 0
    machine = {"name": "NVIDIA H200", "torch": "2.11.0+cu130", "triton": "3.6.0"}
    content = as_json(recorded(given.visit, read_answers(given.answers), given.least), machine)
    given.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    model = shipped_runtime_model()
    if model is not None:
        print("\n".join(lines(table(model, read_recorded(given.out)))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
