"""`tilewise ladder`: one matrix product, rung by rung, as a table and a picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.errors import UnavailableError

if TYPE_CHECKING:
    from tilewise.backend.ladder import Rung


def ladder(
    size: Annotated[int, typer.Option(min=1, max=8192, help="Side of the square matrices.")] = 512,
    python_size: Annotated[int, typer.Option(min=1, max=1024, help="Side for the Python loops, which are slow.")] = 128,
    seconds: Annotated[float, typer.Option(help="Time to spend on each rung.")] = 0.5,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/ladder.png"),
    seed: Annotated[int, typer.Option(help="Decides the matrices.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rates as JSON.")] = False,
) -> None:
    """Time a matrix product from three Python loops to all cores, one idea at a time.

    Example: tilewise ladder --size 1024 --out ladder.png
    """
    import numpy as np

    from tilewise import get_num_threads
    from tilewise.backend.ladder import PEER, RUNGS
    from tilewise.profile.machine import machine

    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))
    ceiling = {threads: machine().peak(threads) / 1e9 for threads in {1, get_num_threads()}}
    rates: list[tuple[Rung, float]] = []
    for rung in (*RUNGS, PEER):
        n = min(size, python_size) if rung.name == "python" else size
        try:
            rates.append((rung, 2 * n**3 / _seconds(rung, a[:n, :n], b[:n, :n], seconds) / 1e9))
        except UnavailableError as error:
            if not as_json:
                print(f"{rung.name}: {error}")
    if as_json:
        print(json.dumps({"size": size, "gflops": {r.name: g for r, g in rates}, "ceiling_gflops": ceiling}))
        return
    _table(rates, ceiling, size)
    _draw(rates, ceiling, size, out)
    print(f"Picture in {out}")


def _seconds(rung: Rung, a: Any, b: Any, budget: float) -> float:
    """The median of as many calls as fit the budget, three at least (one for what takes longer than it)."""
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
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{size}×{size} times {size}×{size}, float32", title_justify="left")
    for heading in ("rung", "idea", "GFLOP/s", "of the rung before", "of Python"):
        table.add_column(heading, justify="left" if heading in ("rung", "idea") else "right")
    before = first = rates[0][1]
    for rung, rate in rates:
        table.add_row(rung.name, rung.idea, f"{rate:,.3f}", f"{rate / before:.1f}×", f"{rate / first:,.0f}×")
        before = rate
    Console().print(table)
    for threads, peak in sorted(ceiling.items()):
        print(f"The machine's ceiling with {threads} thread{'s' * (threads > 1)}: {peak:.0f} GFLOP/s, measured.")


def _draw(rates: list[tuple[Rung, float]], ceiling: dict[int, float], size: int, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.8))
    names = [rung.name for rung, _ in rates]
    colours = ["#8a8f98" if name == "numpy" else "#2a6fb5" for name in names]
    bars = axes.bar(names, [rate for _, rate in rates], color=colours)
    axes.bar_label(bars, [f"{rate:.3g}" for _, rate in rates], padding=2)
    for place, (threads, peak) in enumerate(sorted(ceiling.items())):
        axes.axhline(peak, color="#b5482a", linestyle="--", linewidth=1)
        axes.annotate(
            f"ceiling, {threads} thread{'s' * (threads > 1)}",
            (2 * place, peak),
            xytext=(0, 3),
            textcoords="offset points",
            color="#b5482a",
            fontsize=8,
        )
    axes.set(yscale="log", ylabel="GFLOP/s", title=f"Matrix product {size}³, float32")
    axes.set_ylim(top=max(ceiling.values()) * 3)
    axes.grid(axis="y", alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130, bbox_inches="tight")
    plt.close(figure)
