"""`torch.compile` with tilewise choosing, beside PyTorch's own ways: `python3 -m benchmarks.inductor --out DIR`.

Products, flexible attention and blocks of models, each compiled from nothing in every way with the wall time of the
first call; then all ways run in turns as CUDA graphs over several sets of operands. Writes inductor_race.json as it
goes. `--peer` is a file of what nvMatmulHeuristics answers (`python3 -m benchmarks.inductor_peer` makes it, without a
GPU): its first answers are measured beside ATen exactly as tilewise's are. The exhaustive space (everything that
tilewise ranks) is compiled for the problems named by `--exhaustive`; where it takes longer than `--exhaustive-seconds`
it is given up. All ways have what `tilewise.inductor` does about PyTorch 2.11's two assemblers, so that no template is
compiled twice; max-autotune without it is timed for the problems named by `--as-it-comes`. The way `steps` is tilewise
without keeping long rows in registers; `--rows` adds kernels along rows.
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

from benchmarks.compiled import Compiled, lines
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
_CALLS, _TURNS, _LONGEST = 16, 15, 3600.0
_CAPTURES = 3  # graphs of each way: the same kernel differs by some hundredths with where its operands lie
Run = Callable[[], Any]


def ways_of(job: Job, ways: tuple[str, ...], more: list[str]) -> list[str]:
    """What can be compared: AutoHeuristic knows mm alone, and flexible attention is no call of ATen's."""
    found = [way for way in ways if not (way == "autoheuristic" and job.kind != "mm")]
    none = {"flex": ("aten", "nvmatmul"), "rows": ("nvmatmul",)}.get(job.kind, ())
    return [*(way for way in found if way not in none), *more]


MODE = "max-autotune-no-cudagraphs"  # in every way the graphs are the benchmark's own


@contextlib.contextmanager
def chosen_by(way: str, folder: Path, peer: dict[str, Any]) -> Iterator[str | None]:
    """The compiler's mode and settings for one way, with empty caches."""
    import torch._inductor.config as config
    from torch._inductor.utils import fresh_cache

    from tilewise.gpu.inductor import pointwise

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
        in_steps = patch.object(pointwise, "_MAX_ROW_ELEMENTS", 0) if way == "steps" else contextlib.nullcontext()
        with in_steps, _enabled(folder / way, peer if way == "nvmatmul" else None) as enabled:
            yield None
            for note in [enabled.reason, *(enabled.advisor.notes if enabled.advisor else [])]:
                if note:
                    print(f"  note: {way}: {note}", flush=True)


@contextlib.contextmanager
def _assembler(shared: bool) -> Iterator[None]:
    """What was compiled ahead is found when it is timed, or is not."""
    from tilewise.gpu.inductor.processes import forget_assembler_version, share_assembler

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
    """tilewise inside the compiler; with a peer's answers in place of its own where there are some."""
    import tilewise.inductor

    with tilewise.inductor.enable(budget=3, records=folder) as enabled:
        if peer is not None and enabled.advisor is not None:
            from benchmarks.inductor_peer import answering

            answering(enabled.advisor, peer)
        yield enabled


def graphed(torch: Any, call: Callable[..., Any], sets: tuple[tuple[Any, ...], ...], pools: list[Any]) -> list[Run]:
    """Some calls in a CUDA graph, over all sets of operands; one graph a pool of memory."""
    stream, found = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for inputs in (*sets, sets[0]):
            call(*inputs)
    for pool in pools:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, pool=pool):
            for number in range(_CALLS):
                call(*sets[number % len(sets)])
        found.append(graph.replay)
    return found


def in_turns(torch: Any, runs: dict[str, list[Run]]) -> dict[str, float]:
    """Microseconds a call: the mean over the graphs of the median of their turns, each turn in an order of its own."""
    medians: dict[str, list[float]] = {name: [] for name in runs}
    order, chance = list(runs), random.Random(0)
    for number in range(_CAPTURES):
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(_TURNS + 1):
            chance.shuffle(order)
            for name in order:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                runs[name][number]()
                end.record()
                end.synchronize()
                if turn:
                    times[name].append(start.elapsed_time(end) * 1e3 / _CALLS)
        for name, found in times.items():
            medians[name].append(statistics.median(found))
    return {name: statistics.mean(found) for name, found in medians.items()}


