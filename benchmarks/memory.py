"""Peak memory of loading an ONNX file, making it ready and running it once, compared with ONNX Runtime and OpenVINO.

    python -m benchmarks.memory [--only resnet18 bert_small] [--batch 1 8] [--size 320] [--passes 1000 [--threads 2]]

Each contender does it in a fresh process that imports nothing else; what is compared is the most memory that
process ever held (its peak resident set). A ratio above 1: tilewise needs less than the one that needs least. With
`--passes` the float plan and, for networks of images, the INT8 one run as often instead, and what they hold more of
after the third pass is printed: memory of the library's own, at its most, and of the whole process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tilewise.onnx
import tilewise.plan
from benchmarks.cases import source_hash
from benchmarks.harness import machine_class, results_path, today
from tilewise._atomic import write_atomic
from tilewise._extension import native
from tilewise.models import zoo
from tilewise.models.zoo.attention import bert_small, vit_tiny
from tilewise.nn import Module
from tilewise.quantize import quantize

_BASE = "import sys, numpy as np; x = np.zeros(eval(sys.argv[2]), sys.argv[3])\n"
_END = """
status = open("/proc/self/status", encoding="utf-8").read()  # of this program alone: rusage counts the parent's
print(int(status.partition("VmHWM:")[2].split()[0]) << 10)
"""
_PROGRAMS = {
    "tilewise": """
import tilewise, tilewise.onnx, tilewise.plan
tilewise.set_num_threads(1)
network = tilewise.onnx.load(sys.argv[1])
tilewise.plan.compile(network, x)(x)
""",
    "onnxruntime": """
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 3
session = onnxruntime.InferenceSession(sys.argv[1], options)
session.run(None, {session.get_inputs()[0].name: x})
""",
    "openvino": """
import openvino
settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
network = openvino.Core().read_model(sys.argv[1])
network.reshape(x.shape)
openvino.Core().compile_model(network, "CPU", settings).create_infer_request().infer([x])
""",
}


@dataclass(frozen=True)
class Peak:
    """One network: the most bytes that each contender's process held, and the least peer's over ours."""

    name: str
    bytes: dict[str, int]
    ratio: float
    date: str = ""

    def __str__(self) -> str:
        sizes = "  ".join(f"{who} {size / 1e6:6.0f} MB" for who, size in self.bytes.items())
        return f"{self.name:34s} {sizes}  {self.ratio:5.2f}×"


def peak_of(who: str, path: Path, x: np.ndarray) -> int | None:
    """None where that library is not installed."""
    command = [sys.executable, "-c", _BASE + _PROGRAMS[who] + _END, str(path), repr(x.shape), str(x.dtype)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TILEWISE_TUNED": "0"})
    if done.returncode and "ModuleNotFoundError" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"{who} fails: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.split()[-1])


def example(name: str, batch: int, size: int | None) -> tuple[Module, np.ndarray]:
    """The network and zeros that it takes: images of a size, or as many tokens."""
    if name == "bert_small":
        return bert_small(), np.zeros((batch, size or 128), np.int64)
    model = vit_tiny(size or 224) if name == "vit_tiny" else zoo.ZOO[name]()
    shape = (3, size, size) if size else model.example_shape
    return model, np.zeros((batch, *shape), np.float32)


def measure(name: str, batch: int, size: int | None) -> Peak:
    model, x = example(name, batch, size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        tilewise.onnx.save(model.eval(), path, x)
        peaks = {who: size for who in _PROGRAMS if (size := peak_of(who, path, x)) is not None}
    peers = [size for who, size in peaks.items() if who != "tilewise"]
    peak = Peak(f"{name} {'×'.join(map(str, x.shape[1:]))}, batch {batch}", peaks, min(peers) / peaks["tilewise"])
    print(peak, flush=True)
    return replace(peak, date=today())


def resident() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def growth(run: Callable[[np.ndarray], Any], x: np.ndarray, passes: int) -> tuple[int, int]:
    """Bytes that the library held more at any moment after the third pass, and that the process holds in the end."""
    for _ in range(3):
        run(x)
    before, native_held = resident(), native.memory_in_use()
    native.reset_memory_peak()
    for _ in range(passes):
        run(x)
    return native.memory_peak() - native_held, resident() - before


def show_growth(name: str, batch: int, size: int | None, passes: int) -> None:
    model, x = example(name, batch, size)
    x = np.random.default_rng(0).standard_normal(x.shape, dtype=np.float32) if x.dtype == np.float32 else x
    runs: dict[str, Callable[[np.ndarray], Any]] = {"float32": tilewise.plan.compile(model, x)}
    if name not in ("vit_tiny", "bert_small"):
        quantized: Any = quantize(model.eval(), [x])
        runs["int8"] = quantized.run
    for form, run in runs.items():
        own, process = growth(run, x, passes)
        shape = "×".join(map(str, x.shape))
        grown = f"library +{own} bytes, process +{process >> 10} KiB"
        print(f"{name} {form} {shape}: {passes} passes, {tilewise.get_num_threads()} threads, {grown}", flush=True)


def write(path: Path, peaks: list[Peak]) -> None:
    where, names = results_path(path), {peak.name for peak in peaks}
    before = json.loads(where.read_text(encoding="utf-8"))["peaks"] if where.is_file() else []
    new = [asdict(peak) | {"source": source_hash("memory")} for peak in peaks]
    lines = [*(p for p in before if p["name"] not in names), *new]
    write_atomic(where, json.dumps({"date": today(), "machine": machine_class(), "peaks": lines}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(zoo.ZOO), default=tuple(zoo.ZOO))
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--size", type=int, nargs="+", help="pixels a side, or tokens, other than the zoo's own")
    parser.add_argument("--passes", type=int, default=0, help="run so often and show what is held more")
    parser.add_argument("--threads", type=int, default=1, help="of these passes")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    for batch, size, name in itertools.product(options.batch, options.size or [None], options.only):
        if options.passes:
            show_growth(name, batch, size, options.passes)
            continue
        write(options.json, [measure(name, batch, size)])


if __name__ == "__main__":
    main()
