"""Trials of real kernels: right ones are timed, wrong, failing, crashing and hanging ones get a verdict."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.cpu.family import add_family, get_family
from tilewise.tune.families.cpu.matmul import Matmul, config_of
from tilewise.tune.measure.cpu.device import CpuTrial, WorkerTrial, cpu_worker

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
PROBLEM = Problem.of("trouble", m=24, n=32, k=16, dtype="fp32", epilogue="none", layout="nn", threads=1)


class Trouble(Matmul):
    """A product whose configuration decides what goes wrong."""

    name = "trouble"

    def runner(self, problem, config, operands):
        run = super().runner(problem, Config({n: v for n, v in config.items() if n != "trouble"}), operands)
        trouble = config.size("trouble") if "trouble" in config else 0

        def crash():
            os._exit(7)

        def fail():
            raise RuntimeError("no")

        return {0: run, 1: lambda: np.zeros_like(run()), 2: fail, 3: crash, 4: lambda: time.sleep(60)}[trouble]


add_family(Trouble())


def default() -> Config:
    family = get_family("matmul")
    return family.configs(Problem({**PROBLEM, "family": "matmul"}))[0]


def with_trouble(kind: int) -> Config:
    return Config({**default(), "trouble": kind})


def test_a_right_configuration_is_timed_beside_the_default():
    trial_result = CpuTrial(PROBLEM, default()).measure(default())
    assert trial_result.status == "ok" and trial_result.runtime_ns > 0 and trial_result.default_ns > 0


@pytest.mark.parametrize(("kind", "status"), [(1, "wrong"), (2, "failed")])
def test_a_wrong_or_failing_configuration_is_never_timed(kind, status):
    trial_result = CpuTrial(PROBLEM, default()).measure(with_trouble(kind))
    assert trial_result.status == status and trial_result.runtime_ns is None and trial_result.reason


def test_a_crash_and_a_hang_cost_a_process_and_get_a_verdict():
    with cpu_worker(("test_trial",)) as worker:
        trial = WorkerTrial(worker, PROBLEM, default(), limit_s=1.0)
        assert trial.measure(default()).status == "ok"
        crashed = trial.measure(with_trouble(3))
        assert crashed.status == "failed" and "ended its process" in crashed.reason
        assert trial.measure(default()).status == "ok"
        hung = trial.measure(with_trouble(4))
        assert hung.status == "failed" and "time limit" in hung.reason
        assert trial.measure(default()).status == "ok"


def test_tiles_and_configurations_name_the_same_thing():
    from tilewise.backend.tiled import tile_space
    from tilewise.tune.families.cpu.matmul import tile_of

    for tile in tile_space("matmul", (40, 50, 60))[::97]:
        assert tile_of(config_of(tile)) == tile


def test_a_sum_of_a_quarter_million_products_is_right_within_its_rounding():
    family = get_family("conv2d")
    sizes = {"batch": 1, "channels": 64, "height": 64, "width": 64, "filters": 4, "kernel": 64}
    problem = family.problem({"family": "conv2d", **sizes})
    direct = family.configs(problem)[0]
    assert CpuTrial(problem, direct).measure(direct).status == "ok"
