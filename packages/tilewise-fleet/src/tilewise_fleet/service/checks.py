"""Validation of requests: devices, problems, configurations and runtimes.

Names become database rows and dictionary keys, so they are short and in a restricted alphabet. Integers must be exact
in JSON. A runtime that no device could reach is rejected, because it would be served to everybody as the best choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.errors import Rejected
from tilewise.store.problem import Config, Machine, Problem

# Limits per request; arbitrary, well above what tilewise itself sends.
MAX_PROBLEMS, MAX_CONFIGS, MAX_TIMINGS, MAX_FIELDS = 64, 5000, 1000, 32
KINDS = ("cpu", "triton")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_.=+-]{0,99}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_.:+=-]{1,120}", re.ASCII)
_UID = re.compile(r"[A-Za-z0-9_/.-]{8,80}", re.ASCII)
_MAX_INTEGER = 1 << 53  # larger integers are not exact in the doubles of JSON
_MIN_NS, _MAX_NS = 10.0, 3.6e12  # a few clock cycles, one hour
_MAX_RATIO = 1e4  # of a configuration's runtime to the default's, or the inverse; arbitrary
_MAX_FLOPS = 2e16  # per second, about ten times the peak of an H200 with FP8


def parse_device(content: Any) -> tuple[Machine, Mapping[str, Any]]:
    """Parse the `device` of a request; return the machine, and the JSON object for optional fields."""
    facts = _checked_object(content, "device")
    kind, identity = facts.get("kind"), facts.get("identity")
    if kind not in KINDS:
        raise Rejected("schema", f"device.kind is one of {', '.join(KINDS)}")
    if not isinstance(identity, str) or not 0 < len(identity) <= 120 or not identity.isprintable():
        raise Rejected("schema", "device.identity is the machine's name, a text of at most 120 printable characters")
    details = facts.get("details", {})
    valid = {
        name: value for name, value in _checked_object(details, "device.details").items() if _is_detail(name, value)
    }
    if len(valid) != len(details):
        raise Rejected("schema", "device.details must have at most 64 short strings and numbers")
    return Machine(str(kind), identity, {"name": identity, **valid}), facts


def parse_features(facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the machine's feature columns in a device's JSON object; {} if it has none."""
    features = _checked_object(facts.get("features", {}), "device.features")
    valid = all(_is_integer(value) and _NAME.fullmatch(name) for name, value in features.items())
    if len(features) > MAX_FIELDS or not valid:
        raise Rejected("schema", "device.features must be a table of whole numbers")
    return {name: int(value) for name, value in features.items()}


def parse_problem(content: Any) -> Problem:
    """Parse a problem from JSON: its family, and sizes and short words by name."""
    values = _checked_object(content, "a problem")
    if not isinstance(values.get("family"), str):
        raise Rejected("schema", 'a problem is an object with a "family"')
    if len(values) > MAX_FIELDS:
        raise Rejected("schema", f"a problem has at most {MAX_FIELDS} values")
    for name, value in values.items():
        word = isinstance(value, str) and _WORD.fullmatch(value)
        if not _NAME.fullmatch(name) or not (word or _is_integer(value)):
            raise Rejected(
                "schema", f"the values of a problem must be whole numbers or short words; {name[:40]!r} is neither"
            )
    return Problem(values)


def parse_configs(content: Any) -> tuple[Config, ...]:
    """Parse a non-empty list of configurations."""
    if not isinstance(content, list) or not 0 < len(content) <= MAX_CONFIGS:
        raise Rejected("schema", f"configs is a list of one to {MAX_CONFIGS:,} configurations, the default first")
    return tuple(parse_config(item) for item in content)


def parse_config(content: Any) -> Config:
    """Parse a configuration: an object of integers."""
    values = _checked_object(content, "a configuration")
    if not 0 < len(values) <= MAX_FIELDS:
        raise Rejected("schema", f"a configuration has one to {MAX_FIELDS} settings")
    for name, value in values.items():
        if not _SETTING.fullmatch(name) or not _is_integer(value):
            raise Rejected("schema", f"a configuration's settings are whole numbers; {name[:40]!r} is not one")
    return Config(values)


def parse_uid(content: Any) -> str:
    """Parse a batch's unique name, chosen by its sender."""
    if not isinstance(content, str) or not _UID.fullmatch(content):
        raise Rejected("schema", "uid is the unique name of a batch: 8 to 80 letters and digits, chosen by the sender")
    return content


def parse_runtime(content: Any, problem: Problem, name: str) -> float:
    """Parse a runtime in ns, the field `name`; reject one that is too short for the problem's work."""
    if isinstance(content, bool) or not isinstance(content, int | float) or not math.isfinite(content):
        raise Rejected("runtime", f"{name} is a number of nanoseconds")
    if not _MIN_NS <= content <= _MAX_NS:
        raise Rejected("runtime", f"{name} of {content:g} ns is outside the range of {_MIN_NS:g} ns to one hour")
    work = _operations(problem)
    if work / (content * 1e-9) > _MAX_FLOPS:
        raise Rejected(
            "runtime", f"{name} of {content:g} ns would be {work / content / 1e3:.3g} TFLOP/s, faster than any device"
        )
    return float(content)


def check_ratio(runtime_ns: float, default_ns: float) -> None:
    """Reject a runtime whose ratio to the default configuration's is implausible."""
    if not 1 / _MAX_RATIO < runtime_ns / default_ns < _MAX_RATIO:
        raise Rejected("runtime", f"a runtime {runtime_ns / default_ns:.3g} times the default's is implausible")


def parse_list(content: Any, name: str, limit: int) -> Sequence[Any]:
    """Return `content` if it is a list of 1 to `limit` items; otherwise reject the request, naming the field."""
    if not isinstance(content, list) or not 0 < len(content) <= limit:
        raise Rejected("schema", f"{name} is a list of one to {limit}")
    return content


def _operations(problem: Problem) -> float:
    """Return the multiplications and additions of a matrix product; 0 for a problem without sizes m, n and k."""
    if not all(isinstance(problem.get(name), int) for name in ("m", "n", "k")):
        return 0.0
    batch = problem.get("batch", 1)
    return 2.0 * problem.size("m") * problem.size("n") * problem.size("k") * (batch if isinstance(batch, int) else 1)


def _checked_object(content: Any, name: str) -> Mapping[str, Any]:
    """Return `content` if it is a JSON object; otherwise reject the request, naming the field."""
    if not isinstance(content, dict):
        raise Rejected("schema", f"{name} is an object")
    return content


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < _MAX_INTEGER


def _is_detail(name: str, value: Any) -> bool:
    short = isinstance(value, str) and len(value) <= 200 and value.isprintable()
    return bool(_NAME.fullmatch(name)) and (short or isinstance(value, bool) or _is_integer(value))
