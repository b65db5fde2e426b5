"""`collect`: measure kernels on this machine into a store for some minutes; the next call continues."""

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
    from tilewise.tune.measure.collector import Collector, Tally

KINDS = ("cpu", "triton")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Collected:
    """Result of `collect`: what the run added, and what the store contains now."""

    store: Path | str  # its file, or its URL without the password
    kernels: int  # finished in this run
    pairs: int
    scatter: float | None  # median relative deviation of the repeats in this run
    in_store: dict[str, int]  # kernels, pairs, timings, batches, disturbed
    verdicts: dict[str, dict[str, int]]  # by family
    failures: list[str] = field(default_factory=list)
    left: int = 0  # kernels that are not yet measured, because time was up


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
    which is created or continued; `configs` limits the configurations of a kernel (0: all of them). `plugins` are
    modules that add kernel families when they are imported. With `finals` nothing new is measured: the fastest few
    configurations of finished kernels without finals are timed again, interleaved.

    >>> collect("cpu", minutes=1.0, out="measurements.sqlite")  # doctest: +SKIP
    """
    from tilewise.store.store import Store
    from tilewise.tune.measure.collector import unfinished

    if kind not in KINDS:
        raise ConfigurationError(f"There is no collector {kind!r}; use cpu or triton.")
    if not 0 < minutes < 1e6:
        raise ConfigurationError(f"minutes must be a positive number, not {minutes}.")
    if configs is not None and (configs < 0 or configs == 1):
        raise ConfigurationError(f"configs must be 0 (all) or at least 2, not {configs}.")
    load_plugins(plugins)
    kernels = read_kernels(kind, shapes) if shapes is not None or not finals else None
    with Store(store_location(out, kind), create=not finals) as store:
        selected = kernels if kernels is not None else store.kernels()
        options = {"minutes": minutes, "seed": seed, "finals": finals, "device": device, "plugins": tuple(plugins)}
        collector = make_collector(kind, selected, store, configs, say, **options)
        collector.progress = progress
        tallies = collector.run()
        counts = store.counts()
        remaining = len(unfinished(collector.requested, store, finals))
        location = store.name if store.shared else store.path
    return _result(location, tallies, counts, remaining)


def store_location(out: str | os.PathLike[str] | None, kind: str) -> str | Path:
    """Location of the store: a database URL, or a file."""
    if isinstance(out, str) and is_url(out):
        return out
    return Path(out).expanduser() if out is not None else Path(f"{kind}.sqlite")


def plan_cpu(
    *,
    shapes: str | os.PathLike[str] | Sequence[Mapping[str, Value]] | None = None,
    configs: int | None = None,
    plugins: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Estimate what `collect("cpu", ...)` would measure, by family and threads, and how long it would take."""
    from tilewise.tune.measure.cpu.clock import require_native
    from tilewise.tune.measure.cpu.collector import cpu_options, plan

    require_native()
    load_plugins(plugins)
    options = cpu_options() if configs is None else cpu_options(max_configs=configs)
    return plan(read_kernels("cpu", shapes), options)


def read_kernels(kind: str, shapes: str | os.PathLike[str] | Sequence[Mapping[str, Value]] | None) -> list[Kernel]:
    """Read the kernels of a user's file or list, or else those of the built-in programs."""
    if shapes is None:
        from tilewise.tune.workloads import built_in_kernels

        return built_in_kernels(kind)
    from tilewise.store.problem import read_shapes, shapes_from

    if isinstance(shapes, str | os.PathLike):
        return read_shapes(shapes, problem_parser(kind))
    return shapes_from(list(shapes), "shapes", problem_parser(kind))


def problem_parser(device_kind: str) -> Callable[[str, Mapping[str, Value]], Problem]:
    """Return a function that turns a family's name and a specification into a checked `Problem` of this device."""
    from tilewise.tune.families.registry import find_family

    def parse(family: str, spec: Mapping[str, Value]) -> Problem:
        problem: Problem = find_family(device_kind, family).problem(spec)
        return problem

    return parse


def make_collector(
    kind: str, kernels: Sequence[Kernel], store: Store, configs: int | None, say: Callable[[str], None], **options: Any
) -> Collector:
    """Make the collector of a device. `configs` is the number of configurations per kernel (None: the device's
    default); other keywords are fields of `Options`."""
    if configs is not None:
        options["max_configs"] = configs
    if kind == "cpu":
        from tilewise.tune.measure.cpu.collector import CpuCollector, cpu_options

        return CpuCollector(kernels, store, cpu_options(**options), say)
    from tilewise.gpu.measure.collector import TritonCollector
    from tilewise.tune.measure.collector import Options
    from tilewise.tune.measure.sampling import TimingSettings

    if options.get("device") == "interpreter":
        options["settings"] = TimingSettings(unit_ms=0.0, slowest_ms=1e6)
    return TritonCollector(kernels, store, Options(**options), say)


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that add families; the working folder is searched too."""
    for name in modules:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(f"The plug-in {name!r} cannot be imported: {error}.") from error


def _result(location: Path | str, tallies: Mapping[str, Tally], counts: dict[str, int], remaining: int) -> Collected:
    """Add up the tallies of all families."""
    scatter = [value for tally in tallies.values() for value in tally.scatter]
    return Collected(
        store=location,
        kernels=sum(tally.kernels for tally in tallies.values()),
        pairs=sum(tally.pairs for tally in tallies.values()),
        scatter=statistics.median(scatter) if scatter else None,
        in_store=counts,
        verdicts={family: dict(tally.verdicts) for family, tally in tallies.items()},
        failures=[failure for tally in tallies.values() for failure in tally.failures],
        left=remaining,
    )
