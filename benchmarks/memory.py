"""Peak memory of loading an ONNX file, making it ready and running it once, beside ONNX Runtime and OpenVINO.

    python -m benchmarks.memory [--only resnet18 resnet50] [--batch 1]

Each contender does it in a process of its own that imports nothing else; what is compared is the most memory that
process ever held (its peak resident set). A ratio above 1: tilewise needs less than the one that needs least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import tilewise.onnx
from benchmarks.harness import machine_class, placed, today
from tilewise._files import write_whole
from tilewise.models import zoo

NETWORKS = tuple(name for name in zoo.ZOO if name not in ("vit_tiny", "bert_small"))
_BASE = "import sys, numpy as np; x = np.zeros(eval(sys.argv[2]), np.float32)\n"
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
        held = "  ".join(f"{who} {size / 1e6:6.0f} MB" for who, size in self.bytes.items())
        return f"{self.name:34s} {held}  {self.ratio:5.2f}×"


def peak_of(who: str, path: Path, shape: tuple[int, ...]) -> int | None:
    """None where that library is not installed."""
    command = [sys.executable, "-c", _BASE + _PROGRAMS[who] + _END, str(path), repr(shape)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TILEWISE_TUNED": "0"})
    if done.returncode and "ModuleNotFoundError" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"{who} fails: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.split()[-1])


def measure(name: str, batch: int) -> Peak:
    model = zoo.ZOO[name]().eval()
    shape = (batch, *model.example_shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        tilewise.onnx.save(model, path, np.zeros(shape, np.float32))
        found = {who: size for who in _PROGRAMS if (size := peak_of(who, path, shape)) is not None}
    peers = [size for who, size in found.items() if who != "tilewise"]
    peak = Peak(f"{name} {'×'.join(map(str, shape[1:]))}, batch {batch}", found, min(peers) / found["tilewise"])
    print(peak, flush=True)
    return replace(peak, date=today())


def write(path: Path, peaks: list[Peak]) -> None:
    where, names = placed(path), {peak.name for peak in peaks}
    before = json.loads(where.read_text(encoding="utf-8"))["peaks"] if where.is_file() else []
    lines = [*(p for p in before if p["name"] not in names), *map(asdict, peaks)]
    write_whole(where, json.dumps({"date": today(), "machine": machine_class(), "peaks": lines}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    options = parser.parse_args()
    for batch in options.batch:
        write(options.json, [measure(name, batch) for name in options.only])


if __name__ == "__main__":
    main()
