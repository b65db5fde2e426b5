"""What is measured: a problem (a family and its sizes), a configuration of it, and a kernel (a problem in a program).

The idea: both are small frozen tables with one canonical text. That text is the identity everywhere: in the
store, in file names, when a collection is resumed, and when shapes are kept apart between splits.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Value = int | str
_FLAGS = ("causal", "axis", "threads")  # whole numbers that are not sizes


class _Table(Mapping[str, Value]):
    """A frozen, ordered table of named values; equal when its canonical text is."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(sorted(values.items()))

    @functools.cached_property
    def key(self) -> str:
        """The canonical text."""
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
        """The integer called `name`."""
        return int(self._values[name])

    def word(self, name: str) -> str:
        """The word called `name`."""
        return str(self._values[name])


class Config(_Table):
    """One way to run a kernel: block sizes, warps, stages and so on, all integers."""

    @classmethod
    def of(cls, **values: int) -> Config:
        return cls(values)

    @classmethod
    def parse(cls, key: str) -> Config:
        """The configuration whose canonical text is `key`."""
        return cls(json.loads(key))


class Problem(_Table):
    """A family and everything that fixes the computation: sizes, number type, layout, epilogue."""

    @classmethod
    def of(cls, family: str, **values: Value) -> Problem:
        return cls({"family": family, **values})

    @property
    def family(self) -> str:
        return self.word("family")

    @property
    def shape_key(self) -> str:
        """The family and the sizes alone; kernels that share it must not be in two splits."""
        sizes = [f"{name}={value}" for name, value in self.items() if isinstance(value, int) and name not in _FLAGS]
        return f"{self.family}:{','.join(sizes)}"

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that stand for the problem in file names."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kernel:
    """A problem and the program it was met in; called `<program>_<hash>`."""

    program: str
    problem: Problem = field(hash=True)

    @property
    def name(self) -> str:
        return f"{self.program}_{self.problem.digest}"
