"""The processes of PyTorch's compiler: they share one assembler, and are restarted after a crash."""

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
from tilewise.gpu.inductor.patch import restart_test_process, share_assembler, start_test_process
from tools.spoiled import spoil

torch = pytest.importorskip("torch")
tasks = pytest.importorskip("torch._inductor.runtime.compile_tasks")
tuning = pytest.importorskip("torch._inductor.autotune_process")
_VARIABLE = "TRITON_PTXAS_PATH"


@pytest.fixture
def version_queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake PyTorch's assembler; list the assembler in use each time Triton forgets its version."""
    queries: list[str] = []

    @functools.cache
    def set_path() -> None:
        os.environ.setdefault(_VARIABLE, "from pytorch")

    compiler = ModuleType("triton.backends.nvidia.compiler")
    compiler.get_ptxas_version = SimpleNamespace(  # type: ignore[attr-defined]
        cache_clear=lambda: queries.append(os.environ.get(_VARIABLE, "from triton"))
    )
    for name in ("triton", "triton.backends", "triton.backends.nvidia"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, compiler.__name__, compiler)
    monkeypatch.setattr(tasks, "_set_triton_ptxas_path", set_path)
    monkeypatch.delenv(_VARIABLE, raising=False)
    return queries


def test_the_main_process_uses_the_compile_workers_assembler_until_undone(version_queries: Any) -> None:
    for _ in range(2):  # PyTorch's own function does nothing when it is called again
        undo = share_assembler()
        assert os.environ[_VARIABLE] == "from pytorch"
        undo()
        assert _VARIABLE not in os.environ
    assert version_queries == ["from pytorch", "from triton"] * 2


def test_the_users_assembler_is_not_replaced(version_queries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_VARIABLE, "from the user")
    share_assembler()()
    assert os.environ[_VARIABLE] == "from the user"


def test_a_pytorch_without_its_own_assembler_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tasks, "_set_triton_ptxas_path")
    monkeypatch.delenv(_VARIABLE, raising=False)
    share_assembler()()
    assert _VARIABLE not in os.environ


class _Pool:
    def __init__(self) -> None:
        self.kills = 0
        self.processes = [self]

    def kill(self) -> None:
        self.kills += 1


def test_the_test_process_is_ended_after_a_failing_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _Pool()
    monkeypatch.setattr(tuning, "get_tuning_process_pool", lambda: pool)
    restart_test_process()
    assert pool.kills == 1
    for isolated, kills in ((False, 1), (True, 2)):
        with tilewise.inductor.enable(records=tmp_path, devices=("fake",), isolated=isolated) as enabled:
            enabled.advisor.on_feedback({object(): 1.0, object(): math.inf}, "convolution", [], [], None, {})
            assert pool.kills == kills
            enabled.advisor.on_feedback({object(): 1.0, object(): 2.0}, "convolution", [], [], None, {})
            assert pool.kills == kills


@pytest.mark.parametrize("fails", [False, True])
def test_the_test_process_creates_its_cuda_context_early(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    pool, tasks_sent = _Pool(), []

    def answer() -> None:
        if fails:
            raise EOFError

    idle: queue.Queue[Any] = queue.Queue()
    idle.put(SimpleNamespace(put=tasks_sent.append, get=answer, kill=pool.kill))
    with ThreadPoolExecutor(1) as executor:
        fake = SimpleNamespace(process_queue=idle, executor=executor)
        monkeypatch.setattr(tuning, "get_tuning_process_pool", lambda: fake)
        start_test_process()
    assert tasks_sent == [torch.cuda.synchronize] and idle.qsize() == 1 and pool.kills == fails
    monkeypatch.setattr(tuning, "get_tuning_process_pool", SimpleNamespace)
    start_test_process()  # a PyTorch that has no such pool starts its processes when it needs them


def test_faults_are_inserted_into_a_kernels_source() -> None:
    text = "import x\n\n@jit\ndef triton_bmm_1(arg_A, arg_B, out_ptr0):\n    acc += tl.dot(a, b, allow_tf32=False)\n"
    for how in ("crashes", "hangs"):
        faulty = spoil(text, how)
        compile(faulty, "kernel", "exec")
        assert faulty.startswith("import x\n\n@jit\ndef triton_bmm_1(arg_A, arg_B, out_ptr0):\n    ") and faulty != text
    assert "tl.dot(a + a, b, " in spoil(text, "is wrong")
