"""A program: the input's shape and a list of operations, each of which reads earlier values.

Value 0 is the input, value i the result of operation i; the last one is the program's result. An operation names no
sizes that follow from its inputs, so that a program stays valid when operations are dropped or the input shrinks.
Weights come from the operation's own seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Op:
    """One operation: its kind (a key of `operations.KINDS`), the values it reads, and its settings."""

    kind: str
    inputs: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    shape: tuple[int, ...]  # of the input, batch first
    ops: tuple[Op, ...]
    seed: int = 0  # of the input's numbers, and of how the program is run (`oracles.Conditions`)

    def example(self) -> Array:
        """The input that all ways to run the program share."""
        return np.random.default_rng(self.seed).standard_normal(self.shape, dtype=np.float32)

    @property
    def mixes_batch(self) -> bool:
        """Whether an operation moves the batch axis or changes its size, so that images are not independent."""
        return any(_mixes_batch(op) for op in self.ops)

    def to_json(self) -> str:
        ops = [{"op": op.kind, "in": list(op.inputs), **op.settings} for op in self.ops]
        return json.dumps({"shape": list(self.shape), "seed": self.seed, "ops": ops})

    @classmethod
    def from_json(cls, line: str) -> Program:
        record = json.loads(line)
        return cls(tuple(record["shape"]), tuple(_op(dict(op)) for op in record["ops"]), record["seed"])


def _mixes_batch(op: Op) -> bool:
    if op.kind == "transpose":
        return bool(op.settings["axes"][0] != 0)
    return op.kind in ("merge", "split", "slice", "select", "mean", "concat") and op.settings.get("axis", 1) == 0


def _op(record: dict[str, Any]) -> Op:
    return Op(record.pop("op"), tuple(record.pop("in")), record)


def read_programs(path: Path) -> Iterator[Program]:
    """The programs of a file, one on every line."""
    return (Program.from_json(line) for line in path.read_text().splitlines() if line.strip())
