"""The Triton kernels: run in Triton's interpreter, and compiled for a GPU that need not be present."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

_SOURCE = Path(__file__).parents[2] / "src"
_old_numpy = tuple(map(int, np.__version__.split(".")[:2])) < (2, 4)
needs_interpreter = pytest.mark.skipif(not _old_numpy, reason="Triton's interpreter needs NumPy before 2.4")

_SCRIPT = """
import random, sys
from tilewise.gpu.measure.execution import open_device
from tilewise.gpu.families.family import get_family
device = open_device("interpreter")
torch = device.torch
chance = random.Random(0)
for spec in {specs}:
    family = get_family(spec["family"])
    problem = family.problem(spec)
    operands = family.operands(problem, torch, "cpu", torch.Generator().manual_seed(0))
    expected = family.expected(problem, torch, operands)
    configs = [config for config in family.configs(problem) if family.misfit(problem, config, 232448) is None]
    for config in [configs[0], *chance.sample(configs, 4)]:
        operands.guarded.fill_(float("nan"))
        device.prepare(family.binary(problem, config), family.launch(problem, config, operands))()
        close = ((operands.out.float() - expected.value).abs() <= expected.bound).all()
        untouched = operands.guarded[operands.out.numel():].isnan().all()
        if not (close and untouched):
            sys.exit(f"{{problem}} {{config}} differs from PyTorch")
"""


def _run_interpreted(specs: list[dict[str, object]]) -> None:
    # A separate process, because TRITON_INTERPRET is read when a kernel is decorated.
    environment = {**os.environ, "PYTHONPATH": str(_SOURCE), "TILEWISE_NATIVE": "0"}
    code = _SCRIPT.format(specs=specs)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_interpreter
def test_matmul_agrees_with_pytorch_in_all_layouts_and_epilogues() -> None:
    chance = random.Random(0)
    _run_interpreted(
        [
            {"family": "matmul", "m": 37, "n": 56, "k": 70, "dtype": dtype, "epilogue": epilogue,
             "layout": chance.choice(["nn", "nt", "tn", "tt"])}
            for dtype in ("fp16", "tf32")
            for epilogue in ("none", "bias", "bias_relu", "bias_gelu", "residual")
        ]
        + [{"family": "matmul", "m": 1, "n": 50, "k": 33, "dtype": "fp16", "layout": layout} for layout in ("nn", "tt")]
        + [{"family": "batched_matmul", "batch": 3, "m": 20, "n": 24, "k": 40, "dtype": "tf32", "layout": "nt"}]
    )  # fmt: skip


@needs_interpreter
def test_products_agree_with_pytorch_in_every_schedule() -> None:
    chance = random.Random(1)
    sizes = ((24, 48, 256), (7, 40, 520), (70, 8, 96), (33, 51, 77))  # few rows, long K, few columns, odd
    _run_interpreted(
        [
            {"family": "product", "m": m, "n": n, "k": k, "dtype": "fp16", "epilogue": epilogue,
             "layout": chance.choice(["nn", "nt", "tn", "tt"])}
            for m, n, k in sizes
            for epilogue in ("none", "bias_gelu", "residual")
        ]
        + [{"family": "product", "m": m, "n": n, "k": k, "dtype": "tf32", "layout": "nt"} for m, n, k in sizes]
    )  # fmt: skip


@needs_interpreter
def test_grouped_and_block_scaled_products_agree_with_pytorch() -> None:
    grouped = {"family": "grouped_matmul", "n": 80, "k": 160, "dtype": "fp16"}
    _run_interpreted(
        [
            {**grouped, "tokens": 9, "top_k": 2, "experts": 5},
            {**grouped, "tokens": 40, "top_k": 1, "experts": 3},
            {**grouped, "tokens": 7, "top_k": 3, "experts": 4, "dtype": "fp8", "scales": "tensor"},
            {**grouped, "tokens": 7, "top_k": 2, "experts": 4, "k": 272, "dtype": "fp8", "scales": "block"},
            {"family": "block_fp8_matmul", "m": 33, "n": 144, "k": 272},
        ]
    )


@needs_interpreter
def test_attention_agrees_with_pytorch() -> None:
    shape = {"family": "attention", "batch": 2, "heads": 4, "kv_heads": 2, "dtype": "fp16"}
    _run_interpreted(
        [
            {**shape, "queries": 20, "keys": 20, "head": 64, "causal": 1},
            {**shape, "queries": 1, "keys": 70, "head": 128, "causal": 1},
            {**shape, "queries": 30, "keys": 77, "head": 32, "causal": 0},
        ]
    )


@needs_interpreter
def test_row_kernels_agree_with_pytorch() -> None:
    specs: list[dict[str, object]] = [
        {"family": family, "rows": 13, "cols": cols, "dtype": dtype}
        for family in ("softmax", "layer_norm", "rms_norm")
        for cols, dtype in ((200, "fp16"), (333, "fp32"), (1024, "fp32"))
    ]
    specs += [
        {"family": "reduction", "rows": 45, "cols": 300, "axis": axis, "operation": operation, "dtype": "fp32"}
        for axis in (0, 1)
        for operation in ("sum", "max")
    ]
    _run_interpreted(specs)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_one_binary_serves_every_shape(layout: str) -> None:
    from tilewise.gpu.families.family import get_family

    family = get_family("matmul")
    binaries = set()
    for m, n, k in ((8, 16, 1000), (1024, 24, 8), (4096, 4096, 4096)):
        problem = family.problem({"family": "matmul", "m": m, "n": n, "k": k, "layout": layout})
        binaries.add(family.binary(problem, family.configs(problem)[0]).key)
    assert len(binaries) == 1


def test_compiled_products_use_tma_and_warpgroup_mma(tmp_path: Path) -> None:
    code = """
from tilewise.gpu.measure.compiler import compile_binary
from tilewise.gpu.families.family import get_family
from tilewise.store.problem import Config
family = get_family("product")
problem = family.problem({"family": "product", "m": 1000, "n": 4096, "k": 768, "layout": "nt"})
tile = {"block_m": 128, "block_n": 128, "block_k": 64, "warps": 8, "stages": 3, "group": 8, "tma": 1, "swapped": 0}
for ways in ({"persistent": 1, "tail": 0, "parts": 1}, {"persistent": 0, "tail": 1, "parts": 1}):
    ptx = compile_binary(family.binary(problem, Config({**tile, **ways})), 90).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
"""
    environment = {**os.environ, "PYTHONPATH": str(_SOURCE), "TILEWISE_NATIVE": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_compiled_matmul_uses_tensor_cores_and_wide_asynchronous_loads(tmp_path: Path) -> None:
    code = """
from tilewise.gpu.measure.compiler import compile_binary
from tilewise.gpu.families.family import get_family
family = get_family("matmul")
problem = family.problem({"family": "matmul", "m": 100, "n": 1000, "k": 768, "layout": "nt"})
ptx = compile_binary(family.binary(problem, family.configs(problem)[0]), 90).asm["ptx"]
assert "wgmma.mma_async" in ptx and "cp.async.cg.shared.global" in ptx and "0x10" in ptx
"""
    environment = {**os.environ, "PYTHONPATH": str(_SOURCE), "TILEWISE_NATIVE": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
