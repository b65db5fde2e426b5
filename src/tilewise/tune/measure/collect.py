"""`collect`: measure kernels on this machine into a store, for so many minutes; call it again and it goes on."""

from __future__ import annotations

import importlib
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.errors import ConfigurationError
from tilewise.store.database import is_url
from tilewise.store.problem import Kernel, Problem, Value

if TYPE_CHECKING:
    from tilewise.store.store import Store
    from tilewise.tune.measure.collector import Collector
    from tilewise.tune.measure.schedule import Tally

KINDS = ("cpu", "triton")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Collected:
    """What a run of `collect` added, and what the store holds now."""

    store: Path | str  # its file, or its URL without the password
    kernels: int  # finished in this run
    pairs: int
    scatter: float | None  # median relative deviation of the repeats in this run
    in_store: dict[str, int]  # kernels, pairs, timings, batches, disturbed
    verdicts: dict[str, dict[str, int]]  # by family
    failures: list[str] = field(default_factory=list)
    left: int = 0  # kernels that are still to be measured, where time was up


def collect(
    kind: str,
    *,
    shapes: str | os.PathLike[str] | Sequence[Mapping[str, Value]] | None = None,
    minutes: float = 8.0,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    configs: int | None = None,
    device: str = "cuda",
    plugins: Sequence[str] = (),
    finals: bool = False,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> Collected:
    """Measure tiled kernels on this CPU or, through Triton, on this GPU.

    `shapes` is a JSON file or a list of problems such as ``{"family": "matmul", "m": 512, "n": 4096, "k": 1024}``;
    without it the kernels of the built-in programs are measured. `out` is the store, a file or a postgresql:// URL,
    made if it is not there and gone on with if it is; `configs` limits the configurations of a kernel (0: all of them).
    `plugins` are modules that add families of their own when they are imported. With `finals` nothing new is
    measured: the best few configurations of kernels that are finished, but have had no finals, are timed again side by
    side.

    >>> collect("cpu", minutes=1.0, out="measurements.sqlite")  # doctest: +SKIP
    """
    from tilewise.store.store import Store
    from tilewise.tune.measure.schedule import unfinished

    if kind not in KINDS:
        raise ConfigurationError(f"There is no collector {kind!r}; use cpu or triton.")
    if not 0 < minutes < 1e6:
        raise ConfigurationError(f"minutes must be a positive number, not {minutes}.")
    if configs is not None and (configs < 0 or configs == 1):
        raise ConfigurationError(f"configs must be 0 (all) or at least 2, not {configs}.")
    load_plugins(plugins)
    kernels = read_kernels(kind, shapes) if shapes is not None or not finals else None
    with Store(store_place(out, kind), create=not finals) as store:
        chosen = kernels if kernels is not None else store.kernels()
        options = {"minutes": minutes, "seed": seed, "finals": finals, "device": device, "plugins": tuple(plugins)}
        collector = make_collector(kind, chosen, store, configs, say, **options)
        collector.progress = progress
        tallies = collector.run()
        counts = store.counts()
        left = len(unfinished(collector.wanted, store, finals))
        place = store.name if store.shared else store.path
    return _result(place, tallies, counts, left)


def store_place(out: str | os.PathLike[str] | None, kind: str) -> str | Path:
    """Where the measurements go: a URL as it is, else a file."""
    if isinstance(out, str) and is_url(out):
        return out
    return Path(out).expanduser() if out is not None else Path(f"{kind}.sqlite")


def plan_cpu(
    *,
    shapes: str | os.PathLike[str] | Sequence[Mapping[str, Value]] | None = None,
    configs: int | None = None,
    plugins: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """What `collect("cpu", ...)` would measure, by family and threads, and about how long it takes."""
    from tilewise.tune.measure.cpu.clock import require_native
    from tilewise.tune.measure.cpu.collector import cpu_options
    from tilewise.tune.measure.cpu.plan import plan

    require_native()
    load_plugins(plugins)
    options = cpu_options() if configs is None else cpu_options(max_configs=configs)
    return plan(read_kernels("cpu", shapes), options)


def read_kernels(kind: str, shapes: str | os.PathLike[str] | Sequence[Mapping[str, Value]] | None) -> list[Kernel]:
    """The kernels that a user's file or list names, or those of the built-in programs."""
    if shapes is None:
        from tilewise.tune.workloads.programs import built_in_kernels

        return built_in_kernels(kind)
    from tilewise.store.problem import read_shapes, shapes_from

    if isinstance(shapes, str | os.PathLike):
        return read_shapes(shapes, problem_reader(kind))
    return shapes_from(list(shapes), "shapes", problem_reader(kind))


def problem_reader(kind: str) -> Callable[[str, Mapping[str, Value]], Problem]:
    from tilewise.tune.families.registry import find_family

    def read(family: str, spec: Mapping[str, Value]) -> Problem:
        problem: Problem = find_family(kind, family).problem(spec)
        return problem

    return read


def make_collector(
    kind: str, kernels: Sequence[Kernel], store: Store, configs: int | None, say: Callable[[str], None], **options: Any
) -> Collector:
    """The collector of a kind of machine; `configs` a kernel, None for as many as are usual there. The rest is
    `Options`, as far as it is not as usual."""
    if configs is not None:
        options["max_configs"] = configs
    if kind == "cpu":
        from tilewise.tune.measure.cpu.collector import CpuCollector, cpu_options

        return CpuCollector(kernels, store, cpu_options(**options), say)
    from tilewise.gpu.measure.collector import TritonCollector
    from tilewise.tune.measure.collector import Options
    from tilewise.tune.measure.sampling import Settings

    if options.get("device") == "interpreter":
        options["settings"] = Settings(unit_ms=0.0, slowest_ms=1e6)
    return TritonCollector(kernels, store, Options(**options), say)


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that add families; one beside the working folder is found too."""
    for name in modules:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(f"The plug-in {name!r} cannot be imported: {error}.") from error


def _result(place: Path | str, tallies: Mapping[str, Tally], counts: dict[str, int], left: int) -> Collected:
    scatter = [value for tally in tallies.values() for value in tally.scatter]
    return Collected(
        place,
        sum(tally.kernels for tally in tallies.values()),
        sum(tally.pairs for tally in tallies.values()),
        statistics.median(scatter) if scatter else None,
        counts,
        {family: dict(tally.verdicts) for family, tally in tallies.items()},
        [failure for tally in tallies.values() for failure in tally.failures],
        left,
    )
