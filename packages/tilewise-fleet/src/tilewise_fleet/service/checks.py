"""What strangers may say: devices, problems, configurations and runtimes, each looked at before it is believed.

Names become rows of a database and keys of tables, so they are of a few letters only; numbers are whole and exact; a
runtime that no machine could have is refused, since one lie would become everybody's choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.errors import Rejected
from tilewise.store.problem import Config, Problem
from tilewise.store.store import Machine

MOST_PROBLEMS, MOST_CONFIGS, MOST_TIMINGS, MOST_FIELDS = 64, 5000, 1000, 32
KINDS = ("cpu", "triton")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_.=+-]{0,99}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_.:+=-]{1,120}", re.ASCII)
_UID = re.compile(r"[A-Za-z0-9_/.-]{8,80}", re.ASCII)
_LARGEST = 1 << 53
_LEAST_NS, _MOST_NS = 10.0, 3.6e12  # an hour
_MOST_RATIO = 1e4  # of a configuration over the default
_MOST_FLOPS = 2e16  # a second; no single device comes near it


def device_of(given: Any) -> tuple[Machine, Mapping[str, Any]]:
    """Who asks or measured, and what it says of itself."""
    facts = _object(given, "device")
    kind, identity = facts.get("kind"), facts.get("identity")
    if kind not in KINDS:
        raise Rejected("schema", f"device.kind is one of {', '.join(KINDS)}")
    if not isinstance(identity, str) or not 0 < len(identity) <= 120 or not identity.isprintable():
        raise Rejected("schema", "device.identity is the machine's name, a text of at most 120 printable characters")
    details = facts.get("details", {})
    known = {name: value for name, value in _object(details, "device.details").items() if _is_detail(name, value)}
    if len(known) != len(details):
        raise Rejected("schema", "device.details holds at most 64 short texts and numbers")
    return Machine(str(kind), identity, {"name": identity, **known}), facts


def features_of(facts: Mapping[str, Any]) -> dict[str, int]:
    """The machine's columns for the model, where it sends them."""
    given = _object(facts.get("features", {}), "device.features")
    if len(given) > MOST_FIELDS or not all(_is_whole(value) and _NAME.fullmatch(name) for name, value in given.items()):
        raise Rejected("schema", "device.features is a table of whole numbers")
    return {name: int(value) for name, value in given.items()}


def problem_of(given: Any) -> Problem:
    values = _object(given, "a problem")
    if not isinstance(values.get("family"), str):
        raise Rejected("schema", 'a problem is an object with a "family"')
    if len(values) > MOST_FIELDS:
        raise Rejected("schema", f"a problem has at most {MOST_FIELDS} values")
    for name, value in values.items():
        word = isinstance(value, str) and _WORD.fullmatch(value)
        if not _NAME.fullmatch(name) or not (word or _is_whole(value)):
            raise Rejected("schema", f"a problem holds whole numbers and short words; {name[:40]!r} is neither")
    return Problem(values)


def configs_of(given: Any) -> tuple[Config, ...]:
    if not isinstance(given, list) or not 0 < len(given) <= MOST_CONFIGS:
        raise Rejected("schema", f"configs is a list of one to {MOST_CONFIGS:,} configurations, the default first")
    return tuple(config_of(item) for item in given)


def config_of(given: Any) -> Config:
    values = _object(given, "a configuration")
    if not 0 < len(values) <= MOST_FIELDS:
        raise Rejected("schema", f"a configuration has one to {MOST_FIELDS} settings")
    for name, value in values.items():
        if not _SETTING.fullmatch(name) or not _is_whole(value):
            raise Rejected("schema", f"a configuration's settings are whole numbers; {name[:40]!r} is not one")
    return Config(values)


def uid_of(given: Any) -> str:
    if not isinstance(given, str) or not _UID.fullmatch(given):
        raise Rejected("schema", "uid names a batch for good: 8 to 80 letters and digits, chosen by whoever measured")
    return given


def runtime_of(given: Any, problem: Problem, what: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise Rejected("runtime", f"{what} is a number of nanoseconds")
    if not _LEAST_NS <= given <= _MOST_NS:
        raise Rejected("runtime", f"{what} of {given:g} ns is no runtime of a kernel: {_LEAST_NS:g} ns to an hour are")
    work = _operations(problem)
    if work / (given * 1e-9) > _MOST_FLOPS:
        raise Rejected(
            "runtime", f"{what} of {given:g} ns would be {work / given / 1e3:.3g} TFLOP/s, faster than any device"
        )
    return float(given)


def ratio_checked(runtime_ns: float, default_ns: float) -> None:
    if not 1 / _MOST_RATIO < runtime_ns / default_ns < _MOST_RATIO:
        raise Rejected("runtime", f"a runtime {runtime_ns / default_ns:.3g} times the default's is not believed")


def items_of(given: Any, name: str, most: int) -> Sequence[Any]:
    if not isinstance(given, list) or not 0 < len(given) <= most:
        raise Rejected("schema", f"{name} is a list of one to {most}")
    return given


def _operations(problem: Problem) -> float:
    """Multiplications and additions of a product; 0 where the sizes do not say."""
    if not all(isinstance(problem.get(name), int) for name in ("m", "n", "k")):
        return 0.0
    batch = problem.get("batch", 1)
    return 2.0 * problem.size("m") * problem.size("n") * problem.size("k") * (batch if isinstance(batch, int) else 1)


def _object(given: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise Rejected("schema", f"{name} is an object")
    return given


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _is_detail(name: str, value: Any) -> bool:
    short = isinstance(value, str) and len(value) <= 200 and value.isprintable()
    return bool(_NAME.fullmatch(name)) and (short or isinstance(value, bool) or _is_whole(value))
