"""Measurements as a table: a row for each configuration of each kernel, for pandas, Polars or plain Python."""

from __future__ import annotations

import importlib
import os
from typing import Any

from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.store.aggregate import open_measurements, read_measured

LIBRARIES = ("dict", "pandas", "polars")


def frame(path: str | os.PathLike[str], library: str = "pandas") -> Any:
    """The finished kernels of a store: columns of the problem, of the configuration (``config_...``), and times.

    `library` is pandas or polars, which tilewise does not install, or dict for plain lists by column.

    >>> frame("mine.sqlite").groupby("program")["speedup"].max()  # doctest: +SKIP
    """
    if library not in LIBRARIES:
        raise ConfigurationError(f"There is no library {library!r} for frames; use {', '.join(LIBRARIES)}.")
    columns = _columns(path)
    if library == "dict":
        return columns
    try:
        return importlib.import_module(library).DataFrame(columns)
    except ImportError:
        raise UnavailableError(f"{library} is not installed: pip install {library}, or ask for a dict.") from None


def _columns(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    rows = []
    with open_measurements(path) as store:
        for measured in read_measured(store):
            problem = dict(measured.kernel.problem)
            for timing in measured.timings:
                rows.append(
                    {"program": measured.kernel.program, **problem}
                    | {f"config_{name}": value for name, value in timing.config.items()}
                    | {"runtime_ns": timing.runtime_ns, "default_ns": measured.default_ns}
                    | {
                        "speedup": measured.default_ns / timing.runtime_ns,
                        "is_default": timing.config == measured.default,
                    }
                    | {"deviation": timing.deviation, "repeats": timing.repeats}
                )
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