def race(torch: Any, job: Job, ways: list[str], peer: dict[str, Any], longest: float = _LONGEST) -> dict[str, Any]:
    """All ways of one problem; one that fails is left out, and so is the exhaustive one beyond `longest` seconds."""
    runs: dict[str, list[Run]] = {}
    pools = [torch.cuda.graph_pool_handle() for _ in range(_CAPTURES)]  # results of all ways lie in the same memory
    seconds: dict[str, float] = {}
    expected = None
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        # The first graph of a pool lies elsewhere than those after it, which is worth up to 0.02 of the same call.
        first = graphed(torch, job.call, job.sets, pools) if "aten" in ways else []
        for way in ways:
            try:
                with time_limit(longest if way == "exhaustive" else _LONGEST):
                    got, graphs, spent = _ready(torch, job, way, Path(folder), (peer, pools))
            except (Exception, TimeIsUp):
                print(f"  {job.name}, {way}: {traceback.format_exc()[-1200:]}", flush=True)
                continue
            got = got[-1] if isinstance(got, tuple) else got
            expected = got if expected is None else expected
            error = ((got - expected).float().norm() / expected.float().norm()).item()
            if not error < 2e-2:
                raise RuntimeError(f"{way} differs by {error}")
            runs[way] = graphs
            seconds |= {way: spent} if spent else {}
        us = in_turns(torch, runs)
        first.clear()  # until now, so that its memory was not given back
        return {"us": us, "seconds": seconds}


def _ready(
    torch: Any, job: Job, way: str, folder: Path, more: tuple[dict[str, Any], list[Any]]
) -> tuple[Any, list[Run], float]:
    """What one way computes, how to run it, and the seconds of its first call; none for ATen."""
    peer, pools = more
    if way == "aten":
        return job.call(*job.sets[0]), graphed(torch, job.call, job.sets, pools), 0.0
    torch._dynamo.reset()
    with chosen_by(way, folder, peer) as mode:
        compiled = torch.compile(job.call, dynamic=False, mode=mode)
        start = time.monotonic()
        got = compiled(*job.sets[0])
        torch.cuda.synchronize()
        spent = time.monotonic() - start
        return got, graphed(torch, compiled, job.sets, pools), spent


def jobs_of(torch: Any, given: argparse.Namespace) -> list[Callable[[], Job]]:
    """Models spread among the rest, so that a run cut short has some of everything."""
    drawn = [lambda d=d: product_job(torch, d) for d in products(given.seed, given.products)]
    flex = [lambda d=d: attention_job(torch, d) for d in attentions(given.seed, given.flex)]
    models = [lambda n=n: model_job(torch, n) for n in given.models]
    found: list[Callable[[], Job]] = []
    step = max(1, len(drawn) // max(1, len(flex), len(models)))
    for number, one in enumerate(drawn):
        found.append(one)
        if number % step == step - 1:
            found += [of.pop(0) for of in (flex, models) if of]
    return [*found, *flex, *models, *(lambda r=r: rows_job(torch, *r) for r in ROWS[: given.rows])]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--products", type=int, default=20)
    parser.add_argument("--flex", type=int, default=4)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--exhaustive", nargs="*", type=int, default=[], help="numbers of problems, from 0")
    parser.add_argument("--exhaustive-seconds", type=float, default=_LONGEST)
    parser.add_argument("--as-it-comes", nargs="*", type=int, default=[], help="numbers of problems, from 0")
    parser.add_argument("--peer", type=Path, help="what nvMatmulHeuristics answers")
    parser.add_argument("--models", nargs="*", default=["BERT block", "ViT block", "MLP-Mixer", "GPT block"])
    parser.add_argument("--rows", type=int, default=0, help="how many kernels along rows")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of the problems to run, in this order")
    given = parser.parse_args()
    import torch

    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    peer = json.loads(given.peer.read_bytes()) if given.peer else {}
    ways = tuple(way for way in given.ways if peer or way != "nvmatmul")
    _warm(torch, ways)
    jobs = jobs_of(torch, given)
    for number in given.only if given.only is not None else range(len(jobs)):
        if time.monotonic() - started > given.seconds:
            print("out of time", flush=True)
            break
        name = f"problem {number}"
        try:
            job = jobs[number]()
            name = job.name
            asked = {"as-it-comes": given.as_it_comes, "exhaustive": given.exhaustive}
            more = [way for way, numbers in asked.items() if number in numbers]
            row = race(torch, job, ways_of(job, ways, more), peer, given.exhaustive_seconds)
        except Exception:
            print(name, traceback.format_exc()[-1500:], flush=True)
            continue
        rows.append({"name": name, "kind": job.kind, **row})
        cells = (f"{way} {row['us'][way]:.1f}us/{row['seconds'].get(way, 0):.1f}s" for way in row["us"])
        print(f"{number:2} {name:42}", *cells, flush=True)
        found = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "problems": rows}
        (given.out / "inductor_race.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines([Compiled(**row) for row in rows])), flush=True)
    return 0


def _warm(torch: Any, ways: tuple[str, ...]) -> None:
    """The compiler's processes are started before the first problem, whatever the way."""
    job = product_job(torch, ("mm", (96, 320, 160), "bf16"))
    with contextlib.suppress(Exception):
        race(torch, job, [way for way in ways if way in ("default", "max-autotune", "tilewise")], {})
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wait_pool_ready()


if __name__ == "__main__":
    raise SystemExit(main())
