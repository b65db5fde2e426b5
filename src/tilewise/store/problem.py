"""Problems (a family and its sizes), their configurations, and kernels (a problem in a program).

Problems and configurations are small frozen tables with a canonical text. This text is their identity everywhere: in
the store, in file names, when a collection is resumed, and when shapes are assigned to splits.

Users write problems in JSON: `[{"family": "matmul", "dtype": "bf16", "m": 512, "n": 512, "k": 64}, ...]`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise._files import read_json_input
from tilewise.errors import ConfigurationError, FileFormatError

Value = int | str
OWN_PROGRAM = "own"
_NOT_SIZES = ("causal", "axis", "threads")  # integers of a problem that are not sizes


class _FrozenTable(Mapping[str, Value]):
    """An immutable mapping from names to values; equality and hash are those of its canonical JSON."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(sorted(values.items()))

    @functools.cached_property
    def key(self) -> str:
        """Canonical JSON text, with sorted names."""
        return json.dumps(self._values, separators=(",", ":"))

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.key == other.key

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.items())})"

    def size(self, name: str) -> int:
        """Return the value of `name`; raise unless it is an integer."""
        return int(self._values[name])

    def word(self, name: str) -> str:
        """Return the value of `name`; raise unless it is a string."""
        return str(self._values[name])


class Config(_FrozenTable):
    """A configuration of a kernel: block sizes, warps, stages and so on, all integers."""

    @classmethod
    def of(cls, **values: int) -> Config:
        return cls(values)

    @classmethod
    def parse(cls, key: str) -> Config:
        """Parse the canonical JSON of a configuration."""
        return cls(json.loads(key))


class Problem(_FrozenTable):
    """Computation of a kernel: its family and everything that determines it (sizes, dtype, layout, epilogue)."""

    @classmethod
    def of(cls, family: str, **values: Value) -> Problem:
        return cls({"family": family, **values})

    @property
    def family(self) -> str:
        return self.word("family")

    @property
    def threads(self) -> int:
        """Number of threads; 1 if the problem has none."""
        return int(self._values.get("threads", 1))

    @property
    def shape_key(self) -> str:
        """Family and sizes only; kernels with equal shape keys must be in the same split."""
        sizes = [f"{name}={value}" for name, value in self.items() if isinstance(value, int) and name not in _NOT_SIZES]
        return f"{self.family}:{','.join(sizes)}"

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of a hash, which identify the problem in file names."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kernel:
    """A problem and the program it occurs in, named `<program>_<hash>`."""

    program: str
    problem: Problem = field(hash=True)

    @property
    def name(self) -> str:
        return f"{self.program}_{self.problem.digest}"


def read_spec(
    family: str, spec: Mapping[str, Value], sizes: Sequence[str], choices: Mapping[str, Sequence[Value]]
) -> Problem:
    """Check a user's JSON object and return it as a `Problem` of a family.

    `sizes` are names of positive integers; each of `choices` has a list of permitted values, the first by default.
    """
    names = {"family", "program", *sizes, *choices}
    unknown = sorted(set(spec) - names)
    if unknown:
        raise ConfigurationError(f"A {family} problem has no {unknown[0]!r}; it takes {', '.join(sorted(names))}.")
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
    """Read the kernels that a JSON file lists; each may name its `program`, which determines the split."""
    file = Path(path).expanduser()
    return shapes_from(read_json_input(file), str(file), problem_of)


def shapes_from(content: Any, where: str, problem_of: Callable[[str, Mapping[str, Value]], Problem]) -> list[Kernel]:
    """Convert JSON objects to kernels without repeats by `problem_of(family, sizes)`; errors begin with `where`."""
    if not isinstance(content, list) or not content:
        raise FileFormatError(f'{where} must contain a list such as [{{"family": "matmul", "m": 512, ...}}].')
    kernels: dict[str, Kernel] = {}
    for number, item in enumerate(content, start=1):
        kernel = _parse_kernel(item, number, where, problem_of)
        kernels.setdefault(kernel.problem.key, kernel)
    return list(kernels.values())


def _parse_kernel(
    item: Any, number: int, path: str, problem_of: Callable[[str, Mapping[str, Value]], Problem]
) -> Kernel:
    """Convert entry `number` of a list of JSON objects to a kernel; raise, naming `path`, if it is invalid."""
    if not isinstance(item, dict) or not isinstance(item.get("family"), str):
        raise FileFormatError(f'{path}: item {number} must be an object with a "family".')
    program = item.get("program", OWN_PROGRAM)
    if not isinstance(program, str) or not program.replace("_", "").isalnum():
        raise FileFormatError(f"{path}: the program of item {number} must be letters, digits and underscores.")
    try:
        return Kernel(program, problem_of(item["family"], item))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: item {number}: {error}") from error


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement; only measurements with equal `identity` (GPU name, CPU model) are combined."""

    kind: str  # "triton" or "cpu"
    identity: str
    details: Mapping[str, Any]

    @property
    def partition(self) -> str:
        """Name of the part of a shared store with the measurements of this kind of machine."""
        return f"{self.kind} {self.identity}"
