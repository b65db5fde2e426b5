"""`torch.compile` with tilewise choosing, beside PyTorch's own ways: `python3 -m benchmarks.inductor --out DIR`.

Products and whole blocks of models, each compiled from nothing in every way, with the wall time of the first call; then
all ways run in turns as CUDA graphs. Writes inductor.json as it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

WAYS = ("aten", "default", "max-autotune", "autoheuristic", "tilewise")
_CALLS, _TURNS = 10, 9
Run = Callable[[], Any]


def products(seed: int, count: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Operation, sizes (batch first for bmm) and number type, drawn: what layers of models multiply."""
    chance = np.random.default_rng(seed)
    widths = (512, 640, 768, 1024, 1152, 1536, 1920, 2048, 2560, 3072, 3840, 4096, 5120, 6144, 8192)
    found: list[tuple[str, tuple[int, ...], str]] = []
    for number in range(count):
        op = ("mm", "addmm", "mm", "bmm")[number % 4]
        dtype = "fp16" if number % 5 == 4 else "bf16"
        n, k = (int(chance.choice(widths)) for _ in range(2))
        m = int(2 ** chance.uniform(0, 13)) if number % 3 else int(chance.integers(1, 64)) * 128
        if op == "bmm":
            rows, depth = int(chance.choice((128, 197, 256, 384, 512, 1000))), int(chance.choice((64, 80, 128)))
            found.append((op, (int(chance.integers(8, 128)), rows, rows, depth), dtype))
        else:
            found.append((op, (m, n, k), dtype))
    return found


def blocks(torch: Any) -> dict[str, tuple[Any, Any]]:
    """Modules with an input: a GPT block, a BERT block, an MLP-Mixer block and a ViT block, in bf16."""
    nn = torch.nn

    class Attention(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, width: int, heads: int, causal: bool) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.heads, self.causal = heads, causal

        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            q, k, v = self.qkv(self.one(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
            return x + self.mlp(self.two(x))

    class Mixer(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, tokens: int, width: int) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
            self.across = nn.Sequential(nn.Linear(tokens, 256), nn.GELU(), nn.Linear(256, tokens))
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            x = x + self.across(self.one(x).mT).mT
            return x + self.mlp(self.two(x))

    made = {
        "GPT block": (Attention(1280, 20, True), (4, 768, 1280)),
        "BERT block": (Attention(768, 12, False), (24, 128, 768)),
        "MLP-Mixer": (Mixer(196, 640), (32, 196, 640)),
        "ViT block": (Attention(1024, 16, False), (16, 197, 1024)),
    }
    return {
        name: (module.to("cuda", torch.bfloat16).eval(), torch.randn(*shape, device="cuda", dtype=torch.bfloat16))
        for name, (module, shape) in made.items()
    }


@contextlib.contextmanager
def chosen_by(torch: Any, way: str, folder: Path) -> Iterator[None]:
    """PyTorch's settings for one way; nothing is cached from one to the other."""
    import torch._inductor.config as config

    import tilewise.inductor

    patches: dict[str, Any] = {"force_disable_caches": True}
    if way in ("max-autotune", "autoheuristic", "exhaustive"):
        patches["max_autotune_gemm"] = True
    if way == "autoheuristic":
        patches["autoheuristic_use"] = "mm"
    if way == "exhaustive":
        patches["max_autotune_gemm_search_space"] = "EXHAUSTIVE"
    with config.patch(patches):
        if way != "tilewise":
            yield
            return
        with tilewise.inductor.enable(budget=3, records=folder) as enabled:
            yield
            for note in [enabled.reason, *(enabled.advisor.notes if enabled.advisor else [])]:
                if note:
                    print("  note:", note, flush=True)


def graphed(torch: Any, call: Run) -> Run:
    """Some calls in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_CALLS):
            call()
    replay: Run = graph.replay
    return replay


def in_turns(torch: Any, runs: dict[str, Run]) -> dict[str, float]:
    """Microseconds a call, the median of several turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_TURNS + 1):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(start.elapsed_time(end) * 1e3 / _CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


def race(torch: Any, call: Callable[..., Any], inputs: tuple[Any, ...], ways: tuple[str, ...]) -> dict[str, Any]:
    runs: dict[str, Run] = {}
    seconds: dict[str, float] = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = call(*inputs)
        for way in ways:
            if way == "aten":
                runs[way] = graphed(torch, lambda: call(*inputs))
                continue
            torch._dynamo.reset()
            with chosen_by(torch, way, Path(folder)):
                compiled = torch.compile(call, dynamic=False)
                start = time.monotonic()
                got = compiled(*inputs)
                torch.cuda.synchronize()
                seconds[way] = time.monotonic() - start
            error = ((got - expected).float().norm() / expected.float().norm()).item()
            if not error < 2e-2:
                raise RuntimeError(f"{way} differs by {error}")
            runs[way] = graphed(torch, lambda run=compiled: run(*inputs))  # type: ignore[misc]
        return {"us": in_turns(torch, runs), "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--products", type=int, default=24)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--no-blocks", action="store_true")
    given = parser.parse_args()
    import torch

    started, rows = time.monotonic(), []
    ways = tuple(given.ways)
    calls = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm}
    jobs: list[tuple[str, Any, Any]] = [] if given.no_blocks else [(name, None, None) for name in blocks(torch)]
    drawn = [(f"{op} {sizes} {dtype}", op, (sizes, dtype)) for op, sizes, dtype in products(given.seed, given.products)]
    for name, op, more in [*drawn[:8], *jobs[2:3], *drawn[8:12], *jobs[1:2], *drawn[12:], *jobs[:1], *jobs[3:]]:
        if time.monotonic() - started > given.seconds:
            print("out of time", flush=True)
            break
        try:
            if op is None:
                module, x = blocks(torch)[name]
                row = race(torch, module, (x,), ways)
            else:
                row = race(torch, calls[op], _operands(torch, op, *more), ways)
        except Exception:
            print(name, traceback.format_exc()[-1200:], flush=True)
            continue
        rows.append({"name": name, **row})
        us = row["us"]
        print(
            f"{name:36}", " ".join(f"{way} {us[way]:.1f}us/{row['seconds'].get(way, 0):.1f}s" for way in us), flush=True
        )
        (given.out / "inductor_race.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    for way in ways:
        ratios = [row["us"][way] / row["us"]["tilewise"] for row in rows if way in row["us"]]
        if ratios and way != "tilewise":
            took = [row["seconds"][way] / row["seconds"]["tilewise"] for row in rows if way in row["seconds"]]
            print(f"{way}: runs {np.exp(np.log(ratios).mean()):.3f} as long as tilewise's, least {min(ratios):.3f}"
                  + (f", first call {np.exp(np.log(took).mean()):.2f}" if took else ""), flush=True)  # fmt: skip
    return 0


def _operands(torch: Any, op: str, sizes: tuple[int, ...], dtype: str) -> tuple[Any, ...]:
    *batch, m, n, k = sizes
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    a = torch.randn(*batch, m, k, device="cuda", dtype=kind)
    b = torch.randn(*batch, n, k, device="cuda", dtype=kind).mT
    return (torch.randn(n, device="cuda", dtype=kind), a, b) if op == "addmm" else (a, b)


if __name__ == "__main__":
    raise SystemExit(main())
