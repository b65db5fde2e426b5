"""Records of what was decided and measured for PyTorch's compiler, and the report over them.

Decisions are lines of JSON, measurements go into a measurement store, and the fastest configuration of each product
goes into the tuner's cache of choices, so that the next process takes it without measuring. A record that cannot be
written is dropped; compilation goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise._files import convert_read_errors, open_input
from tilewise._system import cache_folder
from tilewise.errors import MissingFileError, TilewiseError
from tilewise.gpu.inductor.templates import Reason, Selection
from tilewise.gpu.products.roofline import CUBLAS, is_cublas
from tilewise.store.problem import Config, Problem
from tilewise.store.store import Machine, Store
from tilewise.tune.choose.cache import Decision
from tilewise.tune.choose.memory import Memory

_MAX_FILE_BYTES = 256 << 20
_FILE = "decisions.jsonl"
_PROGRAM = "inductor"


def default_folder() -> Path:
    """Return the folder of records: ``$TILEWISE_CACHE/inductor``, else a folder in the user's cache."""
    return cache_folder() / "inductor"


class DecisionLog:
    """The decisions and measurements of one machine."""

    def __init__(self, machine: str, folder: Path | None = None) -> None:
        """Open the records of `machine` in a folder (default: the user's cache folder)."""
        self.folder = folder or default_folder()
        # Every measurement that the compiler made on this machine with this version of PyTorch.
        store_file = self.folder / f"triton-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.sqlite"
        self.memory = Memory(self.folder, Machine("triton", machine, {}), "inductor", store_file)

    def best(self, problem: Problem) -> Config | None:
        """Return the fastest configuration of earlier measurements of a problem; None without any."""
        decision = self.memory.choices.get(problem)
        return decision.config if decision is not None else None

    def add_decision(self, problem: Problem, selection: Selection) -> None:
        """Append a selection to the file of decisions, as one line of JSON."""
        line = {
            "problem": dict(problem),
            "why": str(selection.reason),
            "considered": selection.considered,
            "kept": len(selection.indices),
            "seconds": selection.seconds,
            "taken": round(time.time(), 3),
        }
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / _FILE).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")

    def add_measurements(self, problem: Problem, rows: Sequence[tuple[Config, float]], compile_seconds: float) -> None:
        """Store measured (configuration, seconds) rows, so that later processes need not measure again."""
        if not rows:
            return
        times_ns = {config: seconds * 1e9 for config, seconds in rows}
        best = min(times_ns, key=times_ns.__getitem__)
        decision = Decision(problem, best, "measured", runtime_ns=times_ns[best], measurements=len(rows), sure=True)
        default_ns, settings = times_ns.get(CUBLAS, times_ns[best]), {"compile_seconds": compile_seconds}
        with contextlib.suppress(TilewiseError, OSError):
            self.memory.add(_PROGRAM, decision, times_ns, default_ns, settings)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one per line; damaged lines are skipped."""
    with open_input(path, _MAX_FILE_BYTES) as stream, convert_read_errors(path):
        content = stream.read(_MAX_FILE_BYTES)
    for line in content.split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _fastest_configs(folder: Path) -> dict[str, tuple[Config, float]]:
    """Return, by problem, the configuration fastest in the last measurement and ATen's time over its time."""
    fastest = {}
    for path in sorted(folder.glob("*.sqlite")):
        with Store(path, create=False) as store:
            for kernel in store.kernels():
                batches = store.batches(kernel)
                times_ns = {Config.parse(key): ns for key, ns in batches[-1].runtime_ns.items()} if batches else {}
                if times_ns:
                    best = min(times_ns, key=times_ns.__getitem__)
                    aten_ns = min((ns for config, ns in times_ns.items() if is_cublas(config)), default=times_ns[best])
                    fastest[kernel.problem.key] = (best, aten_ns / times_ns[best])
    return fastest


def report(folder: Path | None = None) -> dict[str, Any]:
    """Summarise all records of a folder, by default of the user's cache folder, as ``--json`` prints them.

    `rows` has one object per product: its description, `why` and among how many `considered` templates it was chosen,
    how many were benchmarked (`kept`), the `fastest` (empty if nothing was measured), ATen's time over the fastest's
    (`of_aten`), and the seconds that selecting took. The other values are sums over the rows.
    """
    if folder is not None and not folder.is_dir():
        raise MissingFileError(f"{folder} is not a folder of records.")
    folder = folder or default_folder()
    path = folder / _FILE
    lines, fastest = list(_read_lines(path)) if os.path.lexists(path) else [], _fastest_configs(folder)
    rows = [row for line in lines if (row := _report_row(line, fastest)) is not None]
    reasons = Counter(row["why"] for row in rows)
    return {
        "products": len(rows),
        "considered": sum(row["considered"] for row in rows),
        "kept": sum(row["kept"] for row in rows),
        "measured": reasons[Reason.BENCHMARK],
        "remembered": reasons[Reason.EARLIER_WINNER],
        "choosing_seconds": sum(row["seconds"] for row in rows),
        "rows": rows,
    }


def _report_row(line: Mapping[str, Any], fastest: Mapping[str, tuple[Config, float]]) -> dict[str, Any] | None:
    """Convert a line of the decisions file to a row of the report; None for a damaged line."""
    try:
        problem, reason = Problem(line["problem"]), str(line["why"])
        # A certain choice is ATen, except for attention, which has no call of ATen.
        certain_aten = reason == Reason.CERTAIN and problem.family != "attention"
        config, speedup = fastest.get(problem.key, (CUBLAS if certain_aten else None, 1.0))
        return {
            "product": _describe_problem(problem),
            "why": reason,
            "considered": int(line["considered"]),
            "kept": int(line["kept"]),
            "fastest": _describe_config(config) if config is not None else "",
            "of_aten": speedup,
            "seconds": float(line["seconds"]),
        }
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _describe_problem(problem: Problem) -> str:
    """Format the sizes and dtype of a product or attention for the report."""
    if problem.family == "attention":
        sizes = " x ".join(str(problem.size(name)) for name in ("batch", "heads", "queries", "keys", "head"))
        return f"attention {sizes} {problem.word('dtype')}"
    batch = f"{problem.size('batch')} x " if problem.size("batch") > 1 else ""
    sizes = " x ".join(str(problem.size(name)) for name in ("m", "n", "k"))
    return f"{problem.word('op')} {batch}{sizes} {problem.word('dtype')}"


def _describe_config(config: Config) -> str:
    """Format a configuration as `128x128x64, 8 warps, 3 stages, TMA`, or as `ATen`."""
    if is_cublas(config):
        return "ATen"
    tile = "x".join(str(config.size(name)) for name in ("block_m", "block_n", "block_k"))
    return f"{tile}, {config.size('warps')} warps, {config.size('stages')} stages" + ", TMA" * config.size("tma")
