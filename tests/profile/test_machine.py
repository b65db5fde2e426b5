"""Promises of the kept ceilings: restored settings, atomic file, damaged or foreign files are measured again."""

from __future__ import annotations

import json

import pytest

from tilewise import get_num_threads
from tilewise._extension import native
from tilewise.profile import machine as module
from tilewise.profile.machine import Bandwidth, MachineFigures, Peak, measure_machine

SMALL = {"sizes": [1 << 14, 1 << 18], "seconds": 0.0005}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def measurements(monkeypatch):
    """Quick probes, counted."""
    calls = []

    def quick():
        calls.append(1)
        return measure_machine(**SMALL)

    monkeypatch.setattr(module, "measure_machine", quick)
    for check in ("find_doubts", "contradictions"):  # of so quick a probe on a machine full of tests
        monkeypatch.setattr(module, check, lambda *_: [])
    return calls


def test_every_instruction_set_is_probed_and_settings_are_restored():
    threads = get_num_threads()
    figures = measure_machine(**SMALL)
    if native is not None:
        assert {p.isa for p in figures.peaks} == set(native.supported_isas())
        assert figures.method.startswith("measured")
    assert get_num_threads() == threads
    assert all(p.flops_per_second > 0 for p in figures.peaks)
    assert all(b.read > 0 and b.copy > 0 for b in figures.bandwidths)


def test_without_the_extension_numpy_estimates_and_says_so(monkeypatch):
    monkeypatch.setattr(module, "native", None)
    figures = measure_machine(**SMALL)
    assert "estimated with NumPy" in figures.method
    assert figures.peak() > 0 and figures.memory_bandwidth() > 0


def test_figures_are_measured_once_and_kept(measurements):
    first = module.machine()
    assert module.machine() == first
    assert len(measurements) == 1
    assert module.machine(refresh=True).cpu == first.cpu
    assert len(measurements) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: json.dumps({**json.loads(text), "machine": {"peaks": 3}}),
        lambda text: text.replace('"flops_per_second": ', '"flops_per_second": -'),
        lambda text: json.dumps({**json.loads(text), "identity": ["another machine"]}),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_again(measurements, damage):
    module.machine()
    path = module.cache_file()
    path.write_text(damage(path.read_text()))
    assert module.machine().peak() > 0
    assert len(measurements) == 2
    assert module.machine().peak() > 0
    assert len(measurements) == 2


def test_playing_another_machine_leaves_the_figures_of_this_one(measurements, monkeypatch):
    module.machine()
    monkeypatch.setenv("TILEWISE_MACHINE", "l2=2M")
    module.machine()
    monkeypatch.delenv("TILEWISE_MACHINE")
    module.machine()
    assert len(measurements) == 2


def test_a_cache_that_cannot_be_written_is_no_error(measurements, own_cache, monkeypatch):
    (own_cache / "file").write_text("not a folder")
    monkeypatch.setenv("TILEWISE_CACHE", str(own_cache / "file" / "below"))
    assert module.machine().peak() > 0


def test_the_roofline_is_the_larger_of_compute_and_memory_time():
    figures = MachineFigures(
        "test",
        2,
        "made up",
        [Peak(module.active_isa(), 1, 100e9)],
        [Bandwidth(1 << 14, 1, 50e9, 40e9), Bandwidth(1 << 28, 1, 20e9, 10e9)],
        [],
        5e9,
    )
    assert max(figures.roofline_seconds(100e9, 1)) == pytest.approx(1.0)
    assert max(figures.roofline_seconds(1, 100e9)) == pytest.approx(10.0)
    assert max(figures.roofline_seconds(0, 1 << 14)) == pytest.approx((1 << 14) / 40e9)
    assert 10e9 < figures.bandwidth(1 << 21) < 40e9


def test_numpys_ceiling_is_told_with_the_threads_its_library_uses(monkeypatch):
    monkeypatch.setattr(module, "native", None)
    monkeypatch.setattr(module, "real_cores", lambda: 8)
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert module.measure_machine([1 << 16], seconds=1e-4).peaks[0].threads == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert module.measure_machine([1 << 16], seconds=1e-4).peaks[0].threads == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert module.measure_machine([1 << 16], seconds=1e-4).peaks[0].threads == 1
