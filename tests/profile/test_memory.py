"""Promises of MemoryProfiler: the peak is memray's, its source is named, and functions that misbehave are said."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.profile import MeasurementError, MemoryProfiler, TimeLimitError
from tilewise.profile.leaks import IMMORTAL

needs_watch = pytest.mark.skipif(native is None, reason="the heap watch is in the extension")
MEGABYTE = 1_000_000


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
    objects = []
    profile = peak_only(lambda: objects.append(np.ones(MEGABYTE, np.uint8)))
    assert profile.net_bytes == pytest.approx(MEGABYTE, abs=5_000)


def test_a_function_that_does_nothing_takes_nothing(either_way):
    profile = peak_only(lambda: None)
    assert 0 <= profile.peak_bytes < 2_000
    assert abs(profile.net_bytes) < 2_000


def test_freeing_what_was_there_before_is_not_counted(either_way):
    arrays = [np.ones(MEGABYTE, np.uint8)]
    profile = peak_only(arrays.clear)
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


# Python's small objects live in arenas of 1 MiB, and how many a process takes for the same objects differs by one with
# what lay in its arenas before. So the workloads with objects are of some 100 MB, where an arena is 1 %, and each is
# measured in a process of its own.
WORKLOADS = {
    "arrays": "lambda: np.ones(300_000) * 2 + np.ones(300_000)",
    "objects": "lambda: [bytes(400) for i in range(220_000)]",
    "dictionary": "lambda: {i: bytes(440) for i in range(200_000)}",
    "many arrays": "lambda: np.sort(np.concatenate([np.zeros(100 + i) for i in range(1000)]))",
    "linear algebra": "lambda: np.linalg.svd(np.ones((300, 300)))[1]",
}
MEASURE = """
import json, sys
import memray, numpy as np
from tilewise.profile import MemoryProfiler

func, folder = eval(sys.argv[1]), sys.argv[2]
func()
profile = MemoryProfiler().profile(func, sites=False, leaks=False)
figures = [profile.system_peak_bytes, profile.requested_peak_bytes]
for objects in (False, True):
    with memray.Tracker(f"{folder}/{objects}.bin", trace_python_allocators=objects):
        func()
    figures.append(memray.FileReader(f"{folder}/{objects}.bin").metadata.peak_memory)
print(json.dumps(figures))
"""


@needs_watch
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_peak_is_within_two_percent_of_memray(name, tmp_path):
    pytest.importorskip("memray")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", MEASURE, WORKLOADS[name], str(tmp_path)]
    answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    system, requested, their_system, their_requested = json.loads(answer)
    assert system == pytest.approx(their_system, rel=0.02)
    assert requested == pytest.approx(their_requested, rel=0.02)


ELSEWHERE = """
import site, sys
sys.path[:0] = sys.argv[1:]
for folder in sys.argv[1:]:
    site.addsitedir(folder)
import threading
import numpy as np
from tilewise.profile import MemoryProfiler
def work():
    threads = [threading.Thread(target=np.ones, args=(250_000,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.ones(1_000_000)
print(MemoryProfiler().profile(work, sites=False, leaks=False).system_peak_bytes)
"""


def interpreter_at_a_fixed_address() -> str | None:
    """A Python of this version that is no position-independent executable, as Debian and Ubuntu ship theirs."""
    path = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    fixed = path.is_file() and path.read_bytes()[16:18] == b"\x02\x00"  # ELF's e_type: ET_EXEC
    return str(path) if fixed else None


@needs_watch
def test_an_interpreter_at_a_fixed_address_is_watched_too():
    """Its own stubs stand in for malloc and free, and the loader itself allocates through them."""
    python = interpreter_at_a_fixed_address()
    if python is None:
        pytest.skip("the system has no Python of this version at a fixed address")
    folders = [folder for folder in sys.path if folder and "lib-dynload" not in folder and Path(folder).is_dir()]
    command = [python, "-S", "-c", ELSEWHERE, *folders]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ""}).stdout
    assert 8_000_000 <= int(answer) < 20_000_000


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


# --- functions that misbehave, and what is left behind ---


@pytest.fixture
def nothing_is_left_behind():
    """Called at the end of a test that began with no object set aside."""

    def check():
        assert not tracemalloc.is_tracing()
        assert gc.get_freeze_count() < IMMORTAL
        assert native is None or not native.watch_active()

    gc.unfreeze()
    yield check
    gc.freeze()


def test_a_function_that_raises_is_said(either_way, nothing_is_left_behind):
    with pytest.raises(MeasurementError, match="raised KeyError"):
        MemoryProfiler().profile(lambda: {}["x"])
    nothing_is_left_behind()


# The limit's exception may surface inside a garbage-collection callback of the test framework, which reports it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_never_ends_meets_the_time_limit(either_way, nothing_is_left_behind):
    with pytest.raises(TimeLimitError):
        MemoryProfiler(time_limit=0.2).profile(lambda: time.sleep(1000))
    nothing_is_left_behind()


def test_profiling_inside_profiling_still_counts(nothing_is_left_behind):
    profile = peak_only(lambda: peak_only(lambda: np.ones(MEGABYTE, np.uint8).sum()))
    assert profile.peak_bytes >= MEGABYTE
    nothing_is_left_behind()


def test_a_profile_is_plain_data():
    profile = MemoryProfiler(leak_seconds=0.1).profile(lambda: np.ones(1000))
    assert json.loads(json.dumps(profile.as_dict()))["peak_bytes"] == profile.peak_bytes
    assert "peak" in str(profile)
