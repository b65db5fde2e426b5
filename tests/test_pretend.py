"""One place says what the machine is, and a documented variable lets it be another machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tilewise import _system
from tilewise._environment import MachineOverride, parse_machine
from tilewise._extension import native
from tilewise.errors import ConfigurationError

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    own_environment = {name: value for name, value in os.environ.items() if name != "TILEWISE_MACHINE"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=own_environment | environment
    )


def evaluate(code: str, **environment: str) -> object:
    done = run(
        f"import json, tilewise\nfrom tilewise._extension import native\nprint(json.dumps({code}))", **environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_any_part_of_a_machine_can_be_said():
    assert parse_machine("") == MachineOverride()
    assert parse_machine(" l1=48k, l2=2M,l3=300M,cores=16 ") == MachineOverride(48 << 10, 2 << 20, 300 << 20, 16)
    assert parse_machine("l3=0,cores=1") == MachineOverride(l3=0, cores=1)


@pytest.mark.parametrize(
    "words",
    ["l4=1M", "l2", "l2=", "l2=big", "l2=-1", "l2=1T", "cores=0", "cores=1M", "cores=100000", "l1=1K", "l1=9G",
     "l3=999999999999G", "l1=1M,l2=64K", "l2=1M,l2=2M", "=", "cores=1.5", "l2=٢M"],
)  # fmt: skip
def test_a_machine_that_means_nothing_is_one_sentence_and_code_2(words):
    with pytest.raises(ConfigurationError, match="TILEWISE_MACHINE"):
        parse_machine(words)
    done = run("import tilewise.backend", TILEWISE_MACHINE=words)
    assert done.returncode == 2
    assert done.stderr.startswith("tilewise: TILEWISE_MACHINE")
    assert len(done.stderr.splitlines()) == 1


def test_whoever_imports_tilewise_can_catch_the_error():
    code = "try:\n import tilewise.backend\nexcept ValueError as error:\n print(type(error).__name__)"
    assert run(code, TILEWISE_MACHINE="cores=none").stdout.strip() == "ConfigurationError"


@needs_native
def test_an_instruction_set_that_is_none_is_one_sentence_and_code_2():
    done = run("import tilewise.backend", TILEWISE_ISA="sse9")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


@needs_native
def test_the_kernels_see_the_machine_that_is_played():
    assert evaluate("native.cache_sizes()", TILEWISE_MACHINE="l1=48K,l2=2M,l3=300M") == [48 << 10, 2 << 20, 300 << 20]
    assert evaluate("native.cores()", TILEWISE_MACHINE="cores=16") == 16
    assert evaluate("tilewise.get_num_threads()", TILEWISE_MACHINE="cores=16") == 16
    assert evaluate("native.real_cores()", TILEWISE_MACHINE="cores=16") == _system.real_cores()


@needs_native
@pytest.mark.parametrize("cores", [1, 2, 16, 64])
@pytest.mark.parametrize("l3", ["0", "2M", "32M", "300M", "4G"])
def test_a_cores_share_of_l3_is_believable_whatever_is_reported(l3, cores):
    machine = f"l2=1M,l3={l3},cores={cores}"
    share, (_, _, whole) = evaluate("(native.l3_share(), native.cache_sizes())", TILEWISE_MACHINE=machine)
    assert 1 << 20 <= share <= min(whole, 8 << 20)


@needs_native
def test_an_l3_that_is_not_reported_is_taken_to_be_there_and_modest():
    l1, l2, l3 = evaluate("native.cache_sizes()", TILEWISE_MACHINE="l3=0")
    assert l1 < l2 <= l3 <= max(l2, 32 << 20)


@needs_native
def test_a_process_kept_to_one_core_uses_one_thread():
    stay = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    assert run(f"{stay}\nimport tilewise\nprint(tilewise.get_num_threads())").stdout.strip() == "1"


@needs_native
def test_results_are_the_same_on_every_machine_that_is_played():
    code = (
        "(lambda np, a, b: float(np.abs(tilewise.backend.matmul_native(a, b) - a @ b).max()))"
        "(*(lambda np: (np, np.random.default_rng(0).normal(size=(201, 300)).astype('f'),"
        " np.random.default_rng(1).normal(size=(300, 517)).astype('f')))(__import__('numpy')))"
    )
    for machine in ("l1=32K,l2=256K,l3=0,cores=1", "l1=48K,l2=2M,l3=300M,cores=16", "l2=512K,l3=32M,cores=64"):
        assert evaluate(code, TILEWISE_MACHINE=machine) < 1e-3


def test_caches_that_are_played_are_listed(monkeypatch):
    monkeypatch.setenv("TILEWISE_MACHINE", "l1=48K,l2=2M,l3=300M,cores=16")
    levels = [(level.level, level.bytes, level.shared_by) for level in _system.caches()]
    assert levels == [(1, 48 << 10, 1), (2, 2 << 20, 1), (3, 300 << 20, 16)]
    monkeypatch.setenv("TILEWISE_MACHINE", "l3=0")
    assert all(level.level != 3 for level in _system.caches())


def test_lists_of_cpus_are_counted():
    assert [_system._count_cpus(text) for text in ("0", "0-3", "0-1,8-9", "0,4")] == [1, 4, 4, 2]
