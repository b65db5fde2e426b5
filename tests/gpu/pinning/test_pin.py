"""`tilewise.pin`: Triton's autotuner chooses without a benchmark, with a stand-in of Triton and with the real one."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise
from tilewise.errors import ConfigurationError
from tilewise.gpu import pinning as state
from tilewise.gpu.pinning import choose as choose_module
from tilewise.gpu.pinning.ir import WorkSummary
from tilewise.gpu.pinning.lock import LockFile, MissingChoiceError
from tilewise.gpu.pinning.work_features import RankedCandidate
from tilewise.store.store import Machine

CONFIGS = [
    SimpleNamespace(
        kwargs={"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "GROUP_M": 8},
        num_warps=warps, num_stages=3, pre_hook=None, all_kwargs=dict,
    )
    for m in (16, 64, 128) for n in (32, 128, 256) for warps in (4, 8)
]  # fmt: skip


class Autotuner:
    """A stand-in with the parts of Triton's Autotuner that run for a new key."""

    def __init__(self, fn: Any, configs: list[Any], key: list[str]) -> None:
        self.fn = self.base_fn = fn
        self.configs, self.keys, self.arg_names = configs, key, ["a", "b", "M", "N", "K"]
        self.cache: dict[Any, Any] = {}

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Any]:
        return self.configs

    def _bench(self, *args: Any, config: Any, **meta: Any) -> list[float]:
        raise AssertionError("a configuration was benchmarked")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = tuple(self.nargs[name] for name in self.keys)
        if key not in self.cache:
            timings = {id(c): (self._bench(*args, config=c, **kwargs), c) for c in self.prune_configs(kwargs)}
            self.cache[key] = min(timings.values(), key=lambda pair: pair[0])[1]
        return self.cache[key]


