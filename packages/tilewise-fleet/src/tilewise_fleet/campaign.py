"""`tilewise collect … --ray`: a measurement campaign over the slots of a Ray cluster.

The work queue and all results are in the store. The driver keeps one actor per slot busy and reports their progress,
and has no other state. It can therefore be killed and restarted, several drivers can run at once, and nodes can come
and go: every actor takes the next kernel of the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewise.errors import TilewiseError
from tilewise_fleet.cluster import RESOURCE_FRACTION, SlotAddress, join, no_slots, slots
from tilewise_fleet.slot import Campaign, Slot

_NODE_POLL_SECONDS = 2.0  # between two checks for new and lost nodes; arbitrary
_GRACE_SECONDS = 20.0  # for kernels in progress when the campaign is stopped; arbitrary
_MAX_RESTARTS = 20  # per slot; arbitrary, it stops a slot that always crashes


@dataclass
class SlotStatus:
    """Progress of one slot."""

    slot: str
    machine: str = ""
    state: str = "starting"
    kernels: int = 0
    pairs: int = 0
    failures: int = 0
    restarts: int = 0
    seconds: float = 0.0

    @property
    def pairs_per_s(self) -> float:
        """Measured (kernel, configuration) pairs per second."""
        return self.pairs / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the row that `--json` prints, where the slot's name has the key `place`."""
        values = asdict(self)
        return {"place": values.pop("slot"), **values, "pairs_per_s": round(self.pairs_per_s, 1)}


