"""Pinned choices of foreign Triton kernels: whether processes agree, and what choosing without a clock costs.

    python -m benchmarks.pinned exhaustive --out all.json     # times every configuration of kernels without times (GPU)
    python -m benchmarks.pinned choices --out one.json        # chooses under `tilewise.pin()` in this process (GPU)
    python -m benchmarks.pinned report all.json one.json ...  # agreement, and the share of the best that is reached

`exhaustive` compiles in parallel first and also writes what the machine code tells, into `all.compiled.json.xz`.
`choices` fails if anything is benchmarked.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import lzma
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WORKERS = 14  # compiling processes; two of the machine's 16 cores stay free


def compile_case(index: int) -> dict[tuple[str, tuple[int, ...], int], Any]:
    """Compile a fourth of a case's configurations, into Triton's cache folder; return descriptions of their code."""
    import torch

    from benchmarks.pinned_kernels import CASES
    from tilewise.gpu.pinning.machine_code import describe_compiled

    case, compiled = CASES[index // 100], {}
    numbers = range(index % 100, len(case.kernel.configs), 4)
    for problem in case.problems:
        arguments, _ = case.make(problem, "meta")
        arguments = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
        for number in numbers:
            config = case.kernel.configs[number]
            if config.pre_hook is not None:
                config.pre_hook({**dict(zip(case.kernel.arg_names, arguments, strict=False)), **config.kwargs})
            try:
                kernel = case.kernel.fn.warmup(*arguments, grid=(1,), **config.all_kwargs())
                kernel._init_handles()
                compiled[case.name, tuple(problem), number] = dataclasses.astuple(describe_compiled(kernel))
            except Exception as error:  # a configuration that does not fit is part of the benchmark
                print(f"{case.name} {config}: {type(error).__name__}", file=sys.stderr)
    return compiled


def exhaustive(out: Path) -> None:
    """Time every configuration of the cases that `out` lacks, in two interleaved rounds; the minimum counts."""
    import torch
    from triton.testing import do_bench

    from benchmarks.pinned_kernels import CASES

    start = time.perf_counter()
    rows = json.loads(out.read_text()) if out.is_file() else []
    code_file, compiled = out.with_suffix(".compiled.json.xz"), {}
    code_rows = json.loads(lzma.decompress(code_file.read_bytes())) if code_file.is_file() else []
    times_exist = {row["case"] for row in rows}
    cases = [number for number, case in enumerate(CASES) if case.name not in times_exist]
    with multiprocessing.get_context("spawn").Pool(_WORKERS) as pool:
        tasks = [100 * case + part for case in cases for part in range(4)]
        for part in pool.imap_unordered(compile_case, tasks):
            compiled |= part
    print(f"{len(compiled)} compilations in {time.perf_counter() - start:.0f} s", flush=True)
    for case in (CASES[number] for number in cases):
        for problem in case.problems:
            arguments, grid = case.make(problem, "cuda")
            times: list[list[float]] = [[] for _ in case.kernel.configs]
            for _ in range(2):
                for number, config in enumerate(case.kernel.configs):
                    all_arguments = {**dict(zip(case.kernel.arg_names, arguments, strict=False)), **config.kwargs}
                    if config.pre_hook is not None:
                        config.pre_hook(all_arguments)
                    launch = case.kernel.fn[grid]
                    try:
                        times[number].append(
                            do_bench(lambda: launch(*arguments, **config.all_kwargs()), warmup=3, rep=12,  # noqa: B023
                                     return_mode="median")
                        )  # fmt: skip
                    except Exception as error:
                        print(f"{case.name} {config}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
            rows.append({"case": case.name, "problem": problem, "us": [min(t) * 1e3 if t else None for t in times]})
            code = [compiled.get((case.name, tuple(problem), number)) for number in range(len(times))]
            code_rows.append({"case": case.name, "problem": problem, "compiled": code})
        torch.cuda.empty_cache()
        out.write_text(json.dumps(rows))
        code_file.write_bytes(lzma.compress(json.dumps(code_rows).encode()))
    print(f"{time.perf_counter() - start:.0f} s in all")


def choices(out: Path, lock: str | None) -> None:
    """Run every case pinned, and record which configuration was chosen and a hash of what it computed."""
    import torch
    import triton.testing

    import tilewise
    from benchmarks.pinned_kernels import CASES

    def no_benchmark(*_: Any, **__: Any) -> Any:
        raise AssertionError("a configuration was benchmarked")

    triton.testing.do_bench = no_benchmark
    rows, start = [], time.perf_counter()
    with tilewise.pin(lock=lock):
        for case in CASES:
            case.kernel._do_bench = no_benchmark
            for problem in case.problems:
                torch.manual_seed(0)
                arguments, grid = case.make(problem, "cuda")
                begin = time.perf_counter()
                case.kernel[grid](*arguments)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begin
                tensors = [getattr(a, "base", a) for a in arguments if hasattr(getattr(a, "base", a), "data_ptr")]
                digest = hashlib.sha256()
                for tensor in tensors:
                    digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()[: 1 << 24])
                choice = case.kernel.configs.index(case.kernel.best_config)
                rows.append({"case": case.name, "problem": problem, "chosen": choice, "seconds": seconds,
                             "result": digest.hexdigest()[:16]})  # fmt: skip
            torch.cuda.empty_cache()
    out.write_text(json.dumps(rows))
    print(f"{len(rows)} choices in {time.perf_counter() - start:.1f} s")


def report(files: Sequence[Path]) -> list[str]:
    """Compare the choices of processes with each other and with the exhaustive times."""
    times = {(row["case"], tuple(row["problem"])): row["us"] for row in json.loads(files[0].read_text())}
    runs = [json.loads(path.read_text()) for path in files[1:]]
    equal_choices = sum(len({row["chosen"] for row in rows}) == 1 for rows in zip(*runs, strict=True))
    equal_results = sum(len({row["result"] for row in rows}) == 1 for rows in zip(*runs, strict=True))
    lines, shares, by_case = [], [], {}
    for row in runs[0]:
        us = times[row["case"], tuple(row["problem"])]
        best = min(t for t in us if t is not None)
        share = best / us[row["chosen"]] if us[row["chosen"]] else math.nan
        first = next((best / t for t in us if t is not None), math.nan)
        shares.append(share)
        by_case.setdefault(row["case"], []).append(share)
        size = "x".join(map(str, row["problem"]))
        lines.append(f"{row['case']:34} {size:18} {share:6.3f}  its own first {first:6.3f}  best {best:9.1f} us")
    lines.append(f"{len(runs)} processes agree on {equal_choices} of {len(shares)} choices and {equal_results} results")
    lines.append(f"share of the best: mean {statistics.fmean(shares):.4f}, least {min(shares):.3f}; "
                 f"least case {min(statistics.fmean(v) for v in by_case.values()):.3f}")  # fmt: skip
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("exhaustive", "choices", "report"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("pinned.json"))
    parser.add_argument("--lock", default=os.environ.get("TILEWISE_LOCK"))
    options = parser.parse_args(arguments)
    if options.command == "report":
        print("\n".join(report(options.files)))
    elif options.command == "choices":
        choices(options.out, options.lock)
    else:
        exhaustive(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
