"""Logs of gigabytes, written as every tool would and imported by `tilewise tiles import`: time and memory.

    python -m benchmarks.imports --gigabytes 2                  # every kind of log, one after the other
    python -m benchmarks.imports --gigabytes 0.2 t4 helion      # some of them

A log is written in pieces and removed again; so is what is made of it. Peak memory is the importing process's own, and
so is the speed, in megabytes of log a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_SHAPES, _PIECE, _REPEATS = 2000, 1 << 20, 32

_NAMES = ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y", "read_only", "use_padding")
_T4 = (
    json.dumps(
        {
            "timestamp": "2023-12-22 09:54:05.502007+00:00",
            "configuration": dict.fromkeys(_NAMES, "%d"),
            "times": {"compilation": 918.5990339610726, "framework": 2.0, "runtimes": ["%r"] * _REPEATS},
            "invalidity": "correct",
            "correctness": 1,
        },
        indent=2,
    )
    .replace('"%d"', "%d")
    .replace('"%r"', "%r")
)


def _tile(number: int) -> tuple[int, ...]:
    return (number % 64, number // 64 % 64, number // 4096 % 64, number // 262144, number % 2, 0)


def t4(number: int) -> str:
    """A record as Kernel Tuner writes it, with 32 repeats; every configuration is another."""
    times = [3.8 + (number % 977) / 7 + i / 1e9 for i in range(_REPEATS)]
    return ("" if number == 0 else ",\n") + _T4 % (*_tile(number), *times)


def cache(number: int) -> str:
    """An entry of Kernel Tuner's cache; configurations come again after a million."""
    tile = _tile(number % (1 << 20))
    times = [3.8 + (number % 977) / 7 + i / 1e9 for i in range(_REPEATS)]
    entry = dict(zip(_NAMES, tile, strict=True)) | {"time": times[0], "times": times, "compile_time": 918.599}
    entry |= {"verification_time": 0, "benchmark_time": 2.0, "timestamp": "2023-12-22 09:54:05.502007+00:00"}
    return ("" if number == 0 else ",\n") + f'"{",".join(map(str, tile))}": {json.dumps(entry)}'


