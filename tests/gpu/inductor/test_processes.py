"""The processes that PyTorch's compiler starts: one assembler for all of them, and a new one after a crash."""

from __future__ import annotations

import functools
import math
import os
import queue
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tilewise.inductor
from tilewise.gpu.inductor.processes import one_assembler, start_anew, start_early
from tools.spoiled import spoil

torch = pytest.importorskip("torch")
tasks = pytest.importorskip("torch._inductor.runtime.compile_tasks")
tuning = pytest.importorskip("torch._inductor.autotune_process")
_VARIABLE = "TRITON_PTXAS_PATH"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """PyTorch's compiling processes take an assembler of PyTorch's; how often Triton is made to ask for its version."""
    found: list[str] = []

    @functools.cache
    def taken() -> None:
        os.environ.setdefault(_VARIABLE, "pytorchs")

    compiler = ModuleType("triton.backends.nvidia.compiler")
    compiler.get_ptxas_version = SimpleNamespace(  # type: ignore[attr-defined]
        cache_clear=lambda: found.append(os.environ.get(_VARIABLE, "tritons"))
    )
    for name in ("triton", "triton.backends", "triton.backends.nvidia"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, compiler.__name__, compiler)
    monkeypatch.setattr(tasks, "_set_triton_ptxas_path", taken)
    monkeypatch.delenv(_VARIABLE, raising=False)
    return found


def test_the_process_that_measures_takes_the_assembler_of_those_that_compile_and_gives_it_back(asked: Any) -> None:
    for _ in range(2):  # PyTorch's own function does nothing when it is called again
        undo = one_assembler()
        assert os.environ[_VARIABLE] == "pytorchs"
        undo()
        assert _VARIABLE not in os.environ
    assert asked == ["pytorchs", "tritons"] * 2


def test_an_assembler_that_the_user_names_stays(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_VARIABLE, "the users")
    one_assembler()()
    assert os.environ[_VARIABLE] == "the users"


def test_a_pytorch_that_sets_no_assembler_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tasks, "_set_triton_ptxas_path")
    monkeypatch.delenv(_VARIABLE, raising=False)
    one_assembler()()
    assert _VARIABLE not in os.environ


class _Pool:
    def __init__(self) -> None:
        self.killed = 0
        self.processes = [self]

    def kill(self) -> None:
        self.killed += 1


def test_the_process_that_tried_a_failing_template_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _Pool()
    monkeypatch.setattr(tuning, "get_tuning_process_pool", lambda: pool)
    start_anew()
    assert pool.killed == 1
    for isolated, killed in ((False, 1), (True, 2)):
        with tilewise.inductor.enable(records=tmp_path, devices=("pretended",), isolated=isolated) as enabled:
            enabled.advisor.measured({object(): 1.0, object(): math.inf}, "convolution", [], [], None, {})
            assert pool.killed == killed
            enabled.advisor.measured({object(): 1.0, object(): 2.0}, "convolution", [], [], None, {})
            assert pool.killed == killed


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_that_tries_templates_takes_hold_of_the_gpu_early_and_is_given_back(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    pool, given = _Pool(), []

    def answer() -> None:
        if fails:
            raise EOFError

    waiting: queue.Queue[Any] = queue.Queue()
    waiting.put(SimpleNamespace(put=given.append, get=answer, kill=pool.kill))
    with ThreadPoolExecutor(1) as executor:
        whole = SimpleNamespace(process_queue=waiting, executor=executor)
        monkeypatch.setattr(tuning, "get_tuning_process_pool", lambda: whole)
        start_early()
    assert given == [torch.cuda.synchronize] and waiting.qsize() == 1 and pool.killed == fails
    monkeypatch.setattr(tuning, "get_tuning_process_pool", SimpleNamespace)
    start_early()  # a PyTorch that has no such pool starts its processes when it needs them


def test_a_kernels_text_is_given_a_fault() -> None:
    text = "import x\n\n@jit\ndef triton_bmm_1(arg_A, arg_B, out_ptr0):\n    acc += tl.dot(a, b, allow_tf32=False)\n"
    for how in ("crashes", "hangs"):
        found = spoil(text, how)
        compile(found, "kernel", "exec")
        assert found.startswith("import x\n\n@jit\ndef triton_bmm_1(arg_A, arg_B, out_ptr0):\n    ") and found != text
    assert "tl.dot(a + a, b, " in spoil(text, "is wrong")
