"""Trials of Triton configurations, on a made-up GPU whose clock falls all the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.gpu.families.family import Binary, Launch, get_family
from tilewise.gpu.measure.device import TritonDevice, TritonTrial
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.tuner import Tuner

torch = pytest.importorskip("torch")
PROBLEM = Problem.of("softmax", dtype="fp32", rows=5, cols=96)


class SlowingDevice:
    """Runs PyTorch in place of a kernel; what it takes is made up, and more by a tenth at every reading."""

    torch, torch_device, l2_bytes = torch, "cpu", 1024

    def __init__(self, nanoseconds: Callable[[Binary], float], wrong: Callable[[Binary], bool] = lambda _: False):
        self.nanoseconds, self.wrong, self.pace = nanoseconds, wrong, 1.0

    def prepare(self, binary: Binary, launch: Launch) -> Any:
        source, target = launch.arguments[:2]

        def run() -> None:
            torch.softmax(source, dim=-1, out=target)
            if self.wrong(binary):
                target[0] = 2.0

        run.ns = self.nanoseconds(binary)
        return run

    def unit(self, runs: Sequence[Any]) -> Any:
        def together() -> None:
            for run in runs:
                run()

        together.ns = sum(run.ns for run in runs)
        return together

    def time_units(self, units: Sequence[Any]) -> list[float]:
        taken = []
        for unit in units:
            self.pace *= 1.001
            taken.append(unit.ns * self.pace)
        self.pace *= 1.1
        return taken


def by_warps(binary: Binary) -> float:
    return 1e6 * (1 + binary.num_warps / 10)


def configs() -> list[Config]:
    """One of each number of warps."""
    every = {config.size("warps"): config for config in reversed(get_family("softmax").configs(PROBLEM))}
    return [every[warps] for warps in sorted(every)]


def test_what_is_measured_at_different_clocks_compares_as_if_it_had_been_measured_at_one():
    trial = TritonTrial(SlowingDevice(by_warps), PROBLEM)
    chosen = configs()
    assert len(chosen) >= 3
    measured = [trial.measure(config).runtime_ns for config in reversed(chosen)][::-1]
    expected = [1 + config.size("warps") / 10 for config in chosen]
    assert [ns / measured[0] for ns in measured] == pytest.approx([x / expected[0] for x in expected], rel=0.005)
    again = trial.measure(chosen[1]).runtime_ns
    assert again == pytest.approx(measured[1], rel=0.005)


def test_a_run_off_gives_the_times_of_each_in_order():
    trial = TritonTrial(SlowingDevice(by_warps), PROBLEM)
    chosen = configs()
    for config in chosen:
        trial.measure(config)
    times = trial.in_turns(chosen)
    assert times == sorted(times) and len(times) == len(chosen)


def test_a_wrong_first_configuration_is_nobodys_measure():
    chosen = configs()
    device = SlowingDevice(by_warps, wrong=lambda binary: binary.num_warps == chosen[0].size("warps"))
    trial = TritonTrial(device, PROBLEM)
    assert trial.measure(chosen[0]).status == "wrong"
    one, two = (trial.measure(config).runtime_ns for config in chosen[1:3])
    assert one is not None and two is not None
    assert two / one == pytest.approx((10 + chosen[2].size("warps")) / (10 + chosen[1].size("warps")), rel=0.005)


def test_what_is_timed_side_by_side_keeps_the_scale_of_the_first():
    trial = TritonTrial(SlowingDevice(by_warps), PROBLEM)
    chosen = configs()[:3]
    measured = [trial.measure(config).runtime_ns for config in chosen]
    assert trial.remeasure(chosen) == pytest.approx(measured, rel=0.005)


def test_a_gpu_that_was_never_measured_starts_from_the_nearest_model_and_says_so(tmp_path):
    for capability, own in ((80, False), (90, True)):
        described = {"name": "a GPU", "compute_capability": capability}
        device, said = TritonDevice(SimpleNamespace(describe=lambda told=described: told)), []
        tuner = Tuner(device, cache=tmp_path, say=said.append)
        assert tuner.model is not None and tuner.model.name == "h200" and device.own_model == own
        assert any("no model was trained on a GPU" in line for line in said) != own
        chosen = tuner.choose({"family": "matmul", "m": 512, "n": 512, "k": 512, "dtype": "fp16"})
        assert chosen.source == "model" and chosen.config in device.configs(chosen.problem)
