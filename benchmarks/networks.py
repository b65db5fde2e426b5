"""The zoo and the reference models compared with ONNX Runtime, OpenVINO and PyTorch (channels last, frozen).

    python -m benchmarks.networks [--only resnet18 vgg6] [--batch 1 8] [--threads 1 2] [--forms float32 int8]
                                  [--size 96 160 193] [--missing]

All run the file that `tilewise.onnx.save` wrote; in INT8, without PyTorch, also what ONNX Runtime's own quantizer
makes of it (QDQ, per channel, the same calibration), since runtimes fuse the patterns they know. Rows are written as
they are measured; `--missing` skips rows that the file already has, so that a long run can be done in pieces. With
TILEWISE_ISA=avx2, OpenVINO and PyTorch are limited to AVX2; ONNX Runtime cannot be limited, so it is shown in float32
without being counted, and left out of INT8. Next to each time is the error relative to ONNX Runtime's float32, as a
share of the largest output; a separate row compares INT8 with our float32 without Winograd. A ratio above 1 means that
tilewise is faster than the fastest peer.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewise
import tilewise.onnx
from benchmarks import torch_graph
from benchmarks.cases import NOT_HELD
from benchmarks.harness import Row, Run, compare, read_rows, without_winograd, write_results
from tilewise import Tensor, models, no_grad
from tilewise._extension import native
from tilewise.models import zoo
from tilewise.onnx.reader import read_graph
from tilewise.quantize import quantize

REFERENCE = ("vgg6", "resnet8")
NETWORKS = (*zoo.ZOO, *REFERENCE)
_CRASHES = ("densenet121",)  # OpenVINO 2026.4.1, when it compiles ONNX Runtime's own INT8 of it: left out there
_MOST_ERROR = 1e-3  # of the largest result, in float32: more is another network


def example(name: str, model: Any, batch: int, size: int | None) -> np.ndarray:
    rng = np.random.default_rng(0)
    if name == "bert_small":
        return rng.integers(0, model.vocab, (batch, *model.example_shape))
    shape = (3, 32, 32) if name in REFERENCE else model.example_shape
    if size is not None and name not in (*REFERENCE, "vit_tiny"):
        shape = (3, size, size)
    return rng.standard_normal((batch, *shape)).astype(np.float32)


def onnx_runtime(path: Path, x: np.ndarray, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(str(path), options)
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: x})[0]


def open_vino(path: Path, x: np.ndarray, threads: int) -> dict[str, Run]:
    try:
        import openvino
    except ImportError:
        return {}
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    settings["INFERENCE_PRECISION_HINT"] = "f32"
    core = openvino.Core()
    network = core.read_model(str(path))
    network.reshape(x.shape)
    request = core.compile_model(network, "CPU", settings).create_infer_request()
    return {"openvino": lambda: next(iter(request.infer([x], share_inputs=True).values()))}


class Calibration:
    """One batch for ONNX Runtime's quantizer."""

    def __init__(self, name: str, x: np.ndarray) -> None:
        self.batches = iter([{name: x}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)


def quantized_by_onnx_runtime(plain: Path, x: np.ndarray) -> Path:
    from onnxruntime import quantization

    ready, path = plain.with_name("ready.onnx"), plain.with_name("own.onnx")
    quantization.quant_pre_process(plain, ready)
    logging.disable(logging.WARNING)
    quantization.quantize_static(
        ready,
        path,
        Calibration("input", x),
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    return path


def ours_float(model: Any, x: np.ndarray) -> Run:
    """The model in one plan, where this version has plans and they take its input."""
    try:
        from tilewise import plan
    except ImportError:
        tensor = Tensor(x)
        return lambda: model(tensor).data
    compiled = plan.compile(model, x)
    return lambda: compiled(x)


def errors(runs: dict[str, Run], want: np.ndarray) -> dict[str, float]:
    scale = float(np.abs(want).max())
    return {who: float(np.abs(np.asarray(run()) - want).max()) / scale for who, run in runs.items()}


def _name_peers(runs: dict[str, Run]) -> dict[str, Run]:
    """ONNX Runtime named as what it is where we play a lesser CPU: timed, and not counted."""
    is_recorded = {"onnxruntime": f"onnxruntime {NOT_HELD}"} if held_to_less() else {}
    return {is_recorded.get(who, who): run for who, run in runs.items()}


def contenders(name: str, form: str, x: np.ndarray, model: Any, threads: int) -> tuple[dict[str, Run], np.ndarray]:
    """The runs of one network, and ONNX Runtime's float32 result."""
    with tempfile.TemporaryDirectory() as folder:
        plain, path = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        tilewise.onnx.save(model, plain, np.concatenate([x, x])[:2])
        want = onnx_runtime(plain, x, threads)()
        if form == "float32":
            runs: dict[str, Run] = {"tilewise": ours_float(model, x)}
            return runs | {
                "onnxruntime": onnx_runtime(plain, x, threads),
                **open_vino(plain, x, threads),
                "torch": torch_graph.frozen(read_graph(plain), x),
            }, want
        int8: Any = quantize(tilewise.onnx.load(plain), [x])
        tilewise.onnx.save(int8, path)
        own = quantized_by_onnx_runtime(plain, x)
        runs = {"tilewise": lambda: int8.run(x)}
        if not held_to_less():
            runs["onnxruntime"] = onnx_runtime(own, x, threads)
            runs["onnxruntime, this file"] = onnx_runtime(path, x, threads)
        runs |= {f"{who}, this file": run for who, run in open_vino(path, x, threads).items()}
        return runs | ({} if name in _CRASHES else open_vino(own, x, threads)), want


def held_to_less() -> bool:
    """Whether we play a CPU with fewer instructions, which ONNX Runtime cannot: it is no contender in INT8 then."""
    return native is not None and native.isa() != native.supported_isas()[-1]


def beside_direct(title: str, model: Any, x: np.ndarray, int8: Run, threads: int, budget_s: float) -> Row:
    """Compare INT8 with our own float32 using the same algorithm: direct convolutions."""
    with without_winograd():  # a plan's algorithms are chosen when it is made, of a batch's parts at its first run
        direct = ours_float(model, x)
        direct()
    name = f"{title}, to float32 without Winograd"
    return compare(name, threads, {"tilewise": int8, "float32 direct": direct}, budget_s)


def title_of(name: str, x: np.ndarray, form: str) -> str:
    return f"{name} {'×'.join(map(str, x.shape[1:]))}, batch {len(x)}, {form}"


def make_network(name: str) -> Any:
    return (zoo.ZOO[name]() if name in zoo.ZOO else getattr(models, name)()).eval()


def is_recorded(path: Path, name: str, form: str, batch: int, threads: int, size: int | None) -> bool:
    """Whether the file of this kind of CPU has the row."""
    title = title_of(name, example(name, make_network(name), batch, size), form)
    return any((row.name, row.threads) == (title, threads) for row in read_rows(path))


def network(name: str, form: str, batch: int, threads: int, budget_s: float, size: int | None) -> list[Row]:
    model = make_network(name)
    x = example(name, model, batch, size)
    with no_grad(), torch.inference_mode():
        runs, want = contenders(name, form, x, model, threads)
        off = errors(runs, want)
        if form == "float32" and max(off.values()) > _MOST_ERROR:
            raise SystemExit(f"{name}: the contenders do not run the same network: {off}")
        title = title_of(name, x, form)
        row = compare(title, threads, _name_peers(runs), budget_s)
        gained = [beside_direct(title, model, x, runs["tilewise"], threads, budget_s)] if form == "int8" else []
    print(f"    {', '.join(f'{who} off by {e:.1e}' for who, e in off.items())}", flush=True)
    return [replace(row, errors=off), *gained]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--forms", nargs="+", choices=("float32", "int8"), default=["float32", "int8"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size", type=int, nargs="+", help="pixels a side, for the zoo's convolutional networks")
    parser.add_argument("--missing", action="store_true", help="only rows that the file does not have")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a row")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "networks.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for threads, name, form in itertools.product(options.threads, options.only, options.forms):
        if form == "int8" and name in ("vit_tiny", "bert_small"):
            continue  # quantized as they run, which QDQ files do not say
        tilewise.set_num_threads(threads)
        torch.set_num_threads(threads)
        for batch, size in itertools.product(options.batch, options.size or [None]):
            if not (options.missing and is_recorded(options.json, name, form, batch, threads, size)):
                write_results(options.json, network(name, form, batch, threads, options.budget, size), keep=True)


if __name__ == "__main__":
    main()
