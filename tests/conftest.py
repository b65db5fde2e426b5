"""What the framework's tests share: fixed Hypothesis examples, and a fixture that runs a test on every backend."""

from __future__ import annotations

import functools
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Before NumPy is imported: its library's threads would fight the tests that run beside this one for the same cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TILEWISE_TUNED", "0")  # tests are about the kernels, not about what was tuned on this machine
# Training takes a GPU where there is one, and then gives other bits: the tests are the same on every machine.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
from hypothesis import settings

from tilewise._environment import MachineOverride, machine_override
from tilewise._extension import emulate_machine, native
from tilewise.backend import use_backend

settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("fixed")

# Fifteen seconds of a core or more each: begun last, one of them would run on alone.
LONGEST = (
    "native/test_fences.py", "docs/test_docs.py", "learn/test_checks.py", "cli/test_sweep.py",
    "programs/test_programs.py", "quantize/test_networks.py", "fuzz/test_fuzz.py", "learn/test_lessons.py",
    "tour/test_tour.py", "onnx/test_save.py", "costmodel/training/test_loop.py",
)  # fmt: skip
# Folders whose tests try to break the judge, the board and the readers: none of them is skipped without a word.
SECURITY = ("bench/", "fuzz/", "learn/grading/")
if native is None:  # said once; each of the processes that tests start would say it again
    os.environ["TILEWISE_NATIVE"] = "0"
BACKENDS = ["numpy", *(native.supported_isas() if native is not None else [])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first, the others in their order."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the security tests that were skipped, with the reason, so that a machine without a sandbox is noticed."""
    skipped: dict[str, Counter[str]] = {}  # reason: test, how many cases
    for report in terminalreporter.stats.get("skipped", []):
        if report.nodeid.removeprefix("tests/").startswith(SECURITY):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            skipped.setdefault(reason.removeprefix("Skipped: "), Counter())[report.nodeid.split("[")[0]] += 1
    if skipped:
        total = sum(tests.total() for tests in skipped.values())
        terminalreporter.section(f"{total} SECURITY TESTS DID NOT RUN", "!", red=True, bold=True)
    for reason, tests in skipped.items():
        terminalreporter.line(f"{reason}:", bold=True)
        for name, count in sorted(tests.items()):
            terminalreporter.line(f"  {name}{f' ({count} cases)' if count > 1 else ''}")


def pytest_collection_finish() -> None:
    """Two hundred test files and what they import stay until the end: no collection need look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _kernels_as_they_were() -> Iterator[None]:
    """What a test sets of the kernels, threads and instruction set, is its own."""
    if native is None:
        yield
        return
    threads, isa = native.num_threads(), native.isa()
    yield
    if native.num_threads() != threads:
        native.set_num_threads(threads)
    if native.isa() != isa:
        native.set_isa(isa)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Plain NumPy, then the native kernels with each instruction set this machine has."""
    if request.param == "numpy":
        with use_backend("numpy"):
            yield "numpy"
        return
    assert native is not None
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture
def another_machine() -> Iterator[Callable[[MachineOverride], None]]:
    """Plays machines for the kernels; afterwards they are on the one that the environment names, or on this one."""
    assert native is not None
    yield functools.partial(emulate_machine, native)
    emulate_machine(native, machine_override())


@pytest.fixture
def settings_restored() -> Iterator[None]:
    """For tests that change instruction set and threads."""
    assert native is not None
    isa, threads = native.isa(), native.num_threads()
    yield
    native.set_isa(isa)
    native.set_num_threads(threads)
