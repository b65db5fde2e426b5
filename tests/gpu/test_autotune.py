"""`autotune` for Triton: its decisions on invented timings, and a run in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.gpu.autotune import config_of, problem_of
from tilewise.store.store import Machine
from tilewise.tune.triton import autotune as module_name
from tilewise.tune.triton import autotune as public_name

auto = importlib.import_module("tilewise.gpu.autotune")


def launch(block: int, warps: int, **more) -> SimpleNamespace:
    return SimpleNamespace(kwargs={"BLOCK": block, **more}, num_warps=warps, num_stages=2, num_ctas=1, maxnreg=None)


CONFIGS = [launch(block, warps, EXACT=exact) for block in (16, 32, 64, 128, 256) for warps in (1, 2, 4, 8)
           for exact in ("yes", "no")]  # fmt: skip


def runtime(config: SimpleNamespace, n: int) -> float:
    away = abs(math.log2(config.kwargs["BLOCK"]) - math.log2(n) / 2)
    slow = 0.2 if config.kwargs["EXACT"] == "yes" else 0.0
    return 1e4 * (1 + 0.3 * away + 0.1 * abs(math.log2(config.num_warps) - 1) + slow)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auto, "this_gpu", lambda: (Machine("autotune", "Fake GPU", {}), "3", None))
    messages: list[str] = []
    first, second = (auto.Session("kernel", "abc", 5, tmp_path, messages.append) for _ in range(2))
    return SimpleNamespace(first=first, second=second, messages=messages, folder=tmp_path)


def choose(session, n: int, configs=CONFIGS, broken=()):
    """Return the session's choice and the configurations it measurements."""
    measurements = []

    def measure(config):
        measurements.append(config)
        if config in broken:
            raise RuntimeError("an illegal memory access")
        return runtime(config, n)

    return session.choose(configs, {"n": n}, ["torch.float32"], measure), measurements


def test_the_public_name_is_the_function():
    assert public_name is module_name and callable(public_name)


def test_later_keys_need_fewer_measurements_than_the_first_three(session):
    for n in (1000, 2000, 500):
        best, measurements = choose(session.first, n)
        assert len(set(map(id, measurements))) <= 20
    for n in (3000, 4000, 700):
        best, measurements = choose(session.first, n)
        assert len(set(map(id, measurements))) <= 10
        assert min(runtime(c, n) for c in CONFIGS) / runtime(best, n) > 0.9


def test_the_next_process_reads_the_choice_from_disk(session):
    best, _ = choose(session.first, 1000)
    again, measurements = choose(session.second, 1000)
    assert again is best and not measurements
    assert "chosen before" in session.messages[-1]


def test_the_next_process_learns_from_stored_measurements(session):
    _, first = choose(session.first, 1000)
    for n in (2000, 500):
        choose(session.first, n)
    _, later = choose(session.second, 1500)
    assert len(set(map(id, later))) < len(set(map(id, first)))


def test_a_stored_choice_is_used_only_while_it_is_listed(session):
    best, _ = choose(session.first, 1000)
    fewer = [config for config in CONFIGS if config is best or config.num_warps == 8]
    again, measurements = choose(session.second, 1000, fewer)
    assert again is best and not measurements
    without = [config for config in CONFIGS if config is not best]
    other, measurements = choose(session.second, 1000, without)
    assert other is not best and measurements


def test_a_configuration_that_fails_is_not_chosen(session):
    fastest = min(CONFIGS, key=lambda config: runtime(config, 1000))
    best, _ = choose(session.first, 1000, broken=[fastest])
    assert best is not fastest
    with pytest.raises(TilewiseError, match="none of the"):
        choose(session.first, 2000, broken=CONFIGS)


def test_a_matrix_product_is_matched_by_the_names_of_its_arguments():
    blocks = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 8}
    settings = auto.settings_of(SimpleNamespace(kwargs=blocks, num_warps=4, num_stages=3))
    problem, configs = auto.match_matmul([settings], {"M": 100, "N": 200, "K": 300}, ["torch.float16"])
    assert dict(configs[0]) == {"block_m": 64, "block_n": 32, "block_k": 16, "group": 8, "warps": 4, "stages": 3}
    assert (problem.size("m"), problem.size("n"), problem.size("k")) == (100, 200, 300)
    assert auto.match_matmul([settings], {"M": 100, "N": 200}, ["torch.float16"]) is None
    assert auto.match_matmul([{"BLOCK": 3}], {"M": 1, "N": 2, "K": 3}, ["torch.float16"]) is None
    assert auto.match_matmul([settings], {"M": 1, "N": 2, "K": 3}, ["torch.int8"]) is None


