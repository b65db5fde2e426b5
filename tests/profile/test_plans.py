"""A profile of a compiled network covers every op of its plan, with the work of the network."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import tilewise
from tilewise import Tensor, nn, onnx
from tilewise._extension import native
from tilewise.cli import commands
from tilewise.profile import FLOPCounter, ProfilerContext
from tilewise.profile import machine as machine_module
from tilewise.profile.report.bottleneck import BACKEND

pytestmark = pytest.mark.skipif(native is None, reason="plans need the compiled kernels")


def small_network() -> nn.Module:
    """Convolutions on an image so large that the plan runs them as tile groups, and a linear layer."""
    convs = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU()]
    return nn.Sequential(*convs, nn.Conv2d(16, 8, 1), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(8 * 24 * 24, 5)).eval()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_profile_of_a_plan_has_the_work_of_the_network(ceilings, batch, threads):
    images = np.random.default_rng(0).standard_normal((batch, 3, 192, 192)).astype(np.float32)
    network = small_network()
    before = tilewise.get_num_threads()
    tilewise.set_num_threads(threads)
    try:
        plan = tilewise.compile(network, images)
        with ProfilerContext(ceilings) as profiler:
            plan(images)
    finally:
        tilewise.set_num_threads(before)
    results = profiler.get_results()
    assert results.flops == FLOPCounter().count_ops(network, images).total
    assert sum(unit.name == "conv2d" for unit in results.units) == 3 * (results.by_op["matmul"].calls)
    assert sum(unit.seconds for unit in results.units) <= results.seconds + results.recording_seconds
    assert BACKEND not in {finding.kind for finding in results.findings}


def test_explain_lists_the_ops_in_front_of_a_change_of_layout():
    class NormOverChannels(nn.Module):
        def __init__(self):
            self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).relu()

    plan = tilewise.compile(NormOverChannels().eval(), np.ones((1, 4, 9, 9), np.float32))
    assert {"conv", "layer_norm"} <= {op.kind for op in plan.explain().ops}


@pytest.fixture
def profile(monkeypatch, tmp_path, ceilings):
    """Run `tilewise profile --json` on an ONNX file of the small network, with made-up ceilings."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_module, "measure_machine", lambda: ceilings)
    onnx.save(small_network(), tmp_path / "net.onnx", Tensor(np.ones((1, 3, 192, 192), np.float32)))
    app = typer.Typer()
    commands.register(app)
    words = ["profile", str(tmp_path / "net.onnx"), "--repeat", "1", "--json"]
    return lambda *more: json.loads(CliRunner().invoke(app, [*words, *more], catch_exceptions=False).stdout)


def test_an_onnx_file_is_profiled_as_it_runs_with_the_names_of_its_layers(profile):
    data = profile()
    assert "ran as a plan" in data["note"]
    assert set(data["by_op"]["conv2d"]["backends"]) == {"plan"}
    assert any("Conv2d(3→16" in row["label"] for row in data["by_layer"].values())


def test_with_a_backend_the_layers_of_an_onnx_file_run_one_by_one(profile):
    data = profile("--backend", "native")
    assert "one by one" in data["note"] and set(data["by_op"]["conv2d"]["backends"]) == {"native"}
