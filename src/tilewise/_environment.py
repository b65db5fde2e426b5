"""Parse ``TILEWISE_MACHINE``, which emulates another machine's caches and cores.

``TILEWISE_MACHINE="l1=48K,l2=2M,l3=300M,cores=16"``, or any subset of it, replaces what the system reports: default
tiles, tile spaces and thread counts follow. ``l3=0`` emulates a machine that reports no L3.
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
# Accepted values in bytes (cores: a count), wider than those of any CPU.
_RANGES = {
    "l1": (8 << 10, 1 << 20),
    "l2": (64 << 10, 64 << 20),
    "l3": (1 << 20, 4 << 30),
    "cores": (1, 256),
}
_EXAMPLE = "l1=48K,l2=2M,l3=300M,cores=16"


@dataclass(frozen=True)
class MachineOverride:
    """Emulated cache sizes in bytes and core count; None where the real value applies, `l3=0` for no L3."""

    l1: int | None = None
    l2: int | None = None
    l3: int | None = None
    cores: int | None = None


def parse_machine(text: str) -> MachineOverride:
    """Parse a value of ``TILEWISE_MACHINE``; ConfigurationError if it is invalid."""
    values: dict[str, int] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, value = (side.strip() for side in item.partition("="))
        if name not in _RANGES or name in values:
            raise ConfigurationError(
                f"TILEWISE_MACHINE: '{item}' is invalid; give l1, l2, l3 and cores at most once each, as in {_EXAMPLE}"
            )
        values[name] = _parse_value(name, value)
    if values.get("l1", 0) > values.get("l2", 1 << 62):
        raise ConfigurationError("TILEWISE_MACHINE: l1 is larger than l2; give an l1 that is at most l2")
    return MachineOverride(**values)


def _parse_value(name: str, value: str) -> int:
    """Parse a size such as 48K, or a number of cores, and check its range."""
    units = "" if name == "cores" else "KMG"
    match = re.fullmatch(rf"([0-9]{{1,12}})([{units}]?)" if units else r"([0-9]{1,12})()", value.upper())
    lowest, highest = _RANGES[name]
    number = int(match[1]) * _UNITS[match[2]] if match else -1
    if lowest <= number <= highest or (name == "l3" and number == 0):
        return number
    bounds = f"{_format_value(lowest, name)} to {_format_value(highest, name)}"
    if name == "l3":
        bounds += ", or 0 for an L3 that is not reported"
    raise ConfigurationError(f"TILEWISE_MACHINE: {name} must be {bounds}, not '{value}'")


def _format_value(number: int, name: str) -> str:
    unit = max((u for u in _UNITS if number >= _UNITS[u]), key=lambda u: _UNITS[u]) if name != "cores" else ""
    return f"{number // _UNITS[unit]}{unit}"


def machine_override() -> MachineOverride:
    """Parse the current value of ``TILEWISE_MACHINE``."""
    return parse_machine(os.environ.get("TILEWISE_MACHINE", ""))


def abort_import(error: Exception) -> NoReturn:
    """Stop the import of tilewise. An uncaught error prints its sentence without a traceback and exits with code 2."""
    sys.excepthook = _print_sentence
    raise error from None


def _print_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a `ConfigurationError` as one sentence and exit with 2; leave other exceptions to Python's own hook."""
    if not isinstance(error, ConfigurationError):
        return sys.__excepthook__(kind, error, trace)
    print(f"tilewise: {error}", file=sys.stderr)
    sys.exit(2)
