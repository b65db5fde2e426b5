"""Promises of MemoryProfiler: the peak is memray's, a leak of 1 KB a call is found, clean functions are left alone."""

from __future__ import annotations

import collections
import functools
import gc
import io
import json
import random
import re
import threading
import time
import tracemalloc

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.profile import MeasurementError, MemoryProfiler, TimeLimitError, heap
from tilewise.profile.leaks import find_leak, steady_growth

needs_watch = pytest.mark.skipif(native is None, reason="the heap watch is in the extension")
MEGABYTE = 1_000_000


@pytest.fixture(params=["heap watch", "tracemalloc"])
def either_way(request, monkeypatch):
    """With the extension, and as if it were not there."""
    if request.param == "tracemalloc":
        monkeypatch.setattr(heap, "native", None)
        monkeypatch.setattr("tilewise.profile.memory.native", None)
    elif native is None:
        pytest.skip("the heap watch is in the extension")


def peak_only(func):
    return MemoryProfiler().profile(func, sites=False, leaks=False)


# --- peak and net ---


def test_the_peak_counts_temporaries_and_net_does_not(either_way):
    def adds():
        a, b = np.ones(MEGABYTE, np.uint8), np.ones(MEGABYTE, np.uint8)
        return int((a + b)[0])

    profile = peak_only(adds)
    assert 3 * MEGABYTE <= profile.peak_bytes < 3.05 * MEGABYTE
    assert abs(profile.net_bytes) < 5_000


def test_the_result_is_not_what_was_kept(either_way):
    profile = peak_only(lambda: np.ones(MEGABYTE, np.uint8))
    assert profile.result_bytes == pytest.approx(MEGABYTE, abs=5_000)
    assert abs(profile.net_bytes) < 5_000


def test_what_is_stored_elsewhere_was_kept(either_way):
    kept = []
    profile = peak_only(lambda: kept.append(np.ones(MEGABYTE, np.uint8)))
    assert profile.net_bytes == pytest.approx(MEGABYTE, abs=5_000)


def test_a_function_that_does_nothing_takes_nothing(either_way):
    profile = peak_only(lambda: None)
    assert 0 <= profile.peak_bytes < 2_000
    assert abs(profile.net_bytes) < 2_000


def test_freeing_what_was_there_before_is_not_counted(either_way):
    held = [np.ones(MEGABYTE, np.uint8)]
    profile = peak_only(held.clear)
    assert profile.peak_bytes < 5_000
    assert profile.net_bytes > -5_000 or profile.method.startswith("Python objects")


def test_memory_taken_in_other_threads_is_counted(either_way):
    def in_thread():
        thread = threading.Thread(target=lambda: np.ones(MEGABYTE, np.uint8).sum())
        thread.start()
        thread.join()

    assert peak_only(in_thread).peak_bytes > MEGABYTE


@needs_watch
def test_the_workspace_of_a_native_library_is_counted():
    rows = np.zeros((400, 400), np.float32)
    assert peak_only(lambda: np.linalg.inv(rows + np.eye(400, dtype=np.float32))).peak_bytes > 3 * rows.nbytes


WORKLOADS = {
    "arrays": lambda: np.ones(300_000) * 2 + np.ones(300_000),
    "objects": lambda: [i * 1.5 for i in range(300_000)],
    "dictionary": lambda: {str(i): [i] for i in range(50_000)},
    "many arrays": lambda: np.sort(np.concatenate([np.zeros(100 + i) for i in range(1000)])),
    "linear algebra": lambda: np.linalg.svd(np.ones((300, 300)))[1],
}


@needs_watch
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_peak_is_within_two_percent_of_memray(name, tmp_path):
    memray = pytest.importorskip("memray")
    func = WORKLOADS[name]
    func()
    with memray.Tracker(tmp_path / "plain.bin"):
        func()
    with memray.Tracker(tmp_path / "objects.bin", trace_python_allocators=True):
        func()
    profile = peak_only(func)
    plain, objects = (memray.FileReader(tmp_path / f"{n}.bin").metadata.peak_memory for n in ("plain", "objects"))
    assert profile.system_peak_bytes == pytest.approx(plain, rel=0.02)
    assert profile.requested_peak_bytes == pytest.approx(objects, rel=0.02)


# --- sites ---


