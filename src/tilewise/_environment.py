"""Environment variables that say which machine to be: ``TILEWISE_MACHINE`` is read here.

``TILEWISE_MACHINE="l1=48K,l2=2M,l3=300M,cores=16"``, or any part of it, replaces what the system reports, so that any
machine can play any other: defaults, tile spaces and thread counts follow. ``l3=0`` plays a machine that reports no L3.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from tilewise.errors import ConfigurationError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_RANGES = {
    "l1": (8 << 10, 1 << 20),
    "l2": (64 << 10, 64 << 20),
    "l3": (1 << 20, 4 << 30),
    "cores": (1, 256),
}
_EXAMPLE = "l1=48K,l2=2M,l3=300M,cores=16"


@dataclass(frozen=True)
class Pretended:
    """What ``TILEWISE_MACHINE`` says; None where it says nothing, and an `l3` of 0 for one that is not reported."""

    l1: int | None = None
    l2: int | None = None
    l3: int | None = None
    cores: int | None = None


def pretended_machine(words: str) -> Pretended:
    """Read a value of ``TILEWISE_MACHINE``; ConfigurationError where it means nothing."""
    said: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in words.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _RANGES or name in said:
            raise ConfigurationError(
                f"TILEWISE_MACHINE: '{part}' is not one of l1, l2, l3, cores, each once: {_EXAMPLE}"
            )
        said[name] = _read(name, value)
    if said.get("l1", 0) > said.get("l2", 1 << 62):
        raise ConfigurationError("TILEWISE_MACHINE: l1 is larger than l2, which no CPU has")
    return Pretended(**said)


def _read(name: str, value: str) -> int:
    found = (
        re.fullmatch(r"([0-9]{1,12})([KMG]?)", value.upper())
        if name != "cores"
        else re.fullmatch(r"([0-9]{1,12})()", value)
    )
    least, most = _RANGES[name]
    number = int(found[1]) * _UNITS[found[2]] if found else -1
    if least <= number <= most or (name == "l3" and number == 0):
        return number
    bounds = f"{_text(least, name)} to {_text(most, name)}" + (
        ", or 0 where it is not reported" if name == "l3" else ""
    )
    raise ConfigurationError(f"TILEWISE_MACHINE: {name} must be {bounds}, not '{value}'")


def _text(number: int, name: str) -> str:
    unit = max((u for u in _UNITS if number >= _UNITS[u]), key=lambda u: _UNITS[u]) if name != "cores" else ""
    return f"{number // _UNITS[unit]}{unit}"


def pretended() -> Pretended:
    """What the environment says now."""
    return pretended_machine(os.environ.get("TILEWISE_MACHINE", ""))


def refuse(error: Exception) -> NoReturn:
    """Stop the import of tilewise. Where nobody catches that, the user reads the sentence alone, and the code is 2."""
    sys.excepthook = _say
    raise error from None


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ConfigurationError):
        return sys.__excepthook__(kind, error, trace)
    print(f"tilewise: {error}", file=sys.stderr)
    sys.exit(2)
