"""The tuner on a GPU compared with exhaustive search: `python3 -m tilewise.tune.triton.check --out DIR`.

Needs NumPy, PyTorch and Triton only. It has two parts: shapes of the built-in families that are in no collection (first
choice, five measurements, default, exhaustive best, tuning times from an empty cache), and `autotune` on kernels of no
family compared with measuring every configuration. Writes check.json after each shape; `--shapes` takes your own list.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import compiled
from benchmarks.recorded import compare_methods, lines, method_lines, read_recorded, table
from tilewise.errors import TilewiseError, UnavailableError
from tilewise.gpu.families.family import get_family
from tilewise.gpu.measure.triton_device import TritonDevice
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.store.problem import Problem, read_shapes
from tilewise.tune.choose.tuner import Tuner, check_one


def _matmul(dtype: str, m: int, n: int, k: int, layout: str = "nt", epilogue: str = "none") -> Problem:
    return Problem.of("matmul", dtype=dtype, m=m, n=n, k=k, layout=layout, epilogue=epilogue)


def _rows(family: str, dtype: str, rows: int, cols: int, **more: Any) -> Problem:
    return Problem.of(family, dtype=dtype, rows=rows, cols=cols, **more)


# Problems that are in no collection; alignments and layouts repeat, so that binaries are shared.
UNSEEN = (
    _matmul("bf16", 640, 3584, 1280), _matmul("bf16", 1920, 1920, 1920), _matmul("bf16", 24, 5120, 2560),
    _matmul("bf16", 5000, 2304, 768), _matmul("bf16", 320, 10240, 640), _matmul("bf16", 6144, 6144, 3072),
    _matmul("bf16", 96, 1536, 6144), _matmul("fp16", 1200, 896, 3200, "nn", "bias_relu"),
    _matmul("fp16", 448, 2688, 1344, "nn", "bias_relu"), _matmul("fp16", 9600, 480, 960, "nn", "bias_relu"),
    _matmul("tf32", 720, 1440, 720), _matmul("tf32", 2560, 640, 1600),
    Problem.of("batched_matmul", dtype="bf16", batch=40, m=320, n=320, k=96, layout="nt", epilogue="none"),
    Problem.of("attention", dtype="bf16", batch=3, heads=10, kv_heads=10, queries=700, keys=700, head=64, causal=1),
    Problem.of("attention", dtype="bf16", batch=2, heads=20, kv_heads=20, queries=320, keys=1600, head=64, causal=0),
    _rows("softmax", "bf16", 6000, 1800), _rows("softmax", "bf16", 900, 7000),
    _rows("layer_norm", "bf16", 7000, 1280), _rows("rms_norm", "bf16", 2500, 2560),
    _rows("reduction", "bf16", 5000, 1700, axis=1, operation="sum"),
    _rows("reduction", "bf16", 3300, 2400, axis=0, operation="sum"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the tuner on this GPU against exhaustive search.")
    parser.add_argument("--out", type=Path, help="folder for check.json")
    parser.add_argument("--recorded", type=Path, help="recorded products: print their table, without a GPU")
    parser.add_argument(
        "--compiled", type=Path, help="recorded runs of torch.compile: print their table, without a GPU"
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="start no further shape after this time")
    parser.add_argument("--model", help="a cost model in place of the shipped one")
    parser.add_argument("--shapes", type=Path, help="a JSON list of your own problems")
    parser.add_argument("--processes", type=int, default=0, help="compiling processes")
    parser.add_argument("--seed", type=int, help="seed of other random sizes for the kernels of no family")
    parser.add_argument("--no-families", action="store_true")
    parser.add_argument("--no-own", action="store_true", help="leave out the kernels of no family")
    options = parser.parse_args(arguments)
    replayed = options.recorded is not None or options.compiled is not None
    if (options.out is None) == (not replayed):
        parser.error("give --out, for a check on this GPU, or --recorded, --compiled or both")
    try:
        if options.recorded is not None:
            _replay(options.recorded)
        if options.compiled is not None:
            print("\n".join(compiled.lines(compiled.read_compiled(options.compiled))), flush=True)
        if replayed:
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        _run(options)
    except TilewiseError as error:
        print(f"tilewise: {error}", flush=True)
        return 2
    return 0


def _replay(path: Path) -> None:
    """Print the tables of recorded products."""
    model = shipped_runtime_model()
    if model is None:
        raise UnavailableError("No model of runtimes is installed; reinstall tilewise.")
    products = read_recorded(path)
    for line in (*lines(table(model, products)), *method_lines(compare_methods(products))):
        print(line, flush=True)


def _run(options: argparse.Namespace) -> None:
    """Check both parts on this GPU and write check.json."""
    deadline = time.monotonic() + options.minutes * 60
    report: dict[str, Any] = {}
    target = options.out / "check.json"
    if not options.no_own:
        report["own"] = _own_kernels(deadline, options.seed)
        target.write_text(json.dumps(report, indent=1))
    if options.no_families:
        return
    problems: Sequence[Problem] = UNSEEN
    if options.shapes:
        problems = [
            k.problem for k in read_shapes(options.shapes, lambda family, spec: get_family(family).problem(spec))
        ]
    device = TritonDevice(processes=options.processes)
    report["machine"] = dict(device.machine.details)
    report["problems"] = rows = []
    folder = tempfile.mkdtemp(prefix="tilewise-check-")
    for number, problem in enumerate(problems):
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            break
        start = time.monotonic()
        tuner = Tuner(device, model=options.model, cache=f"{folder}/{number}")
        row = check_one(tuner, problem)
        wall_seconds = time.monotonic() - start
        rows.append({**row, "wall_seconds": wall_seconds})
        print(
            f"{problem.key}: first {row['first']:.3f} five {row['five']:.3f} default {row['default']:.3f}; "
            f"{row['five_seconds']:.2f} s against {row['exhaustive_seconds']:.1f} s; took {wall_seconds:.1f} s",
            flush=True,
        )
        report["means"] = _means(rows)
        target.write_text(json.dumps(report, indent=1))
    print(json.dumps(report.get("means"), indent=1), flush=True)


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute geometric means by family, and over all families but matmul."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["problem"]["family"]].append(row)
        if row["problem"]["family"] != "matmul":
            groups["other families"].append(row)
    return {
        name: {
            **{column: _geometric([row[column] for row in members]) for column in ("first", "five", "default")},
            "time_ratio": _geometric([row["exhaustive_seconds"] / row["five_seconds"] for row in members]),
            "problems": len(members),
        }
        for name, members in groups.items()
    }


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(max(value, 1e-9)) for value in values) / max(len(values), 1))


def _own_kernels(deadline: float, seed: int | None) -> dict[str, Any]:
    """Check `autotune` on kernels of no family."""
    from benchmarks.gpu_check_kernels import CASES, run_case

    results = {}
    for case in CASES:
        if time.monotonic() > deadline:
            break
        case = case if seed is None else case.with_random_sizes(seed)
        results[case.name] = run_case(case, tempfile.mkdtemp(prefix="tilewise-own-"))
        means = {name: value for name, value in results[case.name].items() if name != "shapes"}
        print(f"{case.name}: {json.dumps(means)}", flush=True)
    return results


__all__ = ["UNSEEN", "main"]

if __name__ == "__main__":
    sys.exit(main())
