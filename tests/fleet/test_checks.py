"""Requests to the service at their limits: the largest value that is taken, and the smallest that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewise.errors import Rejected
from tilewise.store.problem import Problem
from tilewise_fleet.service import checks

GPU = {"kind": "triton", "identity": "NVIDIA H200"}
SQUARE = Problem({"family": "matmul", "m": 1000, "n": 1000, "k": 1000})  # 2e9 operations: 100 ns at 2e16 a second


def device(**more: Any) -> Any:
    return checks.parse_device({**GPU, **more})


def numbered(count: int) -> dict[str, int]:
    return {f"n{at}": at for at in range(count)}


VALID: list[Callable[[], Any]] = [
    lambda: device(identity="x" * 120),
    lambda: device(details={"torch": "2.9", "driver": 580, "mig": False, "note": "x" * 200}),
    lambda: device(details={"cores": 2**53 - 1}),
    lambda: checks.parse_features({"features": numbered(32)}),
    lambda: checks.parse_problem({"family": "f", **numbered(31)}),
    lambda: checks.parse_problem({"family": "f", "dtype": "x" * 120, "m": -(2**53) + 1}),
    lambda: checks.parse_config(numbered(32)),
    lambda: checks.parse_configs([{"a": 1}] * 5000),
    lambda: checks.parse_uid("12345678"),
    lambda: checks.parse_uid("x" * 80),
    lambda: checks.parse_runtime(10, Problem({"family": "f"}), "t"),
    lambda: checks.parse_runtime(3.6e12, Problem({"family": "f"}), "t"),
    lambda: checks.parse_runtime(100.1, SQUARE, "t"),
    lambda: checks.check_ratio(9.9e3, 1.0),
    lambda: checks.check_ratio(1.01e-4, 1.0),
    lambda: checks.parse_list([1] * 64, "problems", 64),
    lambda: checks.parse_list([1], "problems", 64),
]
INVALID: list[tuple[Callable[[], Any], str]] = [
    (lambda: device(kind="tpu"), "device.kind is one of cpu, triton"),
    (lambda: device(kind=None), "device.kind"),
    (lambda: device(identity=""), "device.identity"),
    (lambda: device(identity="x" * 121), "device.identity"),
    (lambda: device(identity="a\nb"), "device.identity"),
    (lambda: device(identity=7), "device.identity"),
    (lambda: device(details=[]), "device.details is an object"),
    (lambda: device(details={"note": "x" * 201}), "short strings and numbers"),
    (lambda: device(details={"note": "a\nb"}), "short strings and numbers"),
    (lambda: device(details={"a b": 1}), "short strings and numbers"),
    (lambda: device(details={"cores": 2**53}), "short strings and numbers"),
    (lambda: device(details={"ghz": 2.5}), "short strings and numbers"),
    (lambda: checks.parse_device([]), "device is an object"),
    (lambda: checks.parse_features({"features": numbered(33)}), "table of whole numbers"),
    (lambda: checks.parse_features({"features": {"a": 1.5}}), "table of whole numbers"),
    (lambda: checks.parse_features({"features": {"a": True}}), "table of whole numbers"),
    (lambda: checks.parse_features({"features": {"a b": 1}}), "table of whole numbers"),
    (lambda: checks.parse_problem({"m": 1}), "with a"),
    (lambda: checks.parse_problem({"family": "f", **numbered(32)}), "at most 32 values"),
    (lambda: checks.parse_problem({"family": "f", "dtype": "x" * 121}), "neither"),
    (lambda: checks.parse_problem({"family": "f", "m": 2**53}), "neither"),
    (lambda: checks.parse_problem({"family": "f", "1m": 1}), "neither"),
    (lambda: checks.parse_config({}), "one to 32 settings"),
    (lambda: checks.parse_config(numbered(33)), "one to 32 settings"),
    (lambda: checks.parse_config({"a": "b"}), "whole numbers"),
    (lambda: checks.parse_configs([]), "one to 5,000"),
    (lambda: checks.parse_configs([{"a": 1}] * 5001), "one to 5,000"),
    (lambda: checks.parse_uid("1234567"), "8 to 80"),
    (lambda: checks.parse_uid("x" * 81), "8 to 80"),
    (lambda: checks.parse_uid(12345678), "8 to 80"),
    (lambda: checks.parse_runtime(9.99, Problem({"family": "f"}), "t"), "outside the range"),
    (lambda: checks.parse_runtime(3.7e12, Problem({"family": "f"}), "t"), "outside the range"),
    (lambda: checks.parse_runtime(True, Problem({"family": "f"}), "t"), "number of nanoseconds"),
    (lambda: checks.parse_runtime("9", Problem({"family": "f"}), "t"), "number of nanoseconds"),
    (lambda: checks.parse_runtime(float("nan"), Problem({"family": "f"}), "t"), "number of nanoseconds"),
    (lambda: checks.parse_runtime(99.0, SQUARE, "t"), "2.02e\\+04 TFLOP/s, faster than any device"),
    (lambda: checks.parse_runtime(190.0, Problem({**SQUARE, "batch": 2}), "t"), "faster than any device"),
    (lambda: checks.check_ratio(1.01e4, 1.0), "times the default's"),
    (lambda: checks.check_ratio(9.9e-5, 1.0), "times the default's"),
    (lambda: checks.parse_list([], "problems", 64), "a list of one to 64"),
    (lambda: checks.parse_list([1] * 65, "problems", 64), "a list of one to 64"),
    (lambda: checks.parse_list({}, "problems", 64), "a list of one to 64"),
]


@pytest.mark.parametrize("parse", VALID)
def test_the_largest_values_are_taken(parse: Callable[[], Any]) -> None:
    parse()


@pytest.mark.parametrize(("parse", "sentence"), INVALID)
def test_what_is_beyond_a_limit_is_refused_with_a_sentence(parse: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(Rejected, match=sentence):
        parse()


def test_a_device_is_stored_with_its_name_and_details() -> None:
    machine, facts = device(details={"torch": "2.9"}, features={"machine_l2": 7})
    assert (machine.kind, machine.identity) == ("triton", "NVIDIA H200")
    assert dict(machine.details) == {"name": "NVIDIA H200", "torch": "2.9"}
    assert checks.parse_features(facts) == {"machine_l2": 7} and checks.parse_features({}) == {}
    assert checks.parse_runtime(2000, SQUARE, "t") == 2000.0


def test_the_document_states_the_limits_that_are_checked() -> None:
    from tilewise_fleet.service import models

    choose, batches = models.ChooseRequest.model_json_schema(), models.Measurements.model_json_schema()
    problems, configs = (choose["properties"][name]["anyOf"][0] for name in ("problems", "configs"))
    assert (problems["minItems"], problems["maxItems"]) == (1, checks.MAX_PROBLEMS)
    assert (configs["minItems"], configs["maxItems"]) == (1, checks.MAX_CONFIGS)
    device, batch = choose["$defs"]["MachineIdentity"], batches["$defs"]["Batch"]
    assert device["properties"]["kind"]["enum"] == list(checks.KINDS)
    assert device["properties"]["shared_bytes"]["minimum"] == 1
    assert device["properties"]["features"]["additionalProperties"]["maximum"] == 2**53 - 1
    assert device["properties"]["features"]["additionalProperties"]["minimum"] == 1 - 2**53
    timings, sent = batch["properties"]["timings"], batches["properties"]["batches"]
    assert (timings["minItems"], timings["maxItems"]) == (1, checks.MAX_TIMINGS)
    assert (sent["minItems"], sent["maxItems"]) == (1, checks.MAX_PROBLEMS)
    assert not device["additionalProperties"] and not choose["additionalProperties"]