def test_on_an_h200_the_shipped_model_ranks_matrix_products(session, monkeypatch):
    monkeypatch.setattr(auto, "this_gpu", lambda: (Machine("autotune", "NVIDIA H200", {}), "3", "h200"))
    configs = [
        SimpleNamespace(kwargs={"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "GROUP_M": 8}, num_warps=w, num_stages=3)
        for m in (16, 64, 128) for n in (32, 128, 256) for w in (4, 8)
    ]  # fmt: skip
    measurements = []

    def measure(config):
        measurements.append(config)
        return 1000.0 + 10 * len(measurements)

    session.first.choose(configs, {"M": 4096, "N": 4096, "K": 1024}, ["torch.bfloat16"], measure)
    assert len(set(map(id, measurements))) <= 5
    assert measurements[0].kwargs["BLOCK_M"] * measurements[0].kwargs["BLOCK_N"] >= 64 * 128


def test_products_whose_tiles_cannot_fit_are_not_compiled_and_not_lowered(session, monkeypatch):
    monkeypatch.setattr(auto, "this_gpu", lambda: (Machine("autotune", "NVIDIA H200", {}), "3", "h200"))
    configs = [
        SimpleNamespace(kwargs={"BLOCK_M": m, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8}, num_warps=4, num_stages=s)
        for m in (64, 128, 256) for s in (3, 9)
    ]  # fmt: skip
    measurements = []

    def measure(config):
        measurements.append(config)
        return 1000.0

    sizes = {"M": 4096, "N": 4096, "K": 1024}
    session.first.choose(configs, sizes, ["torch.bfloat16"], measure, lambda: pytest.fail("the kernel was lowered"))
    assert {(c.kwargs["BLOCK_M"], c.num_stages) for c in measurements} == {(64, 3)}


def test_on_a_gpu_without_a_model_the_nearest_model_is_used_with_one_warning(session, monkeypatch):
    monkeypatch.setattr(auto, "this_gpu", lambda: (Machine("autotune", "NVIDIA A100", {}), "3", "h200"))
    kwargs = [{"BLOCK_M": m, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8} for m in (16, 64, 128)]
    configs = [SimpleNamespace(kwargs=blocks, num_warps=4, num_stages=3) for blocks in kwargs]
    with pytest.warns(UserWarning, match="no model was trained on NVIDIA A100: starting from that of h200") as warnings:
        for m in (4096, 2048):
            session.first.choose(configs, {"M": m, "N": 4096, "K": 1024}, ["torch.bfloat16"], lambda config: 1000.0)
    assert len(warnings) == 1


def test_an_unknown_kernel_is_measured_in_the_order_of_its_work_and_never_with_tiles_that_cannot_fit(session):
    from tilewise.gpu.pinning.choose import ConfigRanking

    costs = [20.0 if config.kwargs["BLOCK"] == 256 else runtime(config, 1000) / 1e4 for config in CONFIGS]
    measurements = []

    def measure(config):
        measurements.append(config)
        return runtime(config, 1000)

    ranking = ConfigRanking(range(len(CONFIGS)), costs, "ranker")
    best = session.first.choose(CONFIGS, {"n": 1000}, ["torch.float32"], measure, lambda: ranking)
    assert best is min(CONFIGS, key=lambda config: runtime(config, 1000))
    assert len(set(map(id, measurements))) <= 5 and all(config.kwargs["BLOCK"] < 256 for config in measurements)


def test_settings_that_are_not_numbers_are_distinguished():
    assert config_of({"BLOCK": 32, "FAST": True, "mode": "ieee", "maxnreg": None}) == config_of(
        {"mode": "ieee", "FAST": 1, "BLOCK": 32}
    )
    assert config_of({"mode": "ieee"}) != config_of({"mode": "tf32"})
    assert problem_of("k", "a", {"n": 3}) != problem_of("k", "b", {"n": 3})


def test_a_negative_budget_is_rejected():
    with pytest.raises(ConfigurationError, match="budget"):
        public_name([], [], budget=-1)


_INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import sys, torch, triton, triton.language as tl
from tilewise.tune.triton import autotune
timings = []
configs = [triton.Config({"BLOCK": b}, num_warps=w) for b in (16, 32, 64, 128, 256, 512) for w in (1, 2, 4, 8, 16, 32)]
def bench(call, quantiles):
    call()
    timings.append(1)
    return [1.0] * 3
@autotune(configs=configs, key=["n"], cache=sys.argv[1], do_bench=bench)
@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0) + 1.0, mask=i < n)
x = torch.randn(1000); y = torch.zeros(1000)
add_one[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000)
assert torch.equal(y, x + 1)
assert 1 <= len(timings) < len(configs)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_decorated_kernel_runs_in_tritons_interpreter(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", _INTERPRETED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
