"""The ladder explains a rung that is slower here, and draws what it measured."""

from __future__ import annotations

import json

from tilewise.backend.ladder import RUNGS
from tilewise.cli.ladder import _SLOWER_REASONS, slower_rungs


def test_a_slower_rung_is_explained_and_a_faster_one_is_not():
    rates = [(rung, 2.0**place) for place, rung in enumerate(RUNGS)]
    assert slower_rungs(rates) == []
    (sentence,) = slower_rungs([*rates[:3], (RUNGS[3], 1.0), *rates[4:]])
    assert sentence.startswith("“blocked” is slower than the rung before it here: ")
    assert {rung.name for rung in RUNGS[1:]} == set(_SLOWER_REASONS)


def test_the_ladder_draws_a_picture_and_prints_json(typed, tmp_path):
    words = ["ladder", "--size", "32", "--python-size", "16", "--seconds", "0.01", "--out", "rungs.svg"]
    code, out, _ = typed(words)
    assert code == 0
    assert "Picture in rungs.svg" in out
    assert (tmp_path / "rungs.svg").read_text().startswith("<?xml")
    code, out, _ = typed([*words, "--json"])
    assert code == 0
    assert set(json.loads(out)["gflops"]) >= {"python", "numpy"}
