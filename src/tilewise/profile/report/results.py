"""Add up recorded events: the cost of each layer and operation, compared with the machine's roofline.

Every nanosecond of the profile is counted exactly once: in a *unit* (a kernel, or an operation without one), in the
framework's code around a unit, in a layer's Python code, or in the code outside. Units have FLOPs and bytes, hence a
roofline time: the minimum time this machine needs for them.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tilewise.profile.events import ProfileEvent
from tilewise.profile.flops import Cost, cost_of, op_name
from tilewise.profile.machine import MachineFigures

if TYPE_CHECKING:
    from tilewise.profile.report.bottleneck import Finding

NANO = 1e-9
# A call that takes 5 times the median of at least 5 comparable calls counts as interrupted.
_INTERRUPTED_FACTOR, _MIN_COMPARABLE_CALLS = 5.0, 5


@dataclass(frozen=True)
class Unit:
    """One call of a kernel (or of an operation that has no kernel), with its work and its roofline time."""

    name: str
    layer: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float
    flops: int
    elementwise: int
    bytes_moved: int
    roofline_seconds: float
    memory_bound: bool
    backend: str
    tile: str
    thread: int
    allocated: int
    result_bytes: int


@dataclass
class ProfileRow:
    """Sums over the units of one layer or one operation.

    `own_seconds` is Python code around the units. `interrupted_seconds` is the part of it by which some calls took far
    longer than comparable ones, because the machine was busy with something else.
    """

    name: str
    label: str = ""  # a layer's name with class and sizes: `7 Conv2d(64→64, 3×3)`
    calls: int = 0
    unit_seconds: float = 0.0
    own_seconds: float = 0.0
    interrupted_seconds: float = 0.0
    flops: int = 0
    elementwise: int = 0
    bytes_moved: int = 0
    roofline_seconds: float = 0.0
    allocated: int = 0
    own_allocated: int = 0
    backends: dict[str, int] = field(default_factory=dict)
    tiles: dict[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name to show in tables."""
        return self.label or self.name or "(model)"

    @property
    def seconds(self) -> float:
        return self.unit_seconds + self.own_seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def roofline_share(self) -> float:
        """Roofline time divided by measured time: 1 is the best this machine can do."""
        return self.roofline_seconds / self.seconds if self.seconds else 0.0

    @property
    def intensity(self) -> float:
        return Cost(self.flops, self.elementwise, self.bytes_moved).intensity

    def add(self, unit: Unit) -> None:
        """Add the time, work, memory, backend and tile of one kernel call."""
        self.calls += 1
        self.unit_seconds += unit.seconds
        self.flops += unit.flops
        self.elementwise += unit.elementwise
        self.bytes_moved += unit.bytes_moved
        self.roofline_seconds += unit.roofline_seconds
        self.allocated += unit.allocated
        for names, name in ((self.backends, unit.backend), (self.tiles, unit.tile)):
            if name:
                names[name] = names.get(name, 0) + 1


@dataclass(frozen=True)
class ProfileResults:
    """A profile as data. Times are in seconds and exclude the overhead of recording (`recording_seconds`).

    `outside_seconds` is code between the framework's layers and operations; `outside_interrupted_seconds` is the part
    of it by which some pauses lasted far longer than other pauses between the same two operations.
    """

    seconds: float
    outside_seconds: float
    recording_seconds: float
    flops: int
    elementwise: int
    bytes_moved: int
    by_layer: dict[str, ProfileRow]
    by_op: dict[str, ProfileRow]
    units: list[Unit] = field(repr=False)
    machine: MachineFigures = field(repr=False)
    threads: int
    failed: int
    outside_interrupted_seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    @property
    def bottleneck(self) -> Finding | None:
        """The largest cause; None if nothing was recorded."""
        return self.findings[0] if self.findings else None

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def roofline_share(self) -> float:
        return sum(u.roofline_seconds for u in self.units) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        data = _with_derived(self, "flops_per_second", "roofline_share")
        data["bottleneck"] = asdict(self.bottleneck) if self.bottleneck else None
        for table in ("by_layer", "by_op"):
            rows: dict[str, ProfileRow] = getattr(self, table)
            derived = ("seconds", "flops_per_second", "roofline_share", "intensity")
            data[table] = {name: _with_derived(row, *derived) for name, row in rows.items()}
        return data


def _with_derived(record: Any, *names: str) -> dict[str, Any]:
    """Convert a dataclass to a dict, with the properties `names` as additional entries."""
    return asdict(record) | {name: getattr(record, name) for name in names}


