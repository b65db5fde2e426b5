"""The floor of time: no entry is faster than its own arithmetic on this machine, and honest ones are above it."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace

import numpy as np
import pytest

from tilewise.bench import Rejected, TinyMLPerf, reference_recipe
from tilewise.bench import floor as floors
from tilewise.bench.build import build
from tilewise.bench.floor import Ceilings, check_floor, least_seconds
from tilewise.bench.runner import Runner, baseline
from tilewise.profile.machine import Bandwidth, MachineFigures, Peak

EVENTS = ("MLP_SPRINT", "CNN_MARATHON", "TRANSFORMER_DECATHLON")


@lru_cache
def _built(name: str) -> Runner:
    """The reference entry; the CNN's without what it trains for half a minute."""
    recipe = reference_recipe(name)
    return build(replace(recipe, steps=tuple(step for step in recipe.steps if step.name != "shrink")))


@pytest.mark.parametrize("name", EVENTS)
def test_what_is_faster_than_its_arithmetic_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "_AT_LENGTH", 1)
    entry = _built(name)
    least = least_seconds(entry)
    assert check_floor(1.01 * least, partial(least_seconds, entry, 1)) == least > 0
    with pytest.raises(Rejected, match="no program on this machine") as error:
        check_floor(0.25 * least, partial(least_seconds, entry, 1))
    assert error.value.code == "below the floor of time"


def test_fewer_and_smaller_weights_may_be_faster() -> None:
    event = TinyMLPerf.event("MLP_SPRINT")
    plain, halved = baseline(event), baseline(event)
    for _, tensor in halved.model.named_tensors():
        tensor.data[...] = np.where(np.arange(tensor.data.size).reshape(tensor.data.shape) % 2, 0, tensor.data)
    assert least_seconds(halved) < least_seconds(plain)
    assert least_seconds(_built("MLP_SPRINT")) < least_seconds(plain)


def _seconds_per_call(entry: Runner) -> float:
    inputs = entry.event.timed_inputs(np.random.default_rng(0), 1)[0]
    with entry.active():
        entry.call(inputs)
        start = time.perf_counter()
        entry.call(inputs)
        return time.perf_counter() - start


@pytest.mark.parametrize("name", EVENTS[:2])
def test_ceilings_measured_in_a_restless_minute_refuse_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come out far too low, every entry is below such a floor, and so they are measured again."""
    entry = _built(name)
    seconds, machine = _seconds_per_call(entry), floors.ceilings()
    slower = 10 * seconds / least_seconds(entry)
    restless = Ceilings(machine.operations / slower, machine.bytes_read / slower)
    monkeypatch.setattr(floors, "ceilings", lambda: restless)
    monkeypatch.setattr(floors, "_AT_LENGTH", 16)
    assert least_seconds(entry) > seconds
    assert check_floor(seconds, partial(least_seconds, entry, 1)) < seconds


def _machine(**peaks: float) -> MachineFigures:
    threads = {"avx512": 2}
    rows = [Peak(isa, threads.get(isa, 1), rate) for isa, rate in peaks.items()]
    return MachineFigures("a CPU", 2, "made up", rows, [Bandwidth(32 << 10, 1, 1e11, 1e11)], [], 1e9)


def test_the_widest_instructions_count_whichever_are_in_force() -> None:
    assert Ceilings.of(_machine(portable=4e10, avx2=1.1e11, avx512=3e11)).operations == 1.5e11
    assert Ceilings.of(_machine(numpy=5e10)).operations == 5e10


def test_the_better_of_kept_and_measured_figures_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was measured while it was quiet stays as fast as it was then; one that has become faster is."""
    monkeypatch.setattr(floors, "measure_ceilings", lambda attempts: Ceilings(2.0, 5.0))
    monkeypatch.setattr(floors, "cached_machine", lambda: _machine(numpy=4.0))
    floors.ceilings.cache_clear()
    try:
        assert floors.ceilings() == Ceilings(4.0, 1e11)
        monkeypatch.setattr(floors, "cached_machine", lambda: None)
        floors.ceilings.cache_clear()
        assert floors.ceilings() == Ceilings(2.0, 5.0)
    finally:
        floors.ceilings.cache_clear()


def test_threads_share_the_work_and_slow_machines_have_a_later_floor() -> None:
    entry = baseline(TinyMLPerf.event("MLP_SPRINT"))
    slow, fast = Ceilings(1e9, 1e10), Ceilings(1e12, 1e13)
    assert least_seconds(entry, 2, slow) == least_seconds(entry, 1, slow) / 2
    assert least_seconds(entry, 1, slow) == pytest.approx(1000 * least_seconds(entry, 1, fast))


def test_a_machine_that_multiplies_tiles_of_bytes_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, machine = _built("MLP_SPRINT"), Ceilings(1e9, 1e15)

    def least(tiles: str) -> float:
        monkeypatch.setattr(floors, "native", SimpleNamespace(amx=lambda: tiles))
        return least_seconds(entry, 1, machine)

    assert least("hardware") < least("off")
