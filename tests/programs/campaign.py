"""Checks many programs of a seed and collects the failures, each minimised."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from tests.programs.draw import draw
from tests.programs.minimise import minimise
from tests.programs.oracles import failure_of
from tests.programs.program import Program

_STRIDE = 1_000_000  # more programs than anybody runs of one seed


@dataclass(frozen=True)
class Failure:
    program: Program  # minimised
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}\n{self.program.to_json()}"


def seed_of_today() -> int:
    """The date as a number, such as 20260131, or what TILEWISE_PROGRAM_SEED says."""
    return int(os.environ.get("TILEWISE_PROGRAM_SEED") or datetime.now(UTC).strftime("%Y%m%d"))


def check_drawn(seed: int, numbers: Iterable[int], most_failures: int = 3) -> list[Failure]:
    """Check the programs of a seed with these numbers; stops after `most_failures`."""
    failures: list[Failure] = []
    for number in numbers:
        program = draw(seed * _STRIDE + number)
        mismatch = failure_of(program)
        if mismatch is not None:
            small = minimise(program)
            failures.append(Failure(small, str(failure_of(small) or mismatch)))
            if len(failures) >= most_failures:
                break
    return failures
