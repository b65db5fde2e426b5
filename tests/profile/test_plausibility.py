"""Ceilings that cannot be right are told with a sentence and never kept; what was kept before stays."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from tilewise.profile import machine as module
from tilewise.profile.machine import Bandwidth, MachineFigures, Peak, find_doubts
from tilewise.profile.timing.stability import MachineReading

CALM = MachineReading(at=0.0, own_cpu=0.0, busy_cpu=0.0, stolen_cpu=0.0, reference_loop=1e-4)
LATER = dataclasses.replace(CALM, at=10.0, own_cpu=10.0, busy_cpu=10.0)
SMALL, LARGE = 1 << 14, 1 << 28


def machine_of(peaks: dict[int, float], memory: dict[int, float] | None = None, cache: float = 200e9) -> MachineFigures:
    """Multiply-adds and bytes a second by threads, and a cache as one thread sees it."""
    memory = memory or dict.fromkeys(peaks, 20e9)
    bandwidths = [
        Bandwidth(size, n, cache if size == SMALL else memory[n], 10e9) for n in memory for size in (SMALL, LARGE)
    ]
    return MachineFigures(
        "test", 2, "made up", [Peak("avx2", n, rate) for n, rate in peaks.items()], bandwidths, [], 2e9
    )


SOUND = machine_of({1: 100e9, 2: 195e9, 16: 1.2e12}, {1: 20e9, 2: 30e9, 16: 28e9})


def test_figures_that_agree_are_not_doubted():
    assert find_doubts(SOUND, CALM, LATER) == []
    assert find_doubts(machine_of({1: 100e9}), CALM, LATER) == []


def test_threads_that_share_a_core_are_not_doubted():
    assert find_doubts(machine_of({1: 100e9, 2: 99e9}, {1: 20e9, 2: 18e9}), CALM, LATER) == []


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        (
            machine_of({1: 100e9, 2: 70e9}),
            "2 threads reached only 0.70 times the multiply-add rate with avx2 of one thread",
        ),
        (machine_of({1: 100e9, 2: 190e9, 16: 120e9}), "16 threads reached only 0.63"),
        (machine_of({1: 30e9, 2: 190e9}), "2 threads reached 6.3 times"),
        (machine_of({1: 100e9, 2: 190e9}, {1: 20e9, 2: 5e9}), "memory read bandwidth"),
        (machine_of({1: 100e9}, cache=2e9), "times the speed of memory"),
        (machine_of({1: 9e12}), "which is impossible"),
        (machine_of({1: 1e6}), "which is impossible"),
        (machine_of({1: 100e9}, {1: 5e13}, cache=6e13), "which is impossible"),
    ],
)
def test_figures_that_cannot_be_right_are_doubted_in_one_sentence(figures, sentence):
    assert sentence in find_doubts(figures, CALM, LATER)[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"busy_cpu": 1e4}, "other processes"),
        ({"stolen_cpu": 1e4}, "hypervisor"),
        ({"reference_loop": 2e-4}, "frequency"),
    ],
)
def test_what_a_busy_machine_gave_is_doubted(change, sentence):
    assert sentence in find_doubts(SOUND, CALM, dataclasses.replace(LATER, **change))[0]


@pytest.fixture
def probes(tmp_path, monkeypatch):
    """Probes that give what the test puts here, on a calm machine with a cache folder of its own."""
    figures_list: list[MachineFigures] = []
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "measure_machine", lambda: figures_list.pop(0))
    monkeypatch.setattr(module, "read_machine", lambda: CALM)
    return figures_list


WRONG = machine_of({1: 100e9, 2: 60e9})


def test_doubtful_figures_are_not_kept_and_the_next_process_measures_again(probes):
    probes += [WRONG, SOUND]
    assert module.machine().doubts
    assert not module.cache_file().exists()
    assert module.machine().doubts, "this process does not measure at every report"
    module._measure_once.cache_clear()
    assert module.machine() == SOUND
    assert module.cache_file().exists()


def test_doubtful_figures_do_not_replace_what_was_kept(probes):
    probes += [SOUND, WRONG]
    module.machine()
    assert module.machine(refresh=True).doubts
    assert module.machine() == SOUND


def test_kept_figures_that_contradict_each_other_are_measured_again(probes):
    probes += [SOUND, SOUND]
    module.machine()
    document = json.loads(module.cache_file().read_text())
    module.cache_file().write_text(json.dumps({**document, "machine": WRONG.as_dict()}))
    assert module.cached_machine() is None
    assert module.machine() == SOUND


def test_the_command_warns_in_one_sentence_and_says_when_it_keeps(probes):
    from typer import Typer

    from tilewise.cli.machine import machine

    app = Typer()
    app.command()(machine)
    probes += [WRONG, SOUND]
    first, second = CliRunner().invoke(app, []), CliRunner().invoke(app, ["--refresh"])
    assert first.exit_code == second.exit_code == 0
    assert "Not stored, so it is measured again next time: 2 threads reached only 0.60" in first.stderr
    assert len(first.stderr.splitlines()) == 1
    assert "Stored in" not in first.stdout
    assert "Stored in" in second.stdout and not second.stderr
