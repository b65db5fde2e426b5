"""The driver of a campaign without a cluster: what it does with what its actors return, and with those it loses."""

from __future__ import annotations

from typing import Any

import pytest

from tilewise.errors import ConfigurationError
from tilewise_fleet import campaign as module
from tilewise_fleet.campaign import CampaignStatus, SlotStatus, _Driver
from tilewise_fleet.cluster import SlotAddress
from tilewise_fleet.slot import Campaign

PLACE, OTHER = SlotAddress("a", "10.0.0.1", "gpu:H200"), SlotAddress("b", "10.0.0.2", "gpu:H200")
KERNEL_RESULT = {
    "state": "measured",
    "kernels": [{"finished": True, "pairs": 40}, {"finished": False, "pairs": 0}],
    "seconds": 4.0,
    "failures": ["a kernel: planted"],
}


class TaskError(Exception):
    def __init__(self, cause: BaseException | None) -> None:
        super().__init__("first line\nlast line")
        self.cause = cause


class GoneError(Exception):
    pass


class Reference:
    """A reference of Ray to what an actor will return, or raise."""

    def __init__(self, result: Any) -> None:
        self.result = result


class Ray:
    """As much of Ray as the driver of a campaign uses."""

    exceptions = type("exceptions", (), {"RayTaskError": TaskError, "RayError": GoneError})

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def remote(self, **_: Any) -> Any:
        return lambda cls: cls

    def get(self, reference: Any) -> Any:
        if isinstance(reference.result, BaseException):
            raise reference.result
        return reference.result

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return references, []


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def driver(events: list[dict[str, Any]]) -> _Driver:
    driver_object = _Driver(Ray(), Campaign("s.sqlite", "triton", ()), lambda event, status: events.append(event))
    for slot in (PLACE, OTHER):
        driver_object.status.slots[slot] = SlotStatus(slot.label)
        driver_object._actors[slot] = f"actor of {slot.node}"
    return driver_object


def status_after(driver: _Driver, result: Any, slot: SlotAddress = PLACE) -> SlotStatus:
    driver._on_result(Reference(result), slot)
    return driver.status.slots[slot]


def test_a_slot_starts_and_counts_what_it_measured(driver: _Driver, events: list[dict[str, Any]]) -> None:
    status = status_after(driver, {"machine": "triton H200", "run": 1})
    assert (status.machine, status.state, status.pairs_per_s) == ("triton H200", "measuring", 0.0)
    driver._idle.add(OTHER)
    status_after(driver, KERNEL_RESULT)
    assert status_after(driver, KERNEL_RESULT).as_dict() == {
        "place": "10.0.0.1 gpu:H200", "machine": "triton H200", "state": "measured", "kernels": 2, "pairs": 80,
        "failures": 2, "restarts": 0, "seconds": 8.0, "pairs_per_s": 10.0,
    }  # fmt: skip
    assert not driver._idle, "an unfinished kernel may be anybody's next"
    assert [event["event"] for event in events] == ["started", "measured", "measured"]
    status_after(driver, KERNEL_RESULT, OTHER)
    summary = driver.status.as_dict()
    assert (summary["kernels"], summary["pairs"], summary["finished"]) == (3, 120, False)
    assert summary["failures"] == ["a kernel: planted"] * 3 and len(summary["slots"]) == 2


def test_only_the_last_twenty_failures_are_kept(driver: _Driver) -> None:
    for at in range(25):
        status_after(driver, {**KERNEL_RESULT, "failures": [f"{at}"]})
    assert driver.status.failures == [str(at) for at in range(5, 25)]


def test_a_slot_without_work_asks_later_and_one_that_waits_for_its_device_at_once(
    driver: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 50.0)
    status_after(driver, {"state": "busy"})
    assert driver._idle_until[PLACE] == 50.0 and not driver._idle
    status_after(driver, {"state": "waiting"})
    assert driver._idle_until[PLACE] == 51.0 and not driver._idle
    status_after(driver, {"state": "done"})
    assert driver._idle_until[PLACE] == 51.0 and driver._idle == {PLACE}


def test_a_lost_actor_is_killed_and_its_slot_may_start_again(driver: _Driver, events: list[dict[str, Any]]) -> None:
    driver._in_progress = {"one": PLACE, "two": OTHER}
    status = status_after(driver, GoneError())
    assert (status.state, status.restarts) == ("lost", 1) and driver.ray.killed == ["actor of a"]
    assert driver._in_progress == {"two": OTHER} and PLACE not in driver._actors
    assert events[-1] == {"event": "lost", "slot": PLACE.label, "why": "GoneError: the worker is gone"}
    status_after(driver, TaskError(None), OTHER)
    assert events[-1]["why"] == "last line"
    status_after(driver, GoneError())
    assert driver.ray.killed == ["actor of a", "actor of b"] and driver.status.slots[PLACE].restarts == 2


def test_a_mistake_in_the_configuration_ends_the_campaign_unless_something_was_measured(driver: _Driver) -> None:
    mistake = TaskError(ConfigurationError("no such device"))
    with pytest.raises(ConfigurationError, match="no such device"):
        status_after(driver, mistake)
    status_after(driver, {"machine": "triton H200", "run": 1}, OTHER)
    assert status_after(driver, mistake, OTHER).state == "lost"


def test_the_end_keeps_what_was_in_progress_and_kills_every_actor(driver: _Driver) -> None:
    class Actor:
        class close:
            @staticmethod
            def remote() -> str:
                return "closing"

    one, two = Actor(), Actor()
    driver._actors = {PLACE: one, OTHER: two}
    driver._in_progress = {Reference(KERNEL_RESULT): PLACE, Reference(ValueError("odd")): OTHER}
    driver.stop()
    assert driver.status.kernels == 1 and driver.ray.killed == [one, two]
    assert driver.status.failures == ["a kernel: planted", "odd"]


def test_a_status_begins_with_nothing() -> None:
    empty = {"slots": [], "kernels": 0, "pairs": 0, "failures": [], "finished": False}
    assert CampaignStatus().as_dict() == empty
