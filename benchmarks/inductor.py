"""`torch.compile` with tilewise compared with PyTorch's own ways: `python3 -m benchmarks.inductor --out DIR`.

Products, flexible attention and blocks of models are compiled from empty caches in every way, with the wall time of the
first call; then all ways run interleaved as CUDA graphs over several sets of operands. Results go to inductor_race.json
after each problem. The ways:

- `--peer` is a file of nvMatmulHeuristics' recommendations (`python3 -m benchmarks.inductor_peer` writes it without a
  GPU); they are benchmarked with ATen exactly as tilewise's selections are.
- `--exhaustive` compiles the whole search space that tilewise ranks, for the numbered problems; it is stopped after
  `--exhaustive-seconds`.
- All ways share one assembler, as with `tilewise.inductor`, so that no template is compiled twice; `--as-it-comes`
  times max-autotune without that, for the numbered problems.
- The way `steps` is tilewise without keeping long rows in registers; `--rows` adds row-wise kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.compiled import CompiledProblem, lines
from benchmarks.inductor_problems import (
    ROWS,
    Job,
    attention_job,
    attentions,
    model_job,
    product_job,
    products,
    rows_job,
)
from tilewise.profile.timing.limits import TimeIsUp, time_limit

WAYS = ("aten", "default", "max-autotune", "autoheuristic", "nvmatmul", "tilewise")
_CALLS = 16  # per CUDA graph
_ROUNDS = 15  # timed rounds; the median counts
_MAX_SECONDS = 3600.0  # for compiling one problem
_CAPTURES = 3  # graphs of each way: a kernel's time varies by some per cent with the addresses of its operands
Run = Callable[[], Any]


def ways_of(job: Job, ways: tuple[str, ...], more: list[str]) -> list[str]:
    """List the ways that support a problem: AutoHeuristic knows only mm, and ATen has no flexible attention."""
    unsupported = {"flex": ("aten", "nvmatmul"), "rows": ("nvmatmul",)}.get(job.kind, ())
    supported = [way for way in ways if not (way == "autoheuristic" and job.kind != "mm")]
    return [*(way for way in supported if way not in unsupported), *more]


MODE = "max-autotune-no-cudagraphs"  # the benchmark captures its own graphs


@contextlib.contextmanager
def compiler_settings(way: str, folder: Path, peer: dict[str, Any]) -> Iterator[str | None]:
    """Apply the compiler settings of one way, with empty caches; yield the compiler's mode."""
    import torch._inductor.config as config
    from torch._inductor.utils import fresh_cache

    from tilewise.gpu.inductor import rebenchmark

    patches: dict[str, Any] = {}
    if way == "autoheuristic":
        patches["autoheuristic_use"] = "mm"
    if way == "exhaustive":
        patches |= {"max_autotune_gemm_search_space": "EXHAUSTIVE", "max_autotune_flex_search_space": "EXHAUSTIVE",
                    "triton.enable_persistent_tma_matmul": True}  # fmt: skip
    with fresh_cache(), config.patch(patches), _assembler(shared=way != "as-it-comes"):
        if way not in ("tilewise", "nvmatmul", "steps"):
            yield None if way == "default" else MODE
            return
        loop_reductions = (
            patch.object(rebenchmark, "_MAX_ROW_ELEMENTS", 0) if way == "steps" else contextlib.nullcontext()
        )
        with loop_reductions, _enabled(folder / way, peer if way == "nvmatmul" else None) as enabled:
            yield None
            for note in [enabled.reason, *(enabled.advisor.notes if enabled.advisor else [])]:
                if note:
                    print(f"  note: {way}: {note}", flush=True)


@contextlib.contextmanager
def _assembler(shared: bool) -> Iterator[None]:
    """Share the compile workers' assembler or not: templates are then found in the cache, or compiled twice."""
    from tilewise.gpu.inductor.patch import forget_assembler_version, share_assembler

    undo = share_assembler()
    if not shared:
        os.environ.pop("TRITON_PTXAS_PATH", None)
        forget_assembler_version()
    try:
        yield
    finally:
        undo()


@contextlib.contextmanager
def _enabled(folder: Path, peer: dict[str, Any] | None) -> Iterator[Any]:
    """Enable tilewise; with a peer, its recommendations replace tilewise's selections."""
    import tilewise.inductor

    with tilewise.inductor.enable(budget=3, records=folder) as enabled:
        if peer is not None and enabled.advisor is not None:
            from benchmarks.inductor_peer import follow_peer

            follow_peer(enabled.advisor, peer)
        yield enabled


def capture(torch: Any, call: Callable[..., Any], sets: tuple[tuple[Any, ...], ...], pools: list[Any]) -> list[Run]:
    """Capture calls over all sets of operands in a CUDA graph; one graph per memory pool."""
    stream, replays = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for inputs in (*sets, sets[0]):
            call(*inputs)
    for pool in pools:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, pool=pool):
            for number in range(_CALLS):
                call(*sets[number % len(sets)])
        replays.append(graph.replay)
    return replays


def time_interleaved(torch: Any, runs: dict[str, list[Run]]) -> dict[str, float]:
    """Return microseconds per call: the mean over graphs of the median over rounds, each in a random order."""
    medians: dict[str, list[float]] = {name: [] for name in runs}
    order, chance = list(runs), random.Random(0)
    for number in range(_CAPTURES):
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(_ROUNDS + 1):
            chance.shuffle(order)
            for name in order:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                runs[name][number]()
                end.record()
                end.synchronize()
                if turn:
                    times[name].append(start.elapsed_time(end) * 1e3 / _CALLS)
        for name, rounds in times.items():
            medians[name].append(statistics.median(rounds))
    return {name: statistics.mean(values) for name, values in medians.items()}


