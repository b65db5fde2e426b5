"""Trials of Triton configurations on a fake GPU whose clock slows down all the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.gpu.families.family import Binary, Launch, get_family
from tilewise.gpu.measure.triton_device import TritonDevice, TritonTrial
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.tuner import Tuner

torch = pytest.importorskip("torch")
PROBLEM = Problem.of("softmax", dtype="fp32", rows=5, cols=96)


class SlowingDevice:
    """Runs PyTorch in place of a kernel; its times are invented and grow by a tenth at every reading."""

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
        times = []
        for unit in units:
            self.pace *= 1.001
            times.append(unit.ns * self.pace)
        self.pace *= 1.1
        return times


def by_warps(binary: Binary) -> float:
    return 1e6 * (1 + binary.num_warps / 10)


def configs() -> list[Config]:
    """Return one configuration for each number of warps."""
    by_count = {config.size("warps"): config for config in reversed(get_family("softmax").configs(PROBLEM))}
    return [by_count[warps] for warps in sorted(by_count)]


def test_ratios_of_runtimes_do_not_depend_on_the_clock():
    trial = TritonTrial(SlowingDevice(by_warps), PROBLEM)
    candidates = configs()
    assert len(candidates) >= 3
    runtimes = [trial.measure(config).runtime_ns for config in reversed(candidates)][::-1]
    expected = [1 + config.size("warps") / 10 for config in candidates]
    assert [ns / runtimes[0] for ns in runtimes] == pytest.approx([x / expected[0] for x in expected], rel=0.005)
    again = trial.measure(candidates[1]).runtime_ns
    assert again == pytest.approx(runtimes[1], rel=0.005)


def test_interleaved_times_keep_the_order_of_the_configurations():
    trial = TritonTrial(SlowingDevice(by_warps), PROBLEM)
    candidates = configs()
    for config in candidates:
        trial.measure(config)
    times = trial.time_interleaved(candidates)
    assert times == sorted(times) and len(times) == len(candidates)


def test_a_wrong_first_configuration_is_not_the_reference():
    candidates = configs()
    device = SlowingDevice(by_warps, wrong=lambda binary: binary.num_warps == candidates[0].size("warps"))
    trial = TritonTrial(device, PROBLEM)
    assert trial.measure(candidates[0]).status == "wrong"
    one, two = (trial.measure(config).runtime_ns for config in candidates[1:3])
    assert one is not None and two is not None
    assert two / one == pytest.approx(
        (10 + candidates[2].size("warps")) / (10 + candidates[1].size("warps")), rel=0.005
    )


def test_remeasured_times_keep_the_scale_of_the_first_measurement():
    trial = TritonTrial(SlowingDevice(by_warps), PROBLEM)
    candidates = configs()[:3]
    runtimes = [trial.measure(config).runtime_ns for config in candidates]
    assert trial.remeasure(candidates) == pytest.approx(runtimes, rel=0.005)


def test_a_gpu_without_a_model_uses_the_nearest_model_with_a_message(tmp_path):
    for name, capability, own in (("a GPU", 80, False), ("a GPU", 90, False), ("NVIDIA H200", 90, True)):
        details = {"name": name, "compute_capability": capability}
        device, messages = TritonDevice(SimpleNamespace(describe=lambda details=details: details)), []
        tuner = Tuner(device, cache=tmp_path, say=messages.append)
        assert tuner.model is not None and tuner.model.name == "h200" and device.own_model == own
        assert any("no model was trained on a GPU" in line for line in messages) != own
        decision = tuner.choose({"family": "matmul", "m": 512, "n": 512, "k": 512, "dtype": "fp16"})
        assert decision.source == "model" and decision.config in device.configs(decision.problem)