def autotvm(number: int) -> str:
    shape, tile = number % _SHAPES, number // _SHAPES
    entity = [["tile_f", "sp", [-1, 1 + tile % 32]], ["tile_y", "sp", [-1, 1 + tile // 32]], ["unroll", "ot", 512]]
    task = ["cuda -model=v100", "conv2d_nchw.cuda", [["TENSOR", [1, 64, 56, 8 + shape], "float32"]], {}]
    result = [[1e-3 + (number % 977) * 1e-6], 0, 1.0, 2.0]
    return (
        json.dumps({"input": task, "config": {"index": tile, "entity": entity}, "result": result, "version": 0.2})
        + "\n"
    )


def metaschedule(number: int) -> str:
    if number == 0:
        return json.dumps(["123", "bW9kdWxl"]) + "\n"
    shape, tile = number % _SHAPES, number // _SHAPES
    trace = [
        [["SamplePerfectTile", [], [4], ["x"]], ["EnterPostproc", [], [], []]],
        [[0, [1 + tile % 64, 1 + tile // 64]]],
    ]
    arguments = [["TENSOR", "float32", [128, 8 + shape]], ["TENSOR", "float32", [8 + shape, 32]]]
    return (
        json.dumps([0, [trace, [1e-5 + (number % 977) * 1e-7], {"kind": "llvm", "mcpu": "skylake"}, arguments]]) + "\n"
    )


def autoheuristic(number: int) -> str:
    """A row of AutoHeuristic's text: many choices a product, the library's among them, products without end."""
    product, choice = divmod(number, 24)
    head = ""
    if number == 0:
        metadata = {"shared_memory": 166912, "device_capa": [8, 0], "name": "mm", "numerical_features": ["m", "k", "n"]}
        head = json.dumps(metadata) + "\nm,k,n,mat1_dtype,mat1_stride_0,mat1_stride_1,choice,feedback\n"
    name = f"type=triton_BLOCK-M={16 << choice % 4}_BLOCK-K=32_BLOCK-N={16 << choice // 4}_numstages=3_numwarps=4"
    sizes = f"{16 + product % 4096},4096,{8 + product // 4096},torch.float16,4096,1"
    return f"{head}{sizes},{name if choice else 'extern_mm'},{0.5 + number % 97 / 100}\n"


def feedback(number: int) -> str:
    """Many choices a record, as PyTorch's feedback has; every record another product."""
    choices = [
        [{"BLOCK_M": 16 << i % 4, "BLOCK_N": 16 << i // 4, "num_warps": 4}, 0.5 + (number + i) % 97 / 100]
        for i in range(24)
    ]
    return json.dumps({"name": "bmm", "sizes": {"b": 2, "m": number}, "device": "H100", "choices": choices}) + "\n"


def triton(number: int) -> str:
    """A timing of Triton's cache, in a file that has no end; configurations come again after a million."""
    kwargs = {"BLOCK_M": 1 + number % 64, "BLOCK_N": 1 + number // 64 % 64, "GROUP_M": 1 + number // 4096 % 256}
    config = {"kwargs": kwargs, "num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None, "pre_hook": None}
    times = [0.25 + number % 977 / 1000, 0.25 + number % 977 / 1001, 0.26 + number % 977 / 1000]
    return ("" if number == 0 else ", ") + json.dumps([config, times])


def helion(number: int) -> str:
    head = "run_id,timestamp_s,config_id,generation,status,perf_ms,compile_time_s,config\n" if number == 0 else ""
    config = (
        f"\"Config(block_sizes=[{1 + number % 512}, {1 + number // 512 % 2048}], num_warps=4, indexing='pointer')\""
    )
    return f"{head}r1,0.1,c{number},0,ok,{0.25 + number % 977 / 1000},1.0,{config}\n"


class Log(NamedTuple):
    """A kind of log: whose, its records, and what stands around them."""

    format_name: str
    record: Callable[[int], str]
    before: str = ""
    after: str = ""


_CACHE = """{"device_name": "A100", "kernel_name": "conv", "problem_size": [4096, 4096],
 "tune_params_keys": %s, "cache": {
"""
LOGS: dict[str, Log] = {
    "t4": Log("kernel-tuner", t4, '{"metadata": {"timeunit": "milliseconds"}, "results": [\n', "]}"),
    "cache": Log("kernel-tuner", cache, _CACHE % json.dumps(_NAMES), "}}"),
    "autotvm": Log("autotvm", autotvm),
    "metaschedule": Log("metaschedule", metaschedule),
    "autoheuristic": Log("inductor", autoheuristic),
    "feedback": Log("inductor", feedback),
    "triton": Log("triton", triton, '{"key": [4096, 4096, "torch.float16"], "configs_timings": [', "]}"),
    "helion": Log("helion", helion),
}


def written(path: Path, name: str, size: int) -> int:
    """Writes the log and returns how many records it has."""
    log = LOGS[name]
    with path.open("w", encoding="utf-8") as file:
        file.write(log.before)
        for count, piece in pieces(log.record):
            file.write(piece)
            if file.tell() >= size:
                file.write(log.after)
                return count
    return 0


def pieces(record: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    parts: list[str] = []
    number = size = 0
    while True:
        parts.append(record(number))
        number, size = number + 1, size + len(parts[-1])
        if size >= _PIECE:
            yield number, "".join(parts)
            parts, size = [], 0


def measure_import(name: str, gigabytes: float, folder: Path) -> dict[str, Any]:
    """Import a synthetic log in a fresh process and return its time and peak memory."""
    log = folder / f"{name}.json"
    records = written(log, name, int(gigabytes * 1e9))
    importing = ["tiles", "import", LOGS[name].format_name, str(log), "--out", str(folder / name), "--json"]
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "tilewise", *importing], stdout=subprocess.PIPE, text=True)
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    seconds, size = time.perf_counter() - started, log.stat().st_size
    if status:
        sys.exit(f"{name}: the import ended with {os.waitstatus_to_exitcode(status)}.")
    report = json.loads(output)
    return {"gigabytes": size / 1e9, "records": records, "kernels": report["kernels"],
            "configurations": report["configurations"], "peak_mib": usage.ru_maxrss / 1024,
            "seconds": seconds, "megabytes_a_second": size / 1e6 / seconds}  # fmt: skip


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("logs", nargs="*", help=f"kinds of log: {', '.join(LOGS)} (default: all)")
    flags.add_argument("--gigabytes", type=float, default=2.0, help="how large each log is (default 2)")
    options = flags.parse_args()
    if unknown := set(options.logs) - LOGS.keys():
        flags.error(f"no kind of log: {', '.join(sorted(unknown))}; there are {', '.join(LOGS)}")
    for name in options.logs or LOGS:
        with tempfile.TemporaryDirectory() as folder:
            row = measure_import(name, options.gigabytes, Path(folder))
        print(
            f"{name}: {row['gigabytes']:.2f} GB in {row['seconds']:.0f} s ({row['megabytes_a_second']:.1f} MB/s), "
            f"peak memory {row['peak_mib']:.0f} MiB, {row['configurations']:,} configurations "
            f"of {row['kernels']:,} kernels",
            flush=True,
        )


if __name__ == "__main__":
    main()
