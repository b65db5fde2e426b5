"""Whether warps of different roles pay on this GPU: `python3 -m tools.warp_roles --out FILE`.

Triton can give some warps of a program the loads and others the arithmetic (`warp_specialize`). On a Hopper GPU it does
so for programs of four warps that store through plain pointers, in a loop over tiles or over K; this times such
programs, and the same ones without roles, beside the library on drawn products of many rows.
"""

# The kernels' bodies are Triton's language, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.tune.workloads.products import drawn_products

_TILES = ((128, 128, 4), (128, 256, 3), (256, 128, 3))  # rows, columns, stages
_LAUNCHES, _TURNS, _DEPTH = 24, 7, 64


@triton.jit
def _store(c, total, row, column, m, n):
    rows, columns = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("m", "n", "k"))
def by_tiles(a, b, c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             ROLES: tl.constexpr):  # fmt: skip
    """Persistent programs; with roles the loads run ahead over the end of a tile."""
    across = tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, BLOCK_M) * across, tl.num_programs(0), flatten=not ROLES,
                         warp_specialize=ROLES):  # fmt: skip
        row, column = (tile // across) * BLOCK_M, (tile % across) * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            total = tl.dot(a.load([row, step * BLOCK_K]), b.load([column, step * BLOCK_K]).T, total)
        _store(c, total, row, column, m, n)


@triton.jit(do_not_specialize=("m", "n", "k"))
def by_steps(a, b, c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             ROLES: tl.constexpr):  # fmt: skip
    """A program a tile."""
    across = tl.cdiv(n, BLOCK_N)
    row, column = (tl.program_id(0) // across) * BLOCK_M, (tl.program_id(0) % across) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(tl.cdiv(k, BLOCK_K), warp_specialize=ROLES):
        total = tl.dot(a.load([row, step * BLOCK_K]), b.load([column, step * BLOCK_K]).T, total)
    _store(c, total, row, column, m, n)


def runs(a: Any, b: Any, c: Any) -> dict[str, Any]:
    """Ways to c = a @ b.T by their names."""
    (m, k), n = a.shape, b.shape[0]
    found: dict[str, Any] = {"library": lambda: torch.mm(a, b.T, out=c)}
    forms = itertools.product((by_tiles,), _TILES, (False, True))
    for kernel, (rows, columns, stages), roles in (*forms, *itertools.product((by_steps,), _TILES[:2], (True,))):
        warps = 4 if roles or rows * columns == 128 * 128 else 8
        tiles = triton.cdiv(m, rows) * triton.cdiv(n, columns)
        grid = (min(tiles, 132) if kernel is by_tiles else tiles,)
        left, right = (TensorDescriptor.from_tensor(x, [size, _DEPTH]) for x, size in ((a, rows), (b, columns)))

        def run(kernel=kernel, grid=grid, left=left, right=right, tile=(rows, columns), roles=roles, warps=warps,
                stages=stages):  # fmt: skip
            kernel[grid](left, right, c, m, n, k, *tile, _DEPTH, roles, num_warps=warps, num_stages=stages)

        found[f"{kernel.__name__} {rows}x{columns}{' roles' * roles}"] = run
    return found


def timed(run: Any) -> Any:
    """A graph of some launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            run()
    return graph


def measure(problem: Any) -> dict[str, float]:
    """Microseconds of every way that computes what the library does, in turns."""
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    want, graphs = torch.mm(a, b.T), {}
    for name, run in runs(a, b, c).items():
        c.fill_(float("nan"))
        start = time.monotonic()
        try:
            graphs[name] = timed(run)
            print(f"  {name}: ready in {time.monotonic() - start:.1f} s", flush=True)
        except Exception as error:
            print(f"  {name}: {str(error).splitlines()[0][:160]}", flush=True)
            continue
        if not ((c - want).float().norm() / want.float().norm()).item() < 1e-2:
            print(f"  {name}: wrong", flush=True)
            del graphs[name]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn, name in itertools.product(range(_TURNS + 1), graphs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[name].replay()
        end.record()
        end.synchronize()
        if turn:
            times[name].append(start.elapsed_time(end) * 1e3 / _LAUNCHES)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--products", type=int, default=8)
    parser.add_argument("--seed", type=int, default=91)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    many = (p for kind, p in drawn_products(given.seed) if kind in ("prefill", "square") and p.size("k") % 64 == 0)
    for problem in itertools.islice(many, given.products):
        us = measure(problem)
        roles = min((value for name, value in us.items() if "roles" in name), default=float("inf"))
        plain = min((value for name, value in us.items() if "roles" not in name and name != "library"))
        sizes = [problem.size(name) for name in ("m", "n", "k")]
        print(f"{sizes}: library {us['library']:.1f} us, roles {roles:.1f}, without {plain:.1f}", flush=True)
        rows.append({"sizes": sizes, "us": us})
        given.out.write_text(json.dumps({"device": torch.cuda.get_device_name(0), "products": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
