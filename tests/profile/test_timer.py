"""Promises of Timer: what is subtracted, what is said, and what happens to functions that misbehave."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from tests.waiting import PATIENCE
from tilewise._wording import with_interval
from tilewise.errors import ConfigurationError
from tilewise.profile import MeasurementError, TimeLimitError, Timer
from tilewise.profile.timing import clock
from tilewise.profile.units import seconds


def never_returns() -> None:
    while True:
        pass


def test_a_short_function_is_called_many_times_a_sample():
    result = Timer().measure(lambda: None, runs=5)
    assert result.calls_per_sample > 1000
    assert result.samples.shape == (5,)


def test_a_long_function_is_called_once_a_sample():
    result = Timer(sample_seconds=1e-3).measure(lambda: time.sleep(0.002), warmup=1, runs=3)
    assert result.calls_per_sample == 1
    assert result.p50 >= 0.002


def test_percentiles_are_those_of_the_samples_and_lie_in_their_intervals():
    result = Timer().measure(lambda: sum(range(100)), runs=50)
    assert [result.p50, result.p95, result.p99] == list(np.quantile(result.samples, [0.5, 0.95, 0.99]))
    assert result.mean == pytest.approx(result.samples.mean())
    assert all(getattr(result, name) in result.intervals[name] for name in ("p50", "p95", "mean"))


def test_the_cost_of_loop_and_clock_is_subtracted(monkeypatch):
    monkeypatch.setattr(clock, "timed_calls", lambda func, calls: 1000 * calls)
    monkeypatch.setattr(clock, "overhead_ns", lambda: (50.0, 10.0))
    assert clock.seconds_per_call(lambda: None, 5) == pytest.approx((5000 - 50 - 50) / 5 * 1e-9)


def test_a_time_is_never_negative(monkeypatch):
    monkeypatch.setattr(clock, "overhead_ns", lambda: (1e9, 1e9))
    assert clock.seconds_per_call(lambda: None, 3) == 0.0


def test_a_function_that_returns_at_once_is_said(monkeypatch):
    monkeypatch.setattr(clock, "overhead_ns", lambda: (1e9, 1e9))
    result = Timer().measure(lambda: None, runs=3)
    assert any("too short to time" in note for note in result.notes)


def test_a_function_that_raises_is_said_with_its_cause():
    calls = []

    def fails_later():
        calls.append(1)
        if len(calls) > 5:
            raise ValueError("no more")

    with pytest.raises(MeasurementError, match=r"raised ValueError: no more \(after 1 successful samples\)") as caught:
        Timer(sample_seconds=0).measure(fails_later, warmup=2, runs=10)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("func", [never_returns, lambda: time.sleep(1000)], ids=["busy", "sleeping"])
def test_a_function_that_never_ends_meets_the_time_limit(func):
    with pytest.raises(TimeLimitError, match="time_limit"):
        Timer().measure(func, time_limit=0.1)


def test_the_time_limit_also_holds_outside_the_main_thread():
    caught = []

    def measure():
        try:
            Timer().measure(never_returns, time_limit=0.1)
        except TimeLimitError as error:
            caught.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join(PATIENCE)
    assert len(caught) == 1


def test_a_function_that_swallows_exceptions_still_ends():
    def stubborn():
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    with pytest.raises(TimeLimitError):
        Timer().measure(stubborn, time_limit=0.1)


def test_a_slow_function_gets_fewer_samples_and_a_note():
    result = Timer().measure(lambda: time.sleep(0.05), warmup=0, runs=100_000, time_limit=2.0)
    assert 1 <= len(result.samples) < 100_000
    assert any("fit into the time limit" in note for note in result.notes)


def test_a_time_limit_leaves_no_alarm_behind():
    import signal

    Timer().measure(lambda: None, runs=2, time_limit=5)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_an_alarm_at_either_end_of_a_time_limit_leaves_no_handler_behind(monkeypatch):
    import signal

    from tilewise.profile.timing.limits import TimeIsUp, time_limit

    set_timer, stops = signal.setitimer, []

    def stop_late(timer, seconds, interval=0.0):
        stops.append(seconds == 0.0)
        if sum(stops) == 1 and stops[-1]:  # as if the signal had arrived just before the timer is stopped
            raise TimeIsUp
        return set_timer(timer, seconds, interval)

    for _ in range(20):
        with pytest.raises(TimeIsUp), time_limit(1e-6):
            time.sleep(5)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    monkeypatch.setattr(signal, "setitimer", stop_late)
    with time_limit(5):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_threads_left_running_are_said():
    stop = threading.Event()
    try:
        result = Timer(sample_seconds=0).measure(lambda: threading.Thread(target=stop.wait).start(), warmup=0, runs=2)
    finally:
        stop.set()
    assert any(" running; their work" in note for note in result.notes)


def test_forked_processes_share_the_samples_out():
    result = Timer().measure(lambda: sum(range(50)), warmup=0, runs=7, processes=3)
    assert len(result.samples) == 7
    assert result.processes == 3


def test_a_new_interpreter_measures_a_named_function():
    result = Timer().measure("os:getpid", warmup=0, runs=3, processes=1)
    assert len(result.samples) == 3


@pytest.mark.parametrize("name", ["os:no_such_thing", "no_such_module:f", "os", ""])
def test_a_name_that_is_no_function_is_said(name):
    with pytest.raises(MeasurementError, match="does not name a function"):
        Timer().measure(name, processes=1, runs=2)


def test_a_forked_function_that_never_ends_is_killed():
    with pytest.raises(TimeLimitError):
        Timer().measure(never_returns, processes=1, time_limit=0.1)


def test_a_forked_function_that_blocks_signals_is_killed():
    import signal

    def deaf():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        never_returns()

    with pytest.raises(TimeLimitError, match="killed"):
        Timer().measure(deaf, processes=1, time_limit=0.1)


def test_a_forked_function_that_crashes_is_said():
    import os
    import signal

    with pytest.raises(MeasurementError, match="ended without a result"):
        Timer().measure(lambda: os.kill(os.getpid(), signal.SIGKILL), processes=1)


@pytest.mark.parametrize(
    "arguments", [{"runs": 0}, {"warmup": -1}, {"runs": 2.5}, {"processes": -1}, {"time_limit": 0}]
)
def test_settings_that_mean_nothing_are_refused(arguments):
    with pytest.raises(ConfigurationError):
        Timer().measure(lambda: None, **arguments)


def test_a_measurement_is_plain_data():
    data = Timer().measure(lambda: None, runs=3).as_dict()
    assert json.loads(json.dumps(data))["p50"] == data["p50"]


@pytest.mark.parametrize(
    ("value", "text"), [(1.5, "1.5 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 µs"), (7e-9, "7 ns"), (0.9996, "1000 ms")]
)
def test_seconds_are_written_for_people(value, text):
    assert seconds(value) == text


def test_an_interval_is_shown_only_where_something_varies():
    assert with_interval("2.55%", "2.55%", "2.55%") == "2.55%"
    assert with_interval("1.20×", "1.10", "1.30") == "1.20× (1.10 to 1.30)"