def race(torch: Any, job: Job, ways: list[str], peer: dict[str, Any], longest: float = _MAX_SECONDS) -> dict[str, Any]:
    """Compile and time one problem in all ways, without those that fail or, exhaustive, exceed `longest` seconds."""
    runs: dict[str, list[Run]] = {}
    pools = [torch.cuda.graph_pool_handle() for _ in range(_CAPTURES)]  # results of all ways use the same memory
    seconds: dict[str, float] = {}
    expected = None
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        # The first graph of a pool gets other addresses than the later ones, which changes times by up to 2 %.
        first = capture(torch, job.call, job.sets, pools) if "aten" in ways else []
        for way in ways:
            try:
                with time_limit(longest if way == "exhaustive" else _MAX_SECONDS):
                    output, graphs, compile_seconds = _prepare(torch, job, way, Path(folder), (peer, pools))
            except (Exception, TimeIsUp):
                print(f"  {job.name}, {way}: {traceback.format_exc()[-1200:]}", flush=True)
                continue
            output = output[-1] if isinstance(output, tuple) else output
            expected = output if expected is None else expected
            error = ((output - expected).float().norm() / expected.float().norm()).item()
            if not error < 2e-2:
                raise RuntimeError(f"{way} differs by {error}")
            runs[way] = graphs
            seconds |= {way: compile_seconds} if compile_seconds else {}
        us = time_interleaved(torch, runs)
        first.clear()  # it had to live until now, so that its memory was not reused
        return {"us": us, "seconds": seconds}


def _prepare(
    torch: Any, job: Job, way: str, folder: Path, more: tuple[dict[str, Any], list[Any]]
) -> tuple[Any, list[Run], float]:
    """Return the result of one way, its captured graphs, and the seconds of its first call (0 for ATen)."""
    peer, pools = more
    if way == "aten":
        return job.call(*job.sets[0]), capture(torch, job.call, job.sets, pools), 0.0
    torch._dynamo.reset()
    with compiler_settings(way, folder, peer) as mode:
        compiled = torch.compile(job.call, dynamic=False, mode=mode)
        start = time.monotonic()
        result = compiled(*job.sets[0])
        torch.cuda.synchronize()
        compile_seconds = time.monotonic() - start
        return result, capture(torch, compiled, job.sets, pools), compile_seconds


def jobs_of(torch: Any, options: argparse.Namespace) -> list[Callable[[], Job]]:
    """List the problems, mixed so that an interrupted run has some of every kind."""
    random_products = [lambda d=d: product_job(torch, d) for d in products(options.seed, options.products)]
    flex = [lambda d=d: attention_job(torch, d) for d in attentions(options.seed, options.flex)]
    models = [lambda n=n: model_job(torch, n) for n in options.models]
    jobs: list[Callable[[], Job]] = []
    step = max(1, len(random_products) // max(1, len(flex), len(models)))
    for number, job in enumerate(random_products):
        jobs.append(job)
        if number % step == step - 1:
            jobs += [queue.pop(0) for queue in (flex, models) if queue]
    return [*jobs, *flex, *models, *(lambda r=r: rows_job(torch, *r) for r in ROWS[: options.rows])]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--products", type=int, default=20)
    parser.add_argument("--flex", type=int, default=4)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--exhaustive", nargs="*", type=int, default=[], help="numbers of problems, from 0")
    parser.add_argument("--exhaustive-seconds", type=float, default=_MAX_SECONDS)
    parser.add_argument("--as-it-comes", nargs="*", type=int, default=[], help="numbers of problems, from 0")
    parser.add_argument("--peer", type=Path, help="file of nvMatmulHeuristics' recommendations")
    parser.add_argument("--models", nargs="*", default=["BERT block", "ViT block", "MLP-Mixer", "GPT block"])
    parser.add_argument("--rows", type=int, default=0, help="how many kernels along rows")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of the problems to run, in this order")
    options = parser.parse_args()
    import torch

    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    peer = json.loads(options.peer.read_bytes()) if options.peer else {}
    ways = tuple(way for way in options.ways if peer or way != "nvmatmul")
    _warm_up(torch, ways)
    jobs = jobs_of(torch, options)
    for number in options.only if options.only is not None else range(len(jobs)):
        if time.monotonic() - started > options.seconds:
            print("out of time", flush=True)
            break
        name = f"problem {number}"
        try:
            job = jobs[number]()
            name = job.name
            extra = {"as-it-comes": options.as_it_comes, "exhaustive": options.exhaustive}
            more = [way for way, numbers in extra.items() if number in numbers]
            row = race(torch, job, ways_of(job, ways, more), peer, options.exhaustive_seconds)
        except Exception:
            print(name, traceback.format_exc()[-1500:], flush=True)
            continue
        rows.append({"name": name, "kind": job.kind, **row})
        cells = (f"{way} {row['us'][way]:.1f}us/{row['seconds'].get(way, 0):.1f}s" for way in row["us"])
        print(f"{number:2} {name:42}", *cells, flush=True)
        content = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "problems": rows}
        (options.out / "inductor_race.json").write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(lines([CompiledProblem(**row) for row in rows])), flush=True)
    return 0


def _warm_up(torch: Any, ways: tuple[str, ...]) -> None:
    """Start the compiler's processes before the first problem."""
    job = product_job(torch, ("mm", (96, 320, 160), "bf16"))
    with contextlib.suppress(Exception):
        race(torch, job, [way for way in ways if way in ("default", "max-autotune", "tilewise")], {})
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wait_pool_ready()


if __name__ == "__main__":
    raise SystemExit(main())
