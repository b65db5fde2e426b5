"""A slot at work, without a cluster: GPU kernels by processes that pretend, failing kernels, devices that are busy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import fake_workers
from tilewise.gpu.measure.collector import TritonCollector
from tilewise.profile.timing.gpu import GpuWatch
from tilewise.store.store import Store
from tilewise.tune.measure.collector import Options
from tilewise_fleet.cluster import slots
from tilewise_fleet.device_lock import exclusive_device
from tilewise_fleet.slot import MAX_ATTEMPTS, MAX_DISTURBED_ATTEMPTS, Campaign, Slot


class _Pretending(TritonCollector):
    serve_compiler = staticmethod(fake_workers.compile_nothing)
    serve_gpu = staticmethod(fake_workers.serve_healthy)


def gpu_campaign(place: Path, count: int) -> Campaign:
    sizes = {"family": "matmul", "dtype": "bf16", "n": 64, "k": 64, "epilogue": "none", "layout": "nt"}
    kernels = tuple(("own", {**sizes, "m": 64 * (i + 1)}) for i in range(count))
    return Campaign(str(place), "triton", kernels, configs=8)


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def collector(kind: str, kernels: Any, store: Any, configs: int, say: Any, **flags_given: Any) -> TritonCollector:
        options = Options(minutes=flags_given["minutes"], seed=flags_given["seed"], max_configs=configs, processes=1)
        return _Pretending(kernels, store, options, say)

    monkeypatch.setattr("tilewise.tune.measure.collector.make_collector", collector)
    monkeypatch.setattr(GpuWatch, "name", lambda self: "Fake GPU")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_gpus_slot_measures_what_the_queue_holds(tmp_path: Path) -> None:
    slot = Slot(gpu_campaign(tmp_path / "s.sqlite", 3))
    state = slot.begin()
    assert (state["machine"], state["queued"]) == ("triton Fake GPU", 3)
    states = [slot.step() for _ in range(2)]
    assert [step["state"] for step in states] == ["measured", "done"]
    assert len(states[0]["kernels"]) == 3 and all(kernel["finished"] for kernel in states[0]["kernels"])
    slot.close()
    with Store(tmp_path / "s.sqlite") as store:
        assert store.counts()["kernels"] == 3 and store.queue_length() == 0
        assert store.database.read("SELECT count(*) FROM claim") == [(0,)]


def test_kernels_that_fail_are_given_up_with_a_line_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot(gpu_campaign(tmp_path / "s.sqlite", 2))
    slot.begin()
    measure = Slot._measure

    def fails(self: Slot, kernels: Any) -> None:
        measure(self, kernels[1:])
        self._failures.append(f"{kernels[0].name}: planted")

    monkeypatch.setattr(Slot, "_measure", fails)
    monkeypatch.setattr(_Pretending, "run", lambda self: {})
    lines: list[str] = []
    while (state := slot.step())["state"] == "measured":
        lines += state["failures"]
    first = next(line for line in lines if "planted" in line).partition(": planted")[0]
    assert f"{first}: given up after {MAX_ATTEMPTS} attempts" in lines
    assert state["state"] == "done"


def test_a_kernel_that_was_disturbed_waits_behind_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise_fleet.slot._GPU_CHUNK", 1)
    monkeypatch.setattr(Slot, "_measure", lambda self, kernels: None)
    slot = Slot(gpu_campaign(tmp_path / "s.sqlite", 2))
    slot.begin()
    names: list[str] = []
    while (step := slot.step())["state"] == "measured":
        names += [kernel["name"] for kernel in step["kernels"]]
    assert names == sorted(set(names), key=names.index) * MAX_DISTURBED_ATTEMPTS and len(set(names)) == 2


def test_a_device_that_others_time_on_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(gpu_campaign(tmp_path / "s.sqlite", 1))
    slot.begin()
    monkeypatch.setattr("tilewise_fleet.slot._LOCK_SECONDS", 0.02)
    with exclusive_device("cpu", 0, 1.0) as free:
        assert free and slot.step() == {"state": "busy"}
    assert slot.step()["state"] == "measured"


class _Cluster:
    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 8.0, "gpu:H200": 4.0, "cpu:avx512": 2.0}
        node = {"Alive": True, "NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Resources": resources}
        return [node, {**node, "Alive": False, "NodeID": "b"}]


def test_every_gpu_of_a_living_node_is_a_slot_and_its_cpu_is_one() -> None:
    gpus = slots(_Cluster(), "triton")
    assert [(place.device, place.devices) for place in gpus] == [(i, 4) for i in range(4)]
    assert {place.node for place in gpus} == {"a"}
    assert gpus[2].label == "10.0.0.1 gpu:H200 2" and len(slots(_Cluster(), "cpu")) == 1


def test_of_several_gpus_an_actor_sees_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    campaign = gpu_campaign(tmp_path / "s.sqlite", 1)
    for visible, expected_device in (("", "1"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        Slot(campaign, 1, 4).close()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected_device