class _Kernel:
    """A jitted kernel; configurations of `too_large` rows do not fit."""

    src = "def kernel(): ..."
    __name__ = "kernel"

    def __init__(self, too_large: int = 1000) -> None:
        self.too_large = too_large

    def run(self, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        raise type("OutOfResources", (Exception,), {})


class _Operand:
    dtype = "torch.bfloat16"


@pytest.fixture
def autotuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the class, as a loaded module of a pretend Triton on a pretend H200."""
    module = ModuleType("triton.runtime.autotuner")
    module.Autotuner = type("Autotuner", (Autotuner,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", module)
    monkeypatch.setattr(choose_module, "this_gpu", lambda: (Machine("autotune", "NVIDIA H200", {}), "3", "h200"))
    monkeypatch.setattr(choose_module, "_announced", set())
    monkeypatch.setattr(choose_module, "_compile", lambda *_: object())
    monkeypatch.setattr(choose_module, "describe_candidates", _no_front_end)
    yield module.Autotuner  # type: ignore[attr-defined]
    tilewise.unpin()


def _no_front_end(*_: Any) -> Any:
    raise ValueError("the stand-in has no front end")


def _launch(kernel: Any, sizes: tuple[int, int, int] = (4096, 4096, 1024)) -> Any:
    return kernel.run(_Operand(), _Operand(), *sizes, grid=(1,))


def test_a_pinned_kernel_is_ranked_by_the_model_and_never_benchmarked(autotuner: Any) -> None:
    kernel = autotuner(_Kernel(), CONFIGS, ["M", "N", "K"])
    with tilewise.pin() as pinned:
        assert pinned.active and state.is_pinned()
        best = _launch(kernel)
        assert best.kwargs["BLOCK_M"] * best.kwargs["BLOCK_N"] >= 64 * 128
        again = autotuner(_Kernel(), list(reversed(CONFIGS)), ["M", "N", "K"])
        assert _launch(again) is best  # the order of the list does not matter
    assert not state.is_pinned() and not kernel.cache
    with pytest.raises(AssertionError, match="benchmarked"):
        _launch(kernel)


def test_choices_that_were_measured_before_do_not_count_while_pinned(autotuner: Any) -> None:
    kernel = autotuner(_Kernel(), CONFIGS, ["M", "N", "K"])
    kernel.cache[(4096, 4096, 1024)] = CONFIGS[0]
    with tilewise.pin():
        assert _launch(kernel) is not CONFIGS[0]


def test_an_unknown_kernel_keeps_its_first_configuration_that_fits_and_says_so_once(
    autotuner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [SimpleNamespace(kwargs={"BLOCK": b}, num_warps=4, num_stages=2, pre_hook=None) for b in (4096, 64, 32)]
    monkeypatch.setattr(
        choose_module, "_compile", lambda tuner, config, kwargs: object() if config.kwargs["BLOCK"] < 1000 else None
    )
    kernel = autotuner(_Kernel(), configs, ["M"])
    with tilewise.pin(), pytest.warns(UserWarning, match="keeps its first configuration that fits") as caught:
        assert [_launch(kernel, (m, 2, 3)).kwargs["BLOCK"] for m in (1, 2, 3)] == [64, 64, 64]
    assert len([one for one in caught if "keeps" in str(one.message)]) == 1


def test_a_device_without_a_record_is_said_once(autotuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_module, "this_gpu", lambda: (Machine("autotune", "Unheard Of 9", {}), "3", "h200"))
    kernel = autotuner(_Kernel(), CONFIGS, ["M", "N", "K"])
    with tilewise.pin(), pytest.warns(UserWarning, match="there is no record of Unheard Of 9"):
        assert _launch(kernel) is CONFIGS[0]


def test_a_configuration_that_does_not_fit_is_recognised_before_it_is_launched() -> None:
    tuner = SimpleNamespace(fn=_Kernel(), nargs={})
    assert choose_module._compile(tuner, CONFIGS[0], {"grid": (1,)}) is None


def test_the_first_few_by_work_are_compiled_and_ranked_by_their_machine_code(
    autotuner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [
        SimpleNamespace(kwargs={"BLOCK": 16 * n}, num_warps=4, num_stages=2, pre_hook=None) for n in range(1, 13)
    ]
    candidates = [RankedCandidate(WorkSummary(), 1, 4, 2, float(n)) for n in range(12)]
    compiled: list[int] = []

    def scores(ones: Any, device: Any, works: Any = None) -> Any:
        """Prefer large blocks without machine code, and the one with fewest registers with it."""
        return np.array([-c.unique_bytes for c in ones] if works is None else [float(w.registers) for w in works])

    def compile_one(tuner: Any, config: Any, kwargs: Any) -> Any:
        compiled.append(config.kwargs["BLOCK"])
        if config.kwargs["BLOCK"] == 16 * 12:
            return None  # does not fit
        asm = {"ptx": "", "ttgir": ""}
        registers = 40 + abs(config.kwargs["BLOCK"] - 96)
        return SimpleNamespace(asm=asm, n_regs=registers, n_spills=0, metadata=SimpleNamespace(shared=0))

    ranker = SimpleNamespace(name="ranker 1", scores=scores)
    monkeypatch.setattr(choose_module, "shipped_ranker", lambda: ranker)
    monkeypatch.setattr(choose_module, "describe_candidates", lambda *_: candidates)
    monkeypatch.setattr(choose_module, "_capability", lambda: 90)
    monkeypatch.setattr(choose_module, "_compile", compile_one)
    with tilewise.pin():
        assert _launch(autotuner(_Kernel(), configs, ["M"])).kwargs["BLOCK"] == 96
    assert compiled == [16 * n for n in range(12, 3, -1)]  # one that does not fit, then the first eight
    # Without machine code, as the interpreter has none, the first that fits is chosen.
    monkeypatch.setattr(choose_module, "_compile", lambda *_: object())
    with tilewise.pin():
        assert _launch(autotuner(_Kernel(), configs, ["M"])).kwargs["BLOCK"] == 16 * 12


def test_a_lock_file_is_written_read_and_frozen(autotuner: Any, tmp_path: Path) -> None:
    path = tmp_path / "tilewise.lock"
    with tilewise.pin(lock=path):
        best = _launch(autotuner(_Kernel(), CONFIGS, ["M", "N", "K"]))
    (choice,) = LockFile(path)
    assert choice.config["BLOCK_M"] == best.kwargs["BLOCK_M"] and choice.device == "NVIDIA H200" and choice.model
    other = next(config for config in choice.candidates if config != choice.config)
    text = path.read_text()
    start, end = text.index("config = "), text.index("\n", text.index("config = "))
    values = ", ".join(f"{name} = {value}" for name, value in other.items())
    path.write_text(f"{text[:start]}config = {{ {values} }}{text[end:]}")
    with tilewise.pin(lock=path, frozen=True):
        kernel = autotuner(_Kernel(), CONFIGS, ["M", "N", "K"])
        assert _launch(kernel).kwargs["BLOCK_M"] == other["BLOCK_M"]  # the file's choice, not the model's
        with pytest.raises(MissingChoiceError, match="has no choice for kernel"):
            _launch(kernel, (64, 64, 64))
    with pytest.raises(ConfigurationError, match="frozen needs a lock file"):
        tilewise.pin(frozen=True)


def test_a_module_that_is_imported_later_is_patched_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = importlib.import_module("tilewise.gpu.pinning.patch")
    (tmp_path / "late_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[ModuleType] = []
    pinned = patch.Pinned(None)
    patch._after_import(pinned, "late_module", lambda _, module: modules.append(module))
    assert not modules
    assert importlib.import_module("late_module").VALUE == 1 and [m.VALUE for m in modules] == [1]
    patch._after_import(pinned, "never_module", lambda _, module: modules.append(module))
    pinned.undo()
    assert not any(type(finder).__name__ == "_ImportHook" for finder in sys.meta_path)


def test_without_triton_and_pytorch_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    with pytest.warns(UserWarning, match=r"neither Triton nor PyTorch is installed; there is nothing to pin\.$"):
        tilewise.pin()
    tilewise.unpin()


@pytest.mark.parametrize(("value", "code"), [("1", 0), ("0", 3), ("yes", 2)])
def test_the_environment_variable_pins_at_import(value: str, code: int) -> None:
    script = "import sys, tilewise, tilewise.gpu.pinning as s; sys.exit(0 if s.is_pinned() else 3)"
    done = subprocess.run([sys.executable, "-c", script], env={"TILEWISE_PIN": value}, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr


def test_run_pinned_runs_a_script_and_its_child_processes_pinned(tmp_path: Path) -> None:
    child = "import tilewise.gpu.pinning as s, sys; sys.exit(0 if s.is_pinned() else 1)"
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess, sys\nprint(sys.argv[1:])\n"
                      f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)\n")  # fmt: skip
    command = [sys.executable, "-m", "tilewise", "run-pinned", str(script), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "['--steps', '3']\n"), done.stderr


def test_deterministic_algorithms_forbid_measuring() -> None:
    torch = pytest.importorskip("torch")
    assert not state.is_unmeasured()
    torch.use_deterministic_algorithms(True)
    try:
        assert state.is_unmeasured() and not state.is_pinned()
    finally:
        torch.use_deterministic_algorithms(False)


_INTERPRETED = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
import tilewise
from tilewise.tune.triton import autotune
def bench(call, quantiles):
    raise AssertionError("a configuration was benchmarked")
def kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0) + 1.0, mask=i < n)
configs = [triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 128) for w in (2, 4)]
foreign = triton.autotune(configs=configs, key=["n"], do_bench=bench)(triton.jit(kernel))
own = autotune(configs=configs, key=["n"], do_bench=bench, budget=0, cache=sys.argv[1])(triton.jit(kernel))
def run(autotuned):
    x = torch.randn(1000); y = torch.zeros(1000)
    autotuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000)
    assert torch.equal(y, x + 1)
run(own)
with tilewise.pin(lock=sys.argv[1] + "/tilewise.lock"):
    run(foreign)
    run(own)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_tritons_own_autotuner_is_pinned(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _INTERPRETED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(LockFile(tmp_path / "tilewise.lock")) == 1
