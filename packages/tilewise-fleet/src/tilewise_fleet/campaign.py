"""`tilewise collect … --ray`: a campaign over the slots of a Ray cluster.

The plan and everything that is known lies in the store; the driver only keeps its actors busy and tells what happens.
So it may be killed and started again, a second one may join, nodes may come and go: whoever is there takes the next
kernel of the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewise.errors import TilewiseError
from tilewise_fleet.cluster import SHARE, SlotPlace, join, no_slots, slots
from tilewise_fleet.slot import Campaign, Slot

_LOOK_SECONDS = 2.0  # between two looks for nodes that came or went
_GRACE_SECONDS = 20.0  # for kernels under way, when the campaign is stopped
_MOST_RESTARTS = 20  # of the actors of one slot


@dataclass
class Line:
    """What one slot has done so far."""

    place: str
    machine: str = ""
    state: str = "starting"
    kernels: int = 0
    pairs: int = 0
    failures: int = 0
    restarts: int = 0
    seconds: float = 0.0

    @property
    def pairs_per_s(self) -> float:
        return self.pairs / self.seconds if self.seconds else 0.0


@dataclass
class Told:
    """How a campaign stands: one line a slot, and the last failures."""

    lines: dict[SlotPlace, Line] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    finished: bool = False  # nothing is left in the queue

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(line), "pairs_per_s": round(line.pairs_per_s, 1)} for line in self.lines.values()]
        kernels, pairs = sum(line.kernels for line in self.lines.values()), sum(r["pairs"] for r in rows)
        return {"slots": rows, "kernels": kernels, "pairs": pairs, "failures": self.failures, "finished": self.finished}


Report = Callable[[dict[str, Any], Told], None]


def run_campaign(campaign: Campaign, address: str, report: Report = lambda event, told: None) -> Told:
    """Measure until the queue is empty or the time is up; Ctrl-C lets the kernels under way finish."""
    driver = _Driver(join(address), campaign, report)
    try:
        driver.run()
    finally:
        driver.stop()
    return driver.told


class _Driver:
    def __init__(self, ray: Any, campaign: Campaign, report: Report) -> None:
        self.ray, self.campaign, self.report, self.told = ray, campaign, report, Told()
        self._actor_class = ray.remote(num_cpus=0, max_restarts=0)(Slot)
        self._actors: dict[SlotPlace, Any] = {}
        self._under_way: dict[Any, SlotPlace] = {}
        self._rest: dict[SlotPlace, float] = {}  # until when a slot without work is left alone
        self._done: set[SlotPlace] = set()
        self._looked = 0.0

    def run(self) -> None:
        until = time.monotonic() + self.campaign.minutes * 60
        while time.monotonic() < until and not self.told.finished:
            self._look_for_nodes()
            self._keep_busy()
            ready, _ = self.ray.wait(list(self._under_way), timeout=0.2) if self._under_way else ([], [])
            if not self._under_way:
                time.sleep(0.2)
            for reference in ready:
                self._hear(reference, self._under_way.pop(reference))
            self.told.finished = bool(self._actors) and self._done >= set(self._actors)

    def _look_for_nodes(self) -> None:
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        here = slots(self.ray, self.campaign.kind)
        if not here and not self.told.lines:
            raise no_slots(self.campaign.kind)
        for place in set(self._actors) - set(here):
            self._lose(place, "the node is gone")
        for place in here:
            if place not in self._actors:
                self._start(place)

    def _start(self, place: SlotPlace) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        line = self.told.lines.setdefault(place, Line(place.label))
        if line.restarts >= _MOST_RESTARTS:
            return
        where = NodeAffinitySchedulingStrategy(place.node, soft=False)
        actor = self._actor_class.options(resources={place.resource: SHARE}, scheduling_strategy=where).remote(
            self.campaign, place.device, place.devices
        )
        self._actors[place] = actor
        self._under_way[actor.begin.remote()] = place

    def _keep_busy(self) -> None:
        busy, now = set(self._under_way.values()), time.monotonic()
        for place, actor in self._actors.items():
            if place not in busy and self._rest.get(place, 0.0) < now:
                self._under_way[actor.step.remote()] = place

    def _hear(self, reference: Any, place: SlotPlace) -> None:
        line = self.told.lines[place]
        try:
            said = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, TilewiseError) and not line.kernels and line.state == "starting":
                raise cause from None
            self._lose(place, str(cause or error).strip().splitlines()[-1][:200])
            return
        except self.ray.exceptions.RayError as error:
            self._lose(place, f"{type(error).__name__}: the worker is gone")
            return
        if "machine" in said:
            line.machine, line.state = said["machine"], "measuring"
            self._tell({"event": "started", "slot": place.label, **said})
            return
        line.state = said["state"]
        if said["state"] == "measured":
            self._done.clear()
            line.seconds += said["seconds"]
            for kernel in said["kernels"]:
                line.kernels += kernel["finished"]
                line.pairs += kernel["pairs"]
            line.failures += len(said["failures"])
            self.told.failures = [*self.told.failures, *said["failures"]][-20:]
            self._tell({"event": "measured", "slot": place.label, **said})
            return
        if said["state"] == "done":
            self._done.add(place)
        self._rest[place] = time.monotonic() + (1.0 if said["state"] != "busy" else 0.0)

    def _lose(self, place: SlotPlace, why: str) -> None:
        """A worker or its node is gone; what it held is free again after its lease, and another may start there."""
        actor = self._actors.pop(place, None)
        self._done.discard(place)
        line = self.told.lines[place]
        line.restarts, line.state = line.restarts + 1, "lost"
        self._under_way = {ref: where for ref, where in self._under_way.items() if where != place}
        if actor is not None:
            self.ray.kill(actor)
        self._tell({"event": "lost", "slot": place.label, "why": why})

    def _tell(self, event: dict[str, Any]) -> None:
        self.report(event, self.told)

    def stop(self) -> None:
        """Let what is under way finish, give back what is claimed, and end the actors."""
        if self._under_way:
            ready, late = self.ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=_GRACE_SECONDS)
            for reference in ready:
                try:
                    self._hear(reference, self._under_way[reference])
                except Exception as error:  # said, and not in the way of the end
                    self.told.failures.append(str(error)[:200])
            del late
        closing = [actor.close.remote() for actor in self._actors.values()]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=5)
        for actor in self._actors.values():
            self.ray.kill(actor)
