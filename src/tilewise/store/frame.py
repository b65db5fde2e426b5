"""Returns measurements as a data frame with a row per configuration of each kernel: pandas, Polars or plain lists."""

from __future__ import annotations

import importlib
import os
from typing import Any

from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.store.aggregate import open_measurements, read_measured

LIBRARIES = ("dict", "pandas", "polars")


def frame(path: str | os.PathLike[str], library: str = "pandas") -> Any:
    """Return the finished kernels of a store: columns of the problem, of the configuration (``config_...``), and times.

    `library` is "pandas" or "polars", which tilewise does not install, or "dict" for plain lists by column.

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
        raise UnavailableError(f"{library} is not installed: pip install {library}, or pass library='dict'.") from None


def _columns(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Return the columns by name; a row without a value has None."""
    rows: list[dict[str, Any]] = []
    with open_measurements(path) as store:
        for result in read_measured(store):
            for timing in result.timings:
                row: dict[str, Any] = {"program": result.kernel.program, **result.kernel.problem}
                row |= {f"config_{name}": value for name, value in timing.config.items()}
                row |= {"runtime_ns": timing.runtime_ns, "default_ns": result.default_ns}
                row["speedup"] = result.default_ns / timing.runtime_ns
                row["is_default"] = timing.config == result.default
                row |= {"deviation": timing.deviation, "repeats": timing.repeats}
                rows.append(row)
    # Families have different sizes and parameters, so rows have different columns.
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