def build(
    events: Sequence[ProfileEvent],
    seconds: float,
    machine: MachineFigures,
    threads: int,
    starts_ns: Sequence[int] = (),
    labels: Mapping[str, str] = MappingProxyType({}),
) -> ProfileResults:
    """Add up a profile's events by layer and operation.

    The profile lasted `seconds` in total and consists of `with` blocks that began at `starts_ns`. `labels` maps layer
    names to labels for the tables.
    """
    from tilewise.profile.report.bottleneck import find_bottlenecks

    units: list[Unit] = []
    layers: dict[str, ProfileRow] = {}
    ops: dict[str, ProfileRow] = {}
    own_times: dict[tuple[str, ...], list[float]] = {}
    outermost = recording = 0.0
    failed = 0
    for event in events:
        failed += event.failed and event.kind == "op"
        recording += event.recording_ns * NANO
        # Nested events are inside their parents, so only the outermost ones add to the covered time.
        if event.parent is None:
            outermost += (event.duration_ns + event.recording_ns) * NANO
        cost = cost_of(event)
        layer = layers.setdefault(event.layer, ProfileRow(event.layer, labels.get(event.layer, event.layer)))
        if cost is not None:
            unit = _unit(event, cost, machine, threads)
            units.append(unit)
            layer.add(unit)
            ops.setdefault(unit.name, ProfileRow(unit.name)).add(unit)
        if event.kind == "module" and event.layer not in labels and event.layer:
            layer.label = f"{event.layer} {event.name}"
        if cost is None and not (event.kind == "kernel" and event.parent is not None and event.parent.kind == "kernel"):
            # The event contains other events: only its time outside them belongs to it.
            own = max(event.duration_ns - event.inner_ns, 0) * NANO
            layer.own_seconds += own
            own_times.setdefault((event.layer, event.kind, event.name, event.phase), []).append(own)
            layer.own_allocated += max(event.allocated - event.inner_allocated, 0)
    # Interruptions are visible only in comparison with similar calls, so they are computed after all events are known.
    for (name, *_), times in own_times.items():
        layers[name].interrupted_seconds += _interrupted_seconds(times)
    outside = max(seconds - outermost, 0.0)
    results = ProfileResults(
        seconds=max(seconds, outermost) - recording,
        outside_seconds=outside,
        outside_interrupted_seconds=min(_interrupted_outside(events, starts_ns), outside),
        recording_seconds=recording,
        flops=sum(u.flops for u in units),
        elementwise=sum(u.elementwise for u in units),
        bytes_moved=sum(u.bytes_moved for u in units),
        by_layer=_slowest_first(layers),
        by_op=_slowest_first(ops),
        units=units,
        machine=machine,
        threads=threads,
        failed=failed,
    )
    results.findings.extend(find_bottlenecks(results))
    return results


def interruption_threshold(times: list[float]) -> float:
    """Return the seconds above which one of several comparable calls counts as interrupted."""
    return _INTERRUPTED_FACTOR * median(times) if len(times) >= _MIN_COMPARABLE_CALLS else float("inf")


def _interrupted_seconds(times: list[float]) -> float:
    """Return by how much comparable calls exceed the interruption threshold, in total."""
    return sum(max(t - interruption_threshold(times), 0.0) for t in times)


def _interrupted_outside(events: Sequence[ProfileEvent], starts_ns: Sequence[int]) -> float:
    """Return by how much pauses between outermost events exceed comparable pauses, in seconds."""
    pauses: dict[tuple[str, ...], list[float]] = defaultdict(list)
    last: dict[int, ProfileEvent] = {}
    for event in events:
        if event.parent is not None:
            continue
        before = last.get(event.thread)
        if before is not None and bisect(starts_ns, before.start_ns) == bisect(starts_ns, event.start_ns):
            pause = event.start_ns - before.end_ns - before.recording_ns
            pauses[before.layer, before.name, event.layer, event.name].append(pause * NANO)
        last[event.thread] = event
    return sum(_interrupted_seconds(times) for times in pauses.values())


def _unit(event: ProfileEvent, cost: Cost, machine: MachineFigures, threads: int) -> Unit:
    """Build the record of one kernel call: its event's time, its cost, and the roofline time for this cost."""
    compute, memory = machine.roofline_seconds(cost.flops + cost.elementwise, cost.bytes_moved, threads)
    return Unit(
        name=op_name(event),
        layer=event.layer,
        phase=event.phase,
        shapes=event.inputs,
        seconds=event.duration_ns * NANO,
        flops=cost.flops,
        elementwise=cost.elementwise,
        bytes_moved=cost.bytes_moved,
        roofline_seconds=max(compute, memory),
        memory_bound=memory >= compute,
        backend=event.backend or "numpy",
        tile="" if event.tile is None else str(event.tile),
        thread=event.thread,
        allocated=event.allocated,
        result_bytes=0 if event.shares_memory else event.output_bytes,
    )


def _slowest_first(rows: dict[str, ProfileRow]) -> dict[str, ProfileRow]:
    return dict(sorted(rows.items(), key=lambda item: -item[1].seconds))