@dataclass
class CampaignStatus:
    """Progress of a campaign: the status of each slot, and the last failures."""

    slots: dict[SlotAddress, SlotStatus] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    finished: bool = False  # the queue is empty

    @property
    def kernels(self) -> int:
        """Number of kernels measured by all slots."""
        return sum(slot.kernels for slot in self.slots.values())

    @property
    def pairs(self) -> int:
        """Number of (kernel, configuration) pairs measured by all slots."""
        return sum(slot.pairs for slot in self.slots.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the campaign's totals and its slots as JSON data, which `--json` prints at the end."""
        rows = [slot.as_dict() for slot in self.slots.values()]
        counts = {"kernels": self.kernels, "pairs": self.pairs}
        return {"slots": rows, **counts, "failures": self.failures, "finished": self.finished}


Report = Callable[[dict[str, Any], CampaignStatus], None]


def run_campaign(campaign: Campaign, address: str, report: Report = lambda event, status: None) -> CampaignStatus:
    """Measure on all slots until the queue is empty or time is up; Ctrl-C lets current kernels finish."""
    driver = _Driver(join(address), campaign, report)
    try:
        driver.run()
    finally:
        driver.stop()
    return driver.status


class _Driver:
    """Driver of a campaign: one Ray actor per slot, which is restarted if lost, and events for the reporter."""

    def __init__(self, ray: Any, campaign: Campaign, report: Report) -> None:
        """Start without actors; the time limit begins now."""
        self.ray, self.campaign, self.report, self.status = ray, campaign, report, CampaignStatus()
        self._actor_class = ray.remote(num_cpus=0, max_restarts=0)(Slot)
        self._actors: dict[SlotAddress, Any] = {}
        self._in_progress: dict[Any, SlotAddress] = {}  # Ray object reference -> the slot that will answer
        self._idle_until: dict[SlotAddress, float] = {}
        self._idle: set[SlotAddress] = set()  # slots for which the queue is empty
        self._last_node_poll = 0.0

    def run(self) -> None:
        """Give kernels to all slots until the time is up or every slot reports an empty queue."""
        deadline = time.monotonic() + self.campaign.minutes * 60
        while time.monotonic() < deadline and not self.status.finished:
            self._poll_nodes()
            self._keep_busy()
            ready, _ = self.ray.wait(list(self._in_progress), timeout=0.2) if self._in_progress else ([], [])
            if not self._in_progress:
                time.sleep(0.2)
            for reference in ready:
                self._on_result(reference, self._in_progress.pop(reference))
            self.status.finished = bool(self._actors) and self._idle >= set(self._actors)

    def _poll_nodes(self) -> None:
        """Start actors on new nodes and drop those of lost nodes; at most once per polling interval."""
        if time.monotonic() - self._last_node_poll < _NODE_POLL_SECONDS:
            return
        self._last_node_poll = time.monotonic()
        current = slots(self.ray, self.campaign.kind)
        if not current and not self.status.slots:
            raise no_slots(self.campaign.kind)
        for slot in set(self._actors) - set(current):
            self._mark_lost(slot, "the node is gone")
        for slot in current:
            if slot not in self._actors:
                self._start(slot)

    def _start(self, slot: SlotAddress) -> None:
        """Start an actor on a slot's node, unless it was restarted too often."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        status = self.status.slots.setdefault(slot, SlotStatus(slot.label))
        if status.restarts >= _MAX_RESTARTS:
            return
        strategy = NodeAffinitySchedulingStrategy(slot.node, soft=False)
        resources = {slot.resource: RESOURCE_FRACTION}
        actor = self._actor_class.options(resources=resources, scheduling_strategy=strategy).remote(
            self.campaign, slot.device, slot.devices
        )
        self._actors[slot] = actor
        self._in_progress[actor.begin.remote()] = slot

    def _keep_busy(self) -> None:
        """Start the next step on every idle slot whose pause is over."""
        busy, now = set(self._in_progress.values()), time.monotonic()
        for slot, actor in self._actors.items():
            if slot not in busy and self._idle_until.get(slot, 0.0) < now:
                self._in_progress[actor.step.remote()] = slot

    def _on_result(self, reference: Any, slot: SlotAddress) -> None:
        """Handle an actor's result: that it has started, measured kernels, found the queue empty, or failed.

        A tilewise error while an actor starts is a mistake in the configuration, so it ends the campaign.
        """
        status = self.status.slots[slot]
        try:
            result = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, TilewiseError) and not status.kernels and status.state == "starting":
                raise cause from None
            self._mark_lost(slot, str(cause or error).strip().splitlines()[-1][:200])
            return
        except self.ray.exceptions.RayError as error:
            self._mark_lost(slot, f"{type(error).__name__}: the worker is gone")
            return
        if "machine" in result:
            status.machine, status.state = result["machine"], "measuring"
            self._emit({"event": "started", "slot": slot.label, **result})
            return
        status.state = result["state"]
        if result["state"] == "measured":
            self._on_measured(result, slot)
            return
        if result["state"] == "done":
            self._idle.add(slot)
        # A slot that found no kernel asks again after a second; one that waits for the device lock asks at once.
        self._idle_until[slot] = time.monotonic() + (1.0 if result["state"] != "busy" else 0.0)

    def _on_measured(self, result: dict[str, Any], slot: SlotAddress) -> None:
        """Add a slot's new counts of kernels, pairs, failures and seconds to its status, and report them."""
        self._idle.clear()  # an unfinished kernel goes back to the queue, where other slots may take it
        status = self.status.slots[slot]
        status.seconds += result["seconds"]
        for kernel in result["kernels"]:
            status.kernels += kernel["finished"]
            status.pairs += kernel["pairs"]
        status.failures += len(result["failures"])
        self.status.failures = [*self.status.failures, *result["failures"]][-20:]
        self._emit({"event": "measured", "slot": slot.label, **result})

    def _mark_lost(self, slot: SlotAddress, reason: str) -> None:
        """Drop the actor of a slot whose worker or node is gone.

        Its claims expire with their leases, and the next check for nodes may start another actor there.
        """
        actor = self._actors.pop(slot, None)
        self._idle.discard(slot)
        status = self.status.slots[slot]
        status.restarts, status.state = status.restarts + 1, "lost"
        self._in_progress = {ref: other for ref, other in self._in_progress.items() if other != slot}
        if actor is not None:
            self.ray.kill(actor)
        self._emit({"event": "lost", "slot": slot.label, "why": reason})

    def _emit(self, event: dict[str, Any]) -> None:
        self.report(event, self.status)

    def stop(self) -> None:
        """Let kernels in progress finish, release claims, and end the actors."""
        if self._in_progress:
            references = list(self._in_progress)
            ready, _ = self.ray.wait(references, num_returns=len(references), timeout=_GRACE_SECONDS)
            for reference in ready:
                try:
                    self._on_result(reference, self._in_progress[reference])
                except Exception as error:  # recorded; the other actors must still be stopped
                    self.status.failures.append(str(error)[:200])
        closing = [actor.close.remote() for actor in self._actors.values()]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=5)
        for actor in self._actors.values():
            self.ray.kill(actor)
