"""Problems as users write them in JSON: `[{"family": "matmul", "dtype": "bf16", "m": 512, "n": 512, "k": 64}, ...]`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise._files import read_json_input
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.tune.problem import Kernel, Problem, Value

OWN_PROGRAM = "own"


def read_spec(
    family: str, spec: Mapping[str, Value], sizes: Sequence[str], choices: Mapping[str, Sequence[Value]]
) -> Problem:
    """Check a user's JSON object: positive sizes, and words out of `choices` (the first where one is left out)."""
    known = {"family", "program", *sizes, *choices}
    unknown = sorted(set(spec) - known)
    if unknown:
        raise ConfigurationError(f"A {family} problem has no {unknown[0]!r}; it takes {', '.join(sorted(known))}.")
    values: dict[str, Value] = {}
    for name in sizes:
        value = spec.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"A {family} problem needs {name}, a positive integer; it has {value!r}.")
        values[name] = value
    for name, allowed in choices.items():
        value = spec.get(name, allowed[0])
        if isinstance(value, bool) or value not in allowed:
            raise ConfigurationError(
                f"{name} of a {family} problem is one of {', '.join(map(str, allowed))}; not {value!r}."
            )
        values[name] = value
    return Problem.of(family, **values)


def read_shapes(
    path: str | os.PathLike[str], problem_of: Callable[[str, Mapping[str, Value]], Problem]
) -> list[Kernel]:
    """The kernels a JSON file lists; each may name its `program`, which decides the split, else it is "own"."""
    given = Path(path).expanduser()
    return shapes_from(read_json_input(given), str(given), problem_of)


def shapes_from(content: Any, where: str, problem_of: Callable[[str, Mapping[str, Value]], Problem]) -> list[Kernel]:
    """The kernels of a list of JSON objects, each once; `where` it came from is for the sentence if one is wrong."""
    if not isinstance(content, list) or not content:
        raise FileFormatError(f'{where} must hold a list such as [{{"family": "matmul", "m": 512, ...}}].')
    kernels: dict[str, Kernel] = {}
    for number, item in enumerate(content, start=1):
        kernel = _kernel(item, number, where, problem_of)
        kernels.setdefault(kernel.problem.key, kernel)
    return list(kernels.values())


def _kernel(item: Any, number: int, path: str, problem_of: Callable[[str, Mapping[str, Value]], Problem]) -> Kernel:
    if not isinstance(item, dict) or not isinstance(item.get("family"), str):
        raise FileFormatError(f'{path}: item {number} must be an object with a "family".')
    program = item.get("program", OWN_PROGRAM)
    if not isinstance(program, str) or not program.replace("_", "").isalnum():
        raise FileFormatError(f"{path}: the program of item {number} must be letters, digits and underscores.")
    try:
        return Kernel(program, problem_of(item["family"], item))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: item {number}: {error}") from error
