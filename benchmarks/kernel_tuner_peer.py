"""Kernel Tuner's own search strategies on recorded spaces, in its simulation mode, for `benchmarks.devices`."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema

STRATEGIES = ("random_sample", "genetic_algorithm", "diff_evo", "simulated_annealing", "dual_annealing", "pso",
              "firefly_algorithm", "greedy_ils", "greedy_mls", "ordered_greedy_mls", "mls", "basinhopping",
              "hybrid_vndx", "bayes_opt", "adaptive_tabu_greywolf")  # fmt: skip


def run(strategy: str, kernel: Kernel, schema: Schema, budget: int, seed: int) -> list[float]:
    """The fastest time over the best so far, measurement by measurement."""
    import kernel_tuner
    from constraint import FunctionConstraint

    names = list(schema.config_features)
    values = {name: [int(v) for v in np.unique(kernel.config_feat[:, i])] for i, name in enumerate(names)}
    recorded = {tuple(int(v) for v in row[: len(names)]) for row in kernel.config_feat}
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 -- the strategies draw from these
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cache = Path(folder) / "cache.json"
        cache.write_text(json.dumps(_cache(kernel, names, values)), encoding="utf-8")
        results, _ = kernel_tuner.tune_kernel(
            "convolution", "__global__ void convolution() {}", 1, [], values, lang="C",
            restrictions=[FunctionConstraint(lambda *values: tuple(map(int, values)) in recorded)],
            strategy=strategy, strategy_options={"max_fevals": budget}, simulation_mode=True,
            cache=str(cache), verbose=False, quiet=True,
        )  # fmt: skip
    times = [float(r["time"]) for r in results if isinstance(r["time"], int | float)][:budget]
    best = float(kernel.runtime.min()) / 1e6
    curve = [best / value for value in np.minimum.accumulate(times)]
    return curve + [curve[-1]] * (budget - len(curve))


def _cache(kernel: Kernel, names: Sequence[str], values: dict[str, list[int]]) -> dict[str, Any]:
    entries = {}
    for row, ns in zip(kernel.config_feat, kernel.runtime, strict=True):
        config = {name: int(value) for name, value in zip(names, row, strict=False)}
        zeros = dict.fromkeys(("compile_time", "verification_time", "benchmark_time", "strategy_time"), 0)
        entry = {**config, **zeros, "framework_time": 0, "time": ns / 1e6, "times": [ns / 1e6]}
        entry["timestamp"] = "2024-01-01T00:00:00+00:00"
        entries[",".join(str(value) for value in config.values())] = entry
    return {
        "device_name": "recorded", "kernel_name": "convolution", "problem_size": 1,
        "tune_params_keys": list(names), "tune_params": values, "objective": "time", "cache": entries,
    }  # fmt: skip
