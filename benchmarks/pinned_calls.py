"""Measures host time of a `matmul` call, its speed in CUDA graphs, and seconds of pinned compilation (GPU).

    python -m benchmarks.pinned_calls [--part host graphs compile] [--seconds 200]

Each part prints a table: host microseconds of one eager call compared with `torch.matmul`; time in a user's CUDA graph
relative to cuBLAS, unmeasured and after five measurements; first call and step time of a block, forward and training,
with the compiler's default, `inductor.enable()` and `tilewise.pin()`.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

# Products that are not in the recorded collections: (m, n, k) of x @ weight.T
PRODUCTS = ((1, 6144, 2560), (7, 2560, 6912), (16, 5120, 3456), (33, 3456, 5120), (96, 2304, 4608), (250, 1792, 3584),
            (384, 6400, 1600), (777, 1111, 555), (1024, 2816, 1408), (1500, 1500, 1500), (2304, 768, 3072),
            (3000, 5000, 700), (4096, 1280, 1280), (5000, 640, 2560), (6400, 3200, 800), (8192, 512, 4096))  # fmt: skip


def host_microseconds(call: Callable[[], Any], torch: Any) -> float:
    """Measure the host's time of one call while the GPU is busy elsewhere: the median of short bursts."""
    for _ in range(20):
        call()
    bursts = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        bursts.append((time.perf_counter() - start) / 50 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(bursts)


def graph_microseconds(calls: Sequence[Callable[[], Any]], torch: Any) -> list[float]:
    """Time calls as a user's CUDA graphs, interleaved; the median of nine rounds."""
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                call()
        graphs.append(graph)
    rounds: list[list[float]] = [[] for _ in graphs]
    for turn in range(10):
        for number, graph in enumerate(graphs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                rounds[number].append(start.elapsed_time(end) * 1e3 / 20)
    return [statistics.median(times) for times in rounds]


def products(deadline: float, parts: Sequence[str]) -> None:
    """Print host overhead and CUDA graph ratios of every product."""
    import torch

    from tilewise.gpu.products import matmul

    ratios: dict[str, list[float]] = {"unmeasured": [], "five": []}
    overheads = []
    for m, n, k in PRODUCTS:
        if time.perf_counter() > deadline:
            print("out of time")
            break
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
        calls = [functools.partial(torch.matmul, x, weight), functools.partial(matmul, x, weight)]
        line = f"{m:5} x {n:5} x {k:5}"
        error = (matmul(x, weight).float() - (x @ weight).float()).abs().max() / (x @ weight).float().abs().max()
        line += f"  error {float(error):.1e}"
        if "graphs" in parts:
            library, ours = graph_microseconds(calls, torch)
            ratios["unmeasured"].append(library / ours)
            line += f"  unmeasured {library / ours:.3f} of cuBLAS's {library:.1f} us"
        matmul(x, weight, measure=True)
        if "graphs" in parts:
            library, ours = graph_microseconds(calls, torch)
            ratios["five"].append(library / ours)
            line += f"  five {library / ours:.3f}"
        if "host" in parts:
            theirs, own = (host_microseconds(call, torch) for call in calls)
            overheads.append(own - theirs)
            line += f"  host {theirs:.1f} -> {own:.1f} us"
        print(line, flush=True)
    for name, values in ratios.items():
        if values:
            print(f"CUDA graphs, {name}: {statistics.geometric_mean(values):.3f} (worst {min(values):.3f})")
    if overheads:
        print(f"host overhead: mean {statistics.fmean(overheads):.1f} us, most {max(overheads):.1f} us")


def compile_once(way: str, training: bool) -> None:
    """Compile a block one way in this process; print the seconds of the first call and the time of a step."""
    import torch

    import tilewise
    import tilewise.gpu.inductor.patch as patch

    faulthandler.dump_traceback_later(50, exit=False)  # shows where a compilation is that does not end
    ways: dict[str, Callable[[], Any]] = {
        "pin": tilewise.pin, "enable": patch.enable, "default": lambda: None, "max-autotune": lambda: None,
    }  # fmt: skip
    ways[way]()
    torch.manual_seed(0)
    model = _block(torch)(1536, 4096).cuda().bfloat16()
    x = torch.randn(4, 512, 1536, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(model, mode="max-autotune-no-cudagraphs" if way == "max-autotune" else None)

    def step() -> Any:
        if not training:
            with torch.no_grad():
                return run(x)
        model.zero_grad(set_to_none=True)
        loss = run(x).float().square().mean()
        loss.backward()
        return loss

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first, times = time.perf_counter() - start, []
    for _ in range(40):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    if not training:  # a graph shows the GPU's time alone
        with torch.no_grad():
            times = [us / 1e3 for us in graph_microseconds([lambda: run(x)], torch)]
    notes = patch._enabled[-1].advisor.notes if patch._enabled else []
    kind = "training" if training else "forward"
    print(
        f"{kind:8} {way:12} first call {first:6.1f} s, step {min(times):.3f} ms (median {statistics.median(times):.3f})"
    )
    print(*(f"    note: {note}" for note in notes), sep="\n", end="\n" if notes else "")


def _block(torch: Any) -> Any:
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        """A transformer block of a LLaMA's shape."""

        def __init__(self, width: int, hidden: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, width, bias=False)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, 64).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            y = self.norm2(x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    return Block


def compiled(deadline: float, ways: Sequence[str]) -> None:
    """Compile forward and training each way in a fresh process, with empty caches and 75 seconds at most."""
    for training in (False, True):
        for way in ways:
            if time.perf_counter() > deadline:
                print("out of time")
                return
            with tempfile.TemporaryDirectory() as folder:
                caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/i", "TRITON_CACHE_DIR": f"{folder}/t",
                          "TILEWISE_CACHE": f"{folder}/c"}  # fmt: skip
                command = [sys.executable, "-m", "benchmarks.pinned_calls", "--once", way, *["--training"] * training]
                try:
                    subprocess.run(command, env={**os.environ, **caches}, timeout=75, check=False)
                except subprocess.TimeoutExpired:
                    print(f"{'training' if training else 'forward'} {way}: no end within 75 s", flush=True)


def main() -> int:
    """Run the parts that fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", default=["host", "graphs", "compile"])
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--ways", nargs="*", default=["default", "pin", "enable"])
    parser.add_argument("--once", help="compile one way in this process")
    parser.add_argument("--training", action="store_true")
    options = parser.parse_args()
    if options.once:
        compile_once(options.once, options.training)
        return 0
    deadline = time.perf_counter() + options.seconds
    if "host" in options.part or "graphs" in options.part:
        products(deadline, options.part)
    if "compile" in options.part:
        compiled(deadline, options.ways)
    return 0


if __name__ == "__main__":
    sys.exit(main())