def test_the_line_that_holds_the_peak_comes_first(either_way):
    def wasteful():
        small = np.ones(MEGABYTE // 10, np.uint8)
        large = np.ones(MEGABYTE, np.uint8).copy()  # this line
        return small, large

    profile = MemoryProfiler().profile(wasteful, leaks=False)
    line = wasteful.__code__.co_firstlineno + 2
    assert any(site.where == f"{__file__}:{line}" for site in profile.sites[:2])


@needs_watch
def test_sites_are_those_at_the_peak_not_those_in_the_end():
    def peaks_early():
        large = np.zeros(5 * MEGABYTE, np.uint8)
        large = large.sum()
        return large

    profile = MemoryProfiler().profile(peaks_early, leaks=False)
    line = peaks_early.__code__.co_firstlineno + 1
    assert profile.sites[0].where == f"{__file__}:{line}"
    assert profile.sites[0].bytes > 4 * MEGABYTE


# --- leaks ---

_store: list[object] = []


class _Node:
    pass


def _leak_array():
    _store.append(np.zeros(125))


def _leak_bytes():
    _store.append(bytes(1000))


def _leak_cycle_with_global():
    node = _Node()
    node.data, node.me = bytearray(1000), node
    _store.append(node)


def _leak_every_fourth():
    _store.append(None)
    if len(_store) % 4 == 0:
        _store.append(bytes(4000))


@pytest.mark.parametrize("func", [_leak_array, _leak_bytes, _leak_cycle_with_global, _leak_every_fourth])
def test_a_leak_of_a_kilobyte_a_call_is_found_and_located(func, either_way):
    _store.clear()
    leak = find_leak(func)
    _store.clear()
    assert leak.leaking
    assert 700 < leak.bytes_per_call < 1700
    assert any(site.where.startswith(__file__) for site in leak.sites)


@functools.lru_cache(maxsize=64)
def _cached(n):
    return bytes(1000 + 0 * n)


_counter = iter(range(10**9))
_recent: collections.deque[object] = collections.deque(maxlen=20)
_state = {"n": 0}


def _raises_and_catches():
    try:
        raise ValueError("x" * 100)
    except ValueError as error:
        return str(error)


def _makes_cycles():
    node = _Node()
    node.me = node
    node.data = bytes(5000)


def _counts():
    _state["n"] += 1


def _threads():
    threads = [threading.Thread(target=_cached, args=(1,)) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]


CLEAN = {
    "nothing": lambda: None,
    "array": lambda: np.ones(10_000).sum(),
    "matmul": lambda: np.ones((50, 50)) @ np.ones((50, 50)),
    "list": lambda: [i**2 for i in range(1000)],
    "dictionary": lambda: {str(i): i for i in range(500)},
    "cycles": _makes_cycles,
    "cache with one key": lambda: _cached(0),
    "cache that fills up": lambda: _cached(next(_counter)),
    "bounded queue": lambda: _recent.append(bytes(2000)),
    "counter": _counts,
    "exception": _raises_and_catches,
    "regular expression": lambda: re.sub(r"a+", "b", "aaa" * 100),
    "json": lambda: json.loads(json.dumps({"a": list(range(100))})),
    "sorting": lambda: sorted(random.Random(0).random() for _ in range(500)),
    "text": lambda: "".join(f"{i:05d}" for i in range(500)),
    "stream": lambda: io.BytesIO(bytes(10_000)).read(),
    "generator": lambda: sum(x for x in range(1000)),
    "class": lambda: type("Made", (), {"x": 1})(),
    "random arrays": lambda: np.random.default_rng(0).random((30, 30)).std(),
    "threads": _threads,
    "random sizes": lambda: bytes(random.randrange(100, 10_000)),
    "closure": lambda: (lambda x: lambda: x)(bytes(100))(),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_function_raises_no_alarm(name):
    leak = find_leak(CLEAN[name])
    assert not leak.leaking, str(leak)


def test_growth_that_stops_is_no_leak():
    assert steady_growth(np.minimum(np.arange(40), 20) * 1000.0) == 0.0
    assert steady_growth(np.where(np.arange(40) > 20, 50_000.0, 0.0)) == 0.0
    assert steady_growth(np.arange(40) * 1000.0) == pytest.approx(1000.0)
    assert steady_growth(np.arange(3) * 1000.0) == 0.0


# --- functions that misbehave, and what is left behind ---


def nothing_is_left_behind():
    assert not tracemalloc.is_tracing()
    assert gc.get_freeze_count() == 0
    assert native is None or not native.watch_active()


def test_a_function_that_raises_is_said(either_way):
    with pytest.raises(MeasurementError, match="raised KeyError"):
        MemoryProfiler().profile(lambda: {}["x"])
    nothing_is_left_behind()


# The limit's exception may surface inside a garbage-collection callback of the test framework, which reports it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_never_ends_meets_the_time_limit(either_way):
    with pytest.raises(TimeLimitError):
        MemoryProfiler(time_limit=0.2).profile(lambda: time.sleep(1000))
    nothing_is_left_behind()


def test_profiling_inside_profiling_still_counts():
    profile = peak_only(lambda: peak_only(lambda: np.ones(MEGABYTE, np.uint8).sum()))
    assert profile.peak_bytes >= MEGABYTE
    nothing_is_left_behind()


def test_a_profile_is_plain_data():
    profile = MemoryProfiler(leak_seconds=0.1).profile(lambda: np.ones(1000))
    assert json.loads(json.dumps(profile.as_dict()))["peak_bytes"] == profile.peak_bytes
    assert "peak" in str(profile)
