"""The profiler compared with its references: memray, pyperf, PyTorch's FlopCounterMode, and itself switched off.

    python -m benchmarks.profiling flops memory pyperf overhead
    python -m benchmarks.profiling same --trials 100      (two identical functions: how often is a difference claimed?)
    python -m benchmarks.profiling different --trials 100 (a true 5 %: how often is it found?)

Each part takes under two minutes. Run on an otherwise idle machine; results are printed as tables and, with --json
FILE, written as JSON; parts that the file already has are kept. There, a ratio near 1 says that two tools agree, or
that profiling costs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import Row, machine_class, provenance, results_path, today
from tilewise import Tensor, models, nn, no_grad
from tilewise._atomic import write_atomic
from tilewise._events import recorders
from tilewise.profile import FLOPCounter, MemoryProfiler, ProfilerContext, Timer

# --- functions to time: about 10 µs, 1 ms and 50 ms ---


def spin_10us() -> int:
    return sum(range(880))


def spin_1ms() -> int:
    total = 0
    for i in range(37_000):
        total += i
    return total


_SORTED = np.random.default_rng(0).random(700_000)


def sort_50ms() -> Any:
    return np.sort(_SORTED)


_SHUFFLED = np.random.default_rng(1).random(36_000)


def sort_1ms() -> Any:
    return np.sort(_SHUFFLED)


_SQUARE = np.random.default_rng(2).random((1400, 1400), dtype=np.float32)


def matmul_50ms() -> Any:
    return _SQUARE @ _SQUARE


TIMED = ("spin_10us", "spin_1ms", "sort_1ms", "sort_50ms", "matmul_50ms")


def pyperf_part() -> dict[str, Any]:
    """p50 compared with pyperf's, interleaved in the same processes (beside_pyperf.py)."""
    rows = {}
    for name in TIMED:
        command = [sys.executable, "-m", "benchmarks.beside_pyperf", f"benchmarks.profiling:{name}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        row = rows[name] = json.loads(done.stdout.decode().splitlines()[-1])
        print(
            f"{name:12} ours {row['ours'] * 1e6:10.2f} µs   pyperf {row['pyperf'] * 1e6:10.2f} µs   "
            f"ratio {row['ratio']:.4f}",
            flush=True,
        )
    return rows


# --- how often a difference is claimed ---


def loop_of(turns: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(turns):
            pass

    return loop


def comparisons_part(extra: float, trials: int) -> dict[str, Any]:
    """Compare a 1 ms loop with one that is `extra` longer, in fresh function objects every time."""
    turns = 70_000
    differences, ratios, started = 0, [], time.perf_counter()
    for seed in range(trials):
        result = Timer(seed=seed).compare({"a": loop_of(turns), "b": loop_of(int(turns * (1 + extra)))})
        differences += result.different
        ratios.append(result.ratio)
    p50 = Timer().measure(loop_of(turns)).p50
    low, middle, high = np.quantile(ratios, [0.05, 0.5, 0.95])
    print(
        f"{extra:.0%} apart at {p50 * 1e3:.2f} ms: a difference was claimed in {differences} of {trials} comparisons; "
        f"ratios {low:.3f} / {middle:.3f} / {high:.3f} (5, 50, 95 %), {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    return {"claimed": differences, "trials": trials, "ratio_quantiles": [low, middle, high], "p50": p50}


# --- peak memory ---


def _training_step() -> Callable[[], Any]:
    model = models.cnn(size=28)
    x = np.random.default_rng(0).random((64, 1, 28, 28), dtype=np.float32)

    def step() -> None:
        model.zero_grad()
        model(Tensor(x)).sum().backward()

    return step


def _inference(model: Any, x: Any) -> Callable[[], Any]:
    def run() -> Any:
        with no_grad():
            return model(Tensor(x) if x.dtype.kind == "f" else x)

    return run


def _arrays() -> Any:
    a = np.ones(3_000_000)
    return float((a * 2 + np.sqrt(a))[::2].copy().sum())


def _objects() -> Any:
    return {str(i): [i, i * 1.5] for i in range(500_000)}


WORKLOADS: dict[str, Callable[[], Callable[[], Any]]] = {
    "arrays": lambda: _arrays,
    "Python objects": lambda: _objects,
    "cnn, training step": _training_step,
    "vgg6, batch 32": lambda: _inference(models.vgg6().eval(), np.ones((32, 3, 32, 32), np.float32)),
    "gpt 6x384, 4x256 tokens": lambda: _inference(models.gpt("6x384"), np.zeros((4, 256), int)),
    "matmul 2048": lambda: _inference(nn.Linear(2048, 2048), np.ones((2048, 2048), np.float32)),
    "first call of vgg6": lambda: _inference(models.vgg6().eval(), np.ones((8, 3, 32, 32), np.float32)),
}


def memory_part() -> dict[str, Any]:
    """Peak bytes of one call in a fresh process, by MemoryProfiler and by memray."""
    rows = {}
    for name in WORKLOADS:
        ours, theirs = (int(_fresh("peak", tool, name)) for tool in ("ours", "memray"))
        rows[name] = {"ours": ours, "memray": theirs, "ratio": ours / theirs}
        print(
            f"{name:26} ours {ours / 1e6:9.3f} MB   memray {theirs / 1e6:9.3f} MB   ratio {ours / theirs:.4f}",
            flush=True,
        )
    return rows


def _fresh(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.profiling", *arguments], check=True, stdout=subprocess.PIPE
    )
    return done.stdout.decode().split()[-1]


def _peak(tool: str, name: str) -> int:
    func = WORKLOADS[name]()
    if not name.startswith("first call"):
        func()
    if tool == "ours":
        return MemoryProfiler().profile(func, sites=False, leaks=False).peak_bytes
    import memray

    with tempfile.TemporaryDirectory() as folder:
        with memray.Tracker(Path(folder) / "out.bin"):
            func()
        return int(memray.FileReader(Path(folder) / "out.bin").metadata.peak_memory)


# --- FLOPs ---


def flops_part() -> dict[str, Any]:
    """FLOPs compared with torch.utils.flop_counter.FlopCounterMode, forward and with backward."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks import torch_models

    images = np.random.default_rng(0).random((2, 3, 32, 32), dtype=np.float32)
    inputs = {
        "mlp": np.ones((5, 64), np.float32),
        "vgg6": images,
        "resnet8": images,
        "gpt": np.zeros((2, 33), np.int64),
    }
    rows = {}
    for name, x in inputs.items():
        for backward in (False, True):
            ours = FLOPCounter().count_ops(getattr(models, name)(), x, backward=backward).total
            peer = getattr(torch_models, name)()
            # the fused CPU attention is invisible to FlopCounterMode; the plain one is made of products it counts
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as mode:
                y = peer(torch.from_numpy(x))
                if backward:
                    y.sum().backward()
            theirs = mode.get_total_flops()
            rows[f"{name}{' + backward' if backward else ''}"] = {
                "ours": ours,
                "torch": theirs,
                "equal": ours == theirs,
            }
            what = "+ backward" if backward else "forward"
            print(f"{name:8} {what:10} ours {ours:>13,} torch {theirs:>13,} {ours == theirs}")
    return rows


# --- what profiling costs ---


def overhead_part() -> dict[str, Any]:
    """Operations of 1 ms and more with a context open over without, in alternating blocks; and the cost when off."""
    rng = np.random.default_rng(0)
    tilewise.set_num_threads(1)
    linear, conv = nn.Linear(512, 512), nn.Conv2d(32, 32, 3, padding=1)
    x, image = Tensor(rng.random((220, 512), dtype=np.float32)), Tensor(rng.random((8, 32, 48, 48), dtype=np.float32))
    big = Tensor(rng.random((8_000_000,), dtype=np.float32))
    cases = {
        "Linear layer": lambda: linear(x),
        "Conv2d layer": lambda: conv(image),
        "element-wise add": lambda: big + big,
    }
    rows: dict[str, Any] = {}
    for name, func in cases.items():
        with no_grad():
            off, ratio = _on_over_off(func)
        rows[name] = {"seconds": off, "profiled_seconds": off * ratio, "overhead": ratio - 1}
        print(f"{name:18} {off * 1e3:7.3f} ms an operation, profiling costs {ratio - 1:+.2%}", flush=True)
    rows["off_seconds"] = _cost_when_off()
    print(f"switched off: {rows['off_seconds'] * 1e9:.0f} ns an operation (layer, operation and kernel together)")
    return rows


def _on_over_off(func: Callable[[], Any], blocks: int = 30, calls: int = 10) -> tuple[float, float]:
    def block() -> float:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            func()
            times.append(time.perf_counter() - start)
        return min(times)  # what else runs on the machine only ever adds

    for _ in range(3):
        block()
    off, ratios = [], []
    for i in range(blocks):
        order = (False, True) if i % 2 else (True, False)
        seconds = {}
        for recording in order:
            if recording:
                with ProfilerContext():
                    seconds[True] = block()
            else:
                seconds[False] = block()
        off.append(seconds[False])
        ratios.append(seconds[True] / seconds[False])
    return statistics.median(off), statistics.median(ratios)


def _cost_when_off() -> float:
    """Three tests of the empty list, as a layer, its operation and its kernel make them."""

    def tests() -> None:
        if recorders:
            raise AssertionError
        if recorders:
            raise AssertionError
        if recorders:
            raise AssertionError

    def nothing() -> None:
        pass

    return max(Timer().measure(tests).p50 - Timer().measure(nothing).p50, 0.0)


PARTS: dict[str, Callable[[int], Any]] = {
    "flops": lambda _: flops_part(),
    "memory": lambda _: memory_part(),
    "pyperf": lambda _: pyperf_part(),
    "same": lambda trials: comparisons_part(0.0, trials),
    "different": lambda trials: comparisons_part(0.05, trials),
    "overhead": lambda _: overhead_part(),
}


def rows_of(parts: dict[str, Any]) -> list[Row]:
    """Yield the results that have times as rows of the common format."""
    rows = [
        Row(f"p50 of {name} beside pyperf's", 1, {"tilewise": r["ours"], "pyperf": r["pyperf"]}, 1 / r["ratio"])
        for name, r in parts.get("pyperf", {}).items()
    ]
    rows += [
        Row(
            f"{name}, profiled",
            1,
            {"tilewise": r["profiled_seconds"], "not profiled": r["seconds"]},
            1 / (1 + r["overhead"]),
        )
        for name, r in parts.get("overhead", {}).items()
        if isinstance(r, dict)
    ]
    return rows


def write(path: Path, results: dict[str, Any]) -> None:
    parts = json.loads(path.read_text(encoding="utf-8")).get("parts", {}) if path.is_file() else {}
    parts |= results
    data = {
        "date": today(),
        "machine": machine_class(),
        **provenance("profiling"),
        "rows": [asdict(r) for r in rows_of(parts)],
        "parts": parts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(results_path(path), json.dumps(data, indent=1) + "\n")


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["peak"]:
        print(_peak(arguments[1], arguments[2]))
        return
    parser = argparse.ArgumentParser(description="The profiler beside its references.")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"any of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--trials", type=int, default=100, help="comparisons in the parts 'same' and 'different'")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/profiling.json"))
    options = parser.parse_args(arguments)
    results = {}
    for part in options.parts or PARTS:
        print(f"== {part}", flush=True)
        results[part] = PARTS[part](options.trials)
    write(options.json, results)


if __name__ == "__main__":
    main()
