"""Logs of gigabytes, written as they would be and imported by `tilewise tiles import`: what memory and time that takes.

    python -m tools.big_logs --gb 2 t4                 # formats: t4, autotvm, metaschedule, feedback, helion
    python -m tools.big_logs --gb 0.5

The log is written in pieces and removed again; so is what is made of it. Peak memory and processor time are those of
the importing process.
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
from typing import Any

from tilewise._files import write_whole

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "big_logs.json"
_SHAPES, _PIECE = 2000, 1 << 20


_NAMES = ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y", "read_only", "use_padding")
_REPEATS = 32
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


def t4(number: int) -> str:
    """A record as Kernel Tuner writes it, with 32 repeats; every configuration is another."""
    config = (number % 64, number // 64 % 64, number // 4096 % 64, number // 262144, number % 2, 0)
    times = [3.8 + (number % 977) / 7 + i / 1e9 for i in range(_REPEATS)]
    return ("" if number == 0 else ",\n") + _T4 % (*config, *times)


def autotvm(number: int) -> str:
    shape, tile = number % _SHAPES, number // _SHAPES
    entity = [["tile_f", "sp", [-1, 1 + tile % 32]], ["tile_y", "sp", [-1, 1 + tile // 32]], ["unroll", "ot", 512]]
    given = ["cuda -model=v100", "conv2d_nchw.cuda", [["TENSOR", [1, 64, 56, 8 + shape], "float32"]], {}]
    result = [[1e-3 + (number % 977) * 1e-6], 0, 1.0, 2.0]
    return (
        json.dumps({"input": given, "config": {"index": tile, "entity": entity}, "result": result, "version": 0.2})
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


def feedback(number: int) -> str:
    """Many choices a record, as PyTorch's feedback has."""
    choices = [
        [{"BLOCK_M": 16 << i % 4, "BLOCK_N": 16 << i // 4, "num_warps": 4}, 0.5 + (number + i) % 97 / 100]
        for i in range(24)
    ]
    return json.dumps({"name": "bmm", "sizes": {"b": 2, "m": number}, "device": "H100", "choices": choices}) + "\n"


def helion(number: int) -> str:
    head = "run_id,timestamp_s,config_id,generation,status,perf_ms,compile_time_s,config\n" if number == 0 else ""
    config = (
        f"\"Config(block_sizes=[{1 + number % 512}, {1 + number // 512 % 2048}], num_warps=4, indexing='pointer')\""
    )
    return f"{head}r1,0.1,c{number},0,ok,{0.25 + number % 977 / 1000},1.0,{config}\n"


FORMATS: dict[str, tuple[str, Callable[[int], str], str, str]] = {
    "t4": ("kernel-tuner", t4, '{"metadata": {"timeunit": "milliseconds"}, "results": [\n', "]}"),
    "autotvm": ("autotvm", autotvm, "", ""),
    "metaschedule": ("metaschedule", metaschedule, "", ""),
    "feedback": ("inductor", feedback, "", ""),
    "helion": ("helion", helion, "", ""),
}


def written(path: Path, name: str, size: int) -> int:
    """Writes the log and returns how many records it has."""
    _, record, before, after = FORMATS[name]
    with path.open("w", encoding="utf-8") as file:
        file.write(before)
        for count, piece in pieces(record):
            file.write(piece)
            if file.tell() >= size:
                file.write(after)
                return count
    return 0


def pieces(record: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    parts: list[str] = []
    number = held = 0
    while True:
        parts.append(record(number))
        number, held = number + 1, held + len(parts[-1])
        if held >= _PIECE:
            yield number, "".join(parts)
            parts, held = [], 0


def measured(name: str, gigabytes: float, folder: Path) -> dict[str, Any]:
    log = folder / f"{name}.json"
    records = written(log, name, int(gigabytes * 1e9))
    command = [
        sys.executable,
        "-m",
        "tilewise",
        "tiles",
        "import",
        FORMATS[name][0],
        str(log),
        "--out",
        str(folder / name),
        "--json",
    ]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    told = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{name}: the import ended with {os.waitstatus_to_exitcode(status)}.")
    report = json.loads(told)
    return {"gigabytes": log.stat().st_size / 1e9, "records": records, "kernels": report["kernels"],
            "configurations": report["configurations"], "peak_mib": usage.ru_maxrss / 1024,
            "seconds": time.perf_counter() - started, "processor_seconds": usage.ru_utime + usage.ru_stime}  # fmt: skip


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("formats", nargs="*", default=list(FORMATS), choices=[[], *FORMATS])
    flags.add_argument("--gb", type=float, default=2.0)
    options = flags.parse_args()
    for name in options.formats or FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            row = measured(name, options.gb, Path(folder))
        print(name, {key: round(value, 2) for key, value in row.items()}, flush=True)
        table = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
        write_whole(RESULTS, json.dumps(table | {name: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
