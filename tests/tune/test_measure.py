"""Checking and timing one kernel, on a device of plain PyTorch: what is right, what is wrong, what is recorded."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from tilewise.errors import UnavailableError
from tilewise.gpu.families.family import Binary, Launch, get_family
from tilewise.gpu.measure.execution import Job, measure
from tilewise.store.problem import Config, Problem
from tilewise.store.reader import Verdict
from tilewise.tune.measure.sampling import Candidate, TimedBatch, TimingSettings, time_all

torch = pytest.importorskip("torch")
PROBLEM = Problem.of("matmul", dtype="tf32", m=24, n=16, k=64, epilogue="none", layout="nn")
CONFIGS = tuple(get_family("matmul").configs(PROBLEM)[:7])


def _right(a: Any, b: Any, c: Any) -> None:
    c.copy_(a @ b)


def _forgets_one_product(a: Any, b: Any, c: Any) -> None:
    c.copy_(a[..., :-1] @ b[..., :-1, :])


def _writes_nothing(a: Any, b: Any, c: Any) -> None:
    return


def _leaves_one_element(a: Any, b: Any, c: Any) -> None:
    _right(a, b, c)
    c.view(-1)[-1] = math.nan


def _writes_past_the_end(a: Any, b: Any, c: Any) -> None:
    _right(a, b, c)
    c.as_strided((1,), (1,), c.numel() + 5).fill_(0.0)


class _Device:
    """Runs a Python function per configuration, and a clock that says what it is told."""

    torch, torch_device, l2_bytes, warm_up_seconds = torch, "cpu", 0, 0.0

    def __init__(
        self, kernels: dict[int, Callable[..., None]], readings: Callable[[int], float] = lambda _: 1e6
    ) -> None:
        self.notes: list[str] = []
        self.kernels, self.readings, self.reads = kernels, readings, 0
        self.prepared = 0

    def prepare(self, binary: Binary, launch: Launch) -> Callable[[], None]:
        kernel = self.kernels.get(self.prepared, _right)
        self.prepared += 1
        if kernel is _refuses:
            raise UnavailableError("registers: 300 needed, 255 there")
        a, b, c = launch.arguments[:3]
        return lambda: kernel(a, b, c)

    def registers(self, binary: Binary) -> tuple[int, int]:
        return 0, 0

    def unit(self, runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
        return lambda: [run() for run in runs] and None

    def time_units(self, units: Sequence[Callable[[], None]]) -> list[float]:
        for unit in units:
            unit()
        self.reads += 1
        return [self.readings(self.reads) + place for place, _ in enumerate(units)]

    def each_unit(self, units: Iterable[Callable[[], None]]) -> Iterator[float]:
        yield from self.time_units(list(units))

    def synchronize(self) -> None:
        return

    def describe(self) -> dict[str, Any]:
        return {}

    def watch(self) -> dict[str, float]:
        return {}


def _refuses(a: Any, b: Any, c: Any) -> None:
    raise AssertionError


def _measure(device: _Device, **settings: Any) -> tuple[dict[Config, Verdict], list[TimedBatch]]:
    messages: list[Any] = []
    measure(device, Job(PROBLEM, CONFIGS, 1, TimingSettings(unit_ms=0.0, **settings)), lambda *m: messages.append(m))
    verdicts = {v.config: v for message in messages if message[0] == "verdicts" for v in message[1]}
    return verdicts, [message[1] for message in messages if message[0] == "batch"]


@pytest.mark.parametrize("planted", [_forgets_one_product, _writes_nothing, _leaves_one_element, _writes_past_the_end])
def test_a_planted_wrong_kernel_is_caught_and_never_timed(planted: Callable[..., None]) -> None:
    verdicts, batches = _measure(_Device({3: planted}))
    assert [c for c, v in verdicts.items() if v.status == "wrong"] == [CONFIGS[3]]
    assert sum(v.status == "ok" for v in verdicts.values()) == len(CONFIGS) - 1
    assert batches and all(3 not in batch.configs for batch in batches)


def test_a_binary_that_does_not_fit_is_recorded_with_its_reason() -> None:
    verdicts, batches = _measure(_Device({2: _refuses}))
    assert verdicts[CONFIGS[2]].status == "misfit"
    assert verdicts[CONFIGS[2]].reason == "registers: 300 needed, 255 there"
    assert all(2 not in batch.configs for batch in batches)


def test_without_a_right_default_nothing_is_timed() -> None:
    verdicts, batches = _measure(_Device({0: _writes_nothing}))
    assert verdicts[CONFIGS[0]].status == "wrong"
    assert not batches


def test_every_configuration_is_timed_in_every_round_beside_the_default() -> None:
    _, batches = _measure(_Device({}), rounds=3, batch_configs=4)
    for number in range(3):
        indices = sorted(i for batch in batches if batch.round == number for i in batch.configs)
        assert indices == list(range(1, len(CONFIGS)))
    assert all(batch.default_ns > 0 for batch in batches)


def test_the_order_is_shuffled_between_rounds() -> None:
    _, batches = _measure(_Device({}), rounds=3)
    assert len({batch.configs for batch in batches}) > 1


def test_a_disturbed_batch_is_marked_and_measured_again() -> None:
    # The third reading is the second batch: half as fast as the others.
    _, batches = _measure(_Device({}, lambda index: 2e6 if index == 3 else 1e6), rounds=3)
    assert [batch.disturbed for batch in batches].count(True) == 1
    disturbed = next(batch for batch in batches if batch.disturbed)
    assert sum(batch.configs == disturbed.configs and batch.round == disturbed.round for batch in batches) == 2


def test_scattered_configurations_get_more_rounds_up_to_the_limit() -> None:
    readings = iter(range(10_000))
    _, batches = _measure(
        _Device({}, lambda _: 1e6 * (1 + 0.02 * (next(readings) % 2))), rounds=3, max_rounds=5, finalists=0
    )
    assert max(batch.round for batch in batches) == 4


class _ScriptedClock:
    """Says what the script says of each unit, in the order they are asked for."""

    warm_up_seconds = 0.0

    def __init__(self, script: Callable[[Any, int], float]) -> None:
        self.script, self.call_count = script, 0

    def time_units(self, units: Sequence[Any]) -> list[float]:
        self.call_count += 1
        return [self.script(unit, self.call_count) for unit in units]

    def each_unit(self, units: Iterable[Any]) -> Iterator[float]:
        for unit in units:
            yield self.time_units([unit])[0]

    def watch(self) -> dict[str, float]:
        return {}


def _rounds_of(script: Callable[[int, int], float], **settings: Any) -> Counter[int]:
    """How often each of twenty configurations was timed."""
    candidates = [Candidate(i, Config.of(i=i), [], unit=i) for i in range(21)]  # type: ignore[arg-type]
    clock = _ScriptedClock(script)
    reports: list[Any] = []
    settings = {"finalists": 0, **settings}
    time_all(
        clock,
        TimingSettings(rounds=3, max_rounds=3, batch_configs=32, **settings),
        candidates,
        0,
        lambda *m: reports.append(m),
    )
    return Counter(index for kind, *parts in reports if kind == "batch" for index in parts[0].configs)


def test_the_best_few_are_timed_again_at_the_end() -> None:
    rounds = _rounds_of(lambda unit, _: 1000.0 + 50 * unit, finalists=4, final_rounds=5, most_final_rounds=9)
    assert {index for index, count in rounds.items() if count == 8} == {1, 2, 3, 4}
    assert {count for index, count in rounds.items() if index > 4} == {3}


def test_finals_go_on_until_the_first_is_told_apart_or_a_limit_is_reached() -> None:
    noise = random.Random(0)
    options = {"finalists": 4, "final_rounds": 3, "most_final_rounds": 40, "final_error": 0.004, "disturbed": 0.5}
    apart = _rounds_of(lambda unit, _: 1000.0 + 50 * unit + noise.gauss(0, 10), **options)
    close = _rounds_of(lambda unit, _: 1000.0 + (unit > 4) * 500 + noise.gauss(0, 10), **options)
    assert max(apart.values()) - 3 < 8
    assert 8 < max(close.values()) - 3 < 40
    options["final_error"] = 0.0
    assert max(_rounds_of(lambda unit, _: 1000.0 + (unit > 4) * 500 + noise.gauss(0, 10), **options).values()) == 43


def test_who_was_only_lucky_makes_room_for_the_next_in_the_finals() -> None:
    lucky = {11, 12}

    def script(unit: int, request: int) -> float:
        early = request <= 3 * 23  # three rounds of 20 and three defaults
        return 900.0 if unit in lucky and early else 1000.0 + 10 * unit

    rounds = _rounds_of(script, finalists=3, final_rounds=4, most_final_rounds=12)
    assert all(rounds[index] >= 3 + 4 for index in (1, 2, 3))
    assert rounds[4] == 3


def test_a_recorder_gets_every_timing_before_the_next_is_taken() -> None:
    order: list[str] = []

    def report(kind: str, *parts: Any) -> None:
        state = {"begin": parts[0], "timing": parts[0]["i"] if kind == "timing" else None, "batch": ""}
        order.append(f"{kind} {state[kind]}".strip())

    def script(unit: int, _: int) -> float:
        order.append(f"time {unit}")
        return 1000.0

    candidates = [Candidate(i, Config.of(i=i), [], unit=i) for i in range(3)]  # type: ignore[arg-type]
    settings = TimingSettings(rounds=1, max_rounds=1)
    time_all(_ScriptedClock(script), settings, candidates, 0, report)
    assert order[:3] == ["time 0", "time 0", "begin 0"]
    for place, entry in enumerate(order[3:7:2], start=3):
        number = entry.split()[1]
        assert order[order.index(entry) + 1] == f"timing {number}", place
    assert order[-2:] == ["time 0", "batch"]


def test_more_take_part_in_the_first_rounds_of_the_finals_where_the_settings_say_so() -> None:
    rounds = _rounds_of(lambda unit, _: 1000.0 + 50 * unit, heat=9, finalists=4, final_rounds=5)
    assert sorted(rounds.values()) == [3] * 11 + [6] * 5 + [8] * 4
