"""Honest entries pass: of two hundred drawn at random, none is refused, and none is near the floor of time by chance.

The slow part scores all of them, in slices; `make test-arena` does so on this machine and on pretended ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.honest import KINDS, draw_entry, scored
from tilewise_arena.sandbox import bubblewrap

COUNT, SLICE = 200, 20
CHEAP = (1, 2)  # recipes of the MLP, a second each


def test_every_kind_is_drawn_and_a_number_is_always_the_same_entry(tmp_path: Path) -> None:
    attempts = [draw_entry(number, tmp_path).what for number in range(40)]
    assert {what.split()[0] for what in attempts} == KINDS.keys() - {"plugin"}
    assert any("plugin" in what for what in attempts)
    assert draw_entry(7, tmp_path).what == attempts[7]


@pytest.mark.parametrize("number", CHEAP)
def test_an_honest_entry_is_scored(number: int) -> None:
    assert scored(number).rejection == ""


@pytest.mark.slow
@pytest.mark.skipif(bool(bubblewrap.unavailable_reason()), reason=bubblewrap.unavailable_reason())
@pytest.mark.parametrize("first", range(0, COUNT, SLICE))
def test_no_honest_entry_is_refused(first: int) -> None:
    outcomes = [scored(number) for number in range(first, first + SLICE)]
    print("", *outcomes, sep="\n")
    assert [str(outcome) for outcome in outcomes if outcome.rejection] == []
