"""Pre-reading of decision logs: a decision needs measured numbers, a reason and a trade-off.

The checks are simple on purpose: they find what is missing, so that a teacher reads complete logs only.
"""

from __future__ import annotations

import re
from typing import Any

from tilewise.learn.labs.questions import LIMITS, QUESTIONS

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
_TRADE_WORDS = (
    "but",
    "cost",
    "price",
    "instead",
    "lose",
    "loses",
    "loss",
    "less",
    "slower",
    "larger",
    "worse",
    "while",
)
_MIN_WORDS = 5  # fewer are no sentence


def read_decision(record: dict[str, Any]) -> list[str]:
    """Return what is missing in the last decision of a record, as sentences; empty if nothing is."""
    decisions = [entry for entry in record["entries"] if entry["kind"] == "decision"]
    if not decisions:
        return ["there is no decision log: lab.decide(numbers=..., why=..., trade_off=...)"]
    last, remarks = decisions[-1], []
    if not _names_a_measurement(last["numbers"], record):
        remarks.append("the numbers name no measurement of this lab: quote at least one with two digits")
    if len(last["why"].split()) < _MIN_WORDS:
        remarks.append("the reason is too short: say in a sentence what limits the time")
    elif any(q.work for q in QUESTIONS[record["lesson"]]) and not any(word in last["why"].lower() for word in LIMITS):
        remarks.append(f"the reason names no limit ({', '.join(LIMITS)})")
    if not any(word in last["trade_off"].lower().split() for word in _TRADE_WORDS):
        remarks.append("the trade-off says nothing that gets worse: what does the decision cost?")
    return remarks


def _names_a_measurement(text: str, record: dict[str, Any]) -> bool:
    """Return whether a number in the text is within 5 % of a measurement, in seconds, ms or µs, or as a factor."""
    quoted = [float(number) for number in _NUMBER.findall(text)]
    values_in_units = []
    for entry in record["entries"]:
        if entry["kind"] == "measurement":
            values = entry["value"] if isinstance(entry["value"], list) else [entry["value"]]
            values_in_units += [float(value) * unit for value in values for unit in (1.0, 1e3, 1e6)]
    return any(abs(q - m) <= 0.05 * m for q in quoted for m in values_in_units)
