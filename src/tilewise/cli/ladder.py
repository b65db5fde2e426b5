"""`tilewise ladder`: time a matrix product with one optimization after another, as a table and a picture."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, option, output_picture
from tilewise.cli.pictures import can_draw
from tilewise.cli.tables import show, table
from tilewise.errors import UnavailableError

if TYPE_CHECKING:
    from tilewise.backend.ladder import Rung


# Candidate cache blocks (m, n, k); the fastest on this machine is used.
_BLOCKS = ((64, 64, 64), (32, 256, 64), (64, 512, 128))
# Reasons why a rung may be slower than the one before it.
_SLOWER_REASONS = {
    "compiled": "the product is so small that calling the compiled code takes as long as the loops",
    "reordered": "the matrices are so small that they are in the fastest cache in any order",
    "blocked": "the matrices fit into this machine's caches whole, so blocks save no trips to memory and cost loops",
    "packed": "copying the blocks costs more than it saves at this size",
    "vectorised": "the product is too small to fill wide vectors",
    "native": "the product is too small to share, or other programs keep the cores busy",
}


def ladder(
    size: Annotated[int, option("Side of the square matrices.", min=1, max=8192)] = 512,
    python_size: Annotated[int, option("Side for the Python loops, which are slow.", min=1, max=1024)] = 128,
    seconds: Annotated[float, option("Seconds to spend on each rung.")] = 0.5,
    out: Annotated[Path, output_picture(help="File for the picture.")] = Path("out/ladder.png"),
    seed: Annotated[int, option("Seed of the matrices.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Time a matrix product from three Python loops to all cores, one idea at a time.

    Example: tilewise ladder --size 1024 --out ladder.png
    """
    import numpy as np

    from tilewise import get_num_threads
    from tilewise.backend import matmul_blocked
    from tilewise.backend.ladder import PEER, RUNGS
    from tilewise.costmodel.data.shards import track
    from tilewise.profile.machine import machine

    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))
    figures = machine()
    ceiling = {threads: figures.peak(threads) / 1e9 for threads in {1, get_num_threads()}}
    rates: list[tuple[Rung, float]] = []
    left_out: list[str] = []
    for rung in track((*RUNGS, PEER), "timing each rung", len(RUNGS) + 1):
        if rung.name == "blocked":
            block = _best_block(a, b)
            idea = f"{rung.idea} ({'×'.join(map(str, block))})"
            rung = dataclasses.replace(rung, idea=idea, run=functools.partial(matmul_blocked, block_size=block))
        n = min(size, python_size) if rung.name == "python" else size
        try:
            rates.append((rung, 2 * n**3 / _seconds(rung, a[:n, :n], b[:n, :n], seconds) / 1e9))
        except UnavailableError:
            left_out.append(rung.name)
    if as_json:
        print(json.dumps({"size": size, "gflops": {r.name: g for r, g in rates}, "ceiling_gflops": ceiling}))
        return
    _table(rates, ceiling, size)
    if left_out:
        print(f"Left out, because the kernels are not compiled: {', '.join(left_out)}.")
    for sentence in (*slower_rungs(rates), *(f"The ceilings are doubtful: {why}." for why in figures.doubts[:1])):
        print(sentence)
    _draw(rates, ceiling, size, out)
    if can_draw():
        print(f"Picture in {out}")


def _seconds(rung: Rung, a: Any, b: Any, budget: float) -> float:
    """Return the median seconds of the calls that fit the budget: at least three, or one that exceeds it alone."""
    times: list[float] = []
    begin = time.perf_counter()
    while True:
        start = time.perf_counter()
        rung.run(a, b)
        now = time.perf_counter()
        times.append(now - start)
        if now - begin > budget and (len(times) >= 3 or times[0] > budget):
            return sorted(times)[len(times) // 2]


def _table(rates: list[tuple[Rung, float]], ceiling: dict[int, float], size: int) -> None:
    """Print the rungs in GFLOP/s with their speed-ups, and the measured peaks by number of threads."""
    first = rates[0][1]
    befores = [first, *(rate for _, rate in rates)]
    rows = [
        (rung.name, rung.idea, f"{rate:,.3f}", f"{rate / before:.1f}×", f"{rate / first:,.0f}×")
        for (rung, rate), before in zip(rates, befores, strict=False)
    ]
    headings = ("rung", "idea", "GFLOP/s", "times the rung before", "times Python")
    show(table(headings, rows, f"{size}×{size} times {size}×{size}, float32", left_aligned=headings[:2]))
    for threads, peak in sorted(ceiling.items()):
        print(f"The machine's ceiling with {pluralize(threads, 'thread')}: {peak:.0f} GFLOP/s, measured.")


def _draw(rates: list[tuple[Rung, float]], ceiling: dict[int, float], size: int, out: Path) -> None:
    """Draw the rungs' GFLOP/s as bars on a logarithmic scale, and the measured peaks as lines."""
    from tilewise.cli.pictures import BLUE, GREY, RED, picture

    with picture(out) as axes:
        names = [rung.name for rung, _ in rates]
        bars = axes.bar(names, [rate for _, rate in rates], color=[GREY if name == "numpy" else BLUE for name in names])
        axes.bar_label(bars, [f"{rate:.3g}" for _, rate in rates], padding=2)
        fastest = max(rate for _, rate in rates)
        one_thread = max(rate for rung, rate in rates if rung.name not in ("native", "numpy"))
        highest = max(ceiling.values())
        for threads, peak in ceiling.items():
            if peak < (fastest if threads > 1 else one_thread):
                continue  # a rung passed this ceiling, so it was measured while the machine was busy
            axes.axhline(peak, color=RED, linestyle="--", linewidth=1, zorder=0)  # behind the bars and their numbers
            label = f"this machine's ceiling, {pluralize(threads, 'thread')}: {peak:.0f}"
            # The highest ceiling is labelled above its line, others below, so that labels do not overlap.
            offset = (0, 3 if peak == highest else -13)
            axes.annotate(label, (-0.4, peak), xytext=offset, textcoords="offset points", color=RED, fontsize=9)
        axes.set(yscale="log", ylabel="GFLOP/s (logarithmic)", title=f"Matrix product {size}×{size}, float32")
        axes.set_ylim(top=max(highest, fastest) * 3)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(axis="y")


def slower_rungs(rates: list[tuple[Rung, float]]) -> list[str]:
    """Explain each rung that is slower than the one before it by more than 3 %."""
    steps = [(rung.name, rate, before) for (_, before), (rung, rate) in itertools.pairwise(rates)]
    return [
        f"“{name}” is slower than the rung before it here: {_SLOWER_REASONS[name]}."
        for name, rate, before in steps
        if name in _SLOWER_REASONS and rate < 0.97 * before
    ]


def _best_block(a: Any, b: Any) -> tuple[int, int, int]:
    """Return the fastest block (m, n, k) by measuring: how much of a cache is free cannot be queried."""
    from tilewise.backend import matmul_blocked
    from tilewise.profile.timing.clock import time_interleaved

    times = time_interleaved([functools.partial(matmul_blocked, a, b, block) for block in _BLOCKS], 2, warmup=0)
    return min(zip(map(min, times), _BLOCKS, strict=True))[1]
