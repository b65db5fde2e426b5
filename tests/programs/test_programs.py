"""Random networks give the same result in every way that tilewise computes one: 2,000 of them, new ones every day."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.campaign import check_drawn, seed_of_today
from tests.programs.oracles import check
from tests.programs.program import Program, read_programs

COUNT, PARTS = 2000, 20
SEED = seed_of_today()
REGRESSIONS = [
    pytest.param(program, id=f"{path.stem}-{line}")
    for path in sorted(Path(__file__).with_name("regressions").glob("*.json"))
    for line, program in enumerate(read_programs(path), 1)
]


@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_programs_agree(part: int) -> None:
    failures = check_drawn(SEED, range(part, COUNT, PARTS))
    lines = "\n".join(map(str, failures))
    assert not failures, (
        f"TILEWISE_PROGRAM_SEED={SEED}; put these lines into tests/programs/regressions and fix their faults:\n{lines}"
    )


@pytest.mark.parametrize("program", REGRESSIONS)
def test_programs_that_failed_once_agree(program: Program) -> None:
    check(program)
