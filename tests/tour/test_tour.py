"""The tour: every stop measures something, what is missing is said, and the report is one page that loads nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tilewise
from tilewise._extension import native
from tilewise.errors import UnavailableError
from tilewise.tour import Bars, Stop, Table, guide, take_tour, walks
from tilewise.tour.page import bars, page
from tilewise.tour.tuning import verdict
from tilewise.tour.walks import step_sentences


def _stop(_visit):
    return Stop("One", {"x": 1.5}, ["A <line>."], [Table(("a", "b"), [("r & s", "2")])], [Bars("T", "u", {"v": 3.0})])


def _missing(_visit):
    raise UnavailableError("it is not installed")


def test_a_stop_that_cannot_be_shown_is_said_and_the_tour_goes_on(tmp_path, monkeypatch):
    stops = [("one", "One", _stop), ("two", "Two", _missing), ("three", "Three", _stop)]
    monkeypatch.setattr(guide, "_stops", lambda: stops)
    calls = []
    done = take_tour(tmp_path / "out", show=lambda number, stop: calls.append((number, stop.title)))
    assert calls == [(1, "One"), (2, "Two"), (3, "One")]
    assert done.facts["two"] == {"skipped": "it is not installed"}
    assert json.loads((tmp_path / "out" / "tour.json").read_text())["one"] == {"x": 1.5}
    assert "Not shown: it is not installed" in done.report.read_text()


def test_the_page_escapes_what_it_shows_and_loads_nothing():
    text = page([_stop(None)], "today")
    assert "A &lt;line&gt;." in text
    assert "r &amp; s" in text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)|url\(|@import|<script""", text)


@pytest.mark.parametrize("values", [{}, {"a": 0.0}, {"a": 1e-9, "b": 1e9}, {"a": 1.0, "b": float("nan")}])
@pytest.mark.parametrize("log", [False, True])
def test_bars_are_drawn_for_odd_values(values, log):
    drawing = bars(Bars("t", "u", values, log))
    assert drawing.count("<i ") == len(values)
    assert all(0 <= float(share) <= 1 for share in re.findall('--share:([^"]+)', drawing))


def test_the_quick_tour_runs_whole_and_its_numbers_are_in_the_report(tmp_path):
    command = [sys.executable, "-m", "tilewise.cli.app", "tour", "--quick", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    report = Path(facts["report"]).read_text()
    skipped = {key for key, value in facts.items() if "skipped" in value}
    assert skipped == (set() if native is not None else {"tuning"})  # tiles belong to the compiled kernels
    for stop in ("cnn", "gpt"):
        for name, gain in facts[stop]["speedup"].items():
            assert f"<td>{name.replace('&', '&amp;')}</td>" in report
            assert f"{gain:,.1f}×" in report
    assert (tmp_path / "predictions_h200.csv").read_text().startswith("ID,TopConfigs")


def test_a_tour_says_where_it_was_taken_and_what_to_do_next(tmp_path, monkeypatch):
    monkeypatch.setattr(guide, "_stops", lambda: [("one", "One", _stop)])
    report = take_tour(tmp_path).report.read_text()
    assert f"tilewise {tilewise.__version__} on " in report
    assert "<h2>What next</h2>" in report


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        ((0.99, 0.98, 1.0), "Nothing to gain here"),
        ((0.9, 0.8, 0.89), "Tuning gained nothing here"),
        ((0.968, 0.968, 0.975), "Tuning gained nothing here"),
        ((0.9, 0.8, 0.99), "slower tile than the default"),
        ((0.9, 0.95, 0.99), "Five measurements reach 99%"),
    ],
)
def test_tuning_is_honest_where_nothing_is_gained(shares, sentence):
    assert sentence in verdict(*shares)


def test_a_step_that_is_not_faster_is_described_as_it_is():
    assert step_sentences({"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.12}) == [
        "“c” is as fast as “b” on this machine.",
        "“d” is 12% slower than “c” on this machine.",
    ]


def test_no_step_is_called_slower_on_a_busy_machine(monkeypatch):
    measurements = {name: SimpleNamespace(p50=seconds) for name, seconds in (("a", 1.0), ("b", 2.0))}
    timing = SimpleNamespace(measurements=measurements, reasons=["load: a compiler"])
    monkeypatch.setattr(walks, "Timer", lambda **_: SimpleNamespace(compare=lambda *_, **__: timing))
    steps = [walks.ModelVersion(name, lambda: None, 1024, "99 %") for name in "ab"]
    assert walks._timed_stop("A CNN", steps, "accuracy", 2).lines == ["Unsteady: load: a compiler."]
    timing.reasons = []
    assert walks._timed_stop("A CNN", steps, "accuracy", 2).lines == ["“b” is 100% slower than “a” on this machine."]


def test_three_numbers_stand_at_the_top_and_charts_of_one_idea_share_a_scale():
    facts = {
        "cnn": {"speedup": {"plain": 1.0, "INT8": 12.3}, "quality": {"plain": "99%", "INT8": "98%"}},
        "gpt": {"speedup": {"plain": 1.0, "cached": 45.0}, "quality": {"plain": "100%", "cached": "97%"}},
        "ranking": {"h200": {"errors": {"shipped model": {"top1": 0.016}, "default configuration": {"top1": 1.05}}}},
    }
    numbers = guide.headlines(facts)
    assert [headline.number for headline in numbers] == ["12.3×", "45.0×", "1.6 %"]
    assert guide.headlines({"cnn": {"skipped": "why"}}) == []
    text = page([_stop(None)], "today", numbers)
    assert text.index("12.3×") < text.index("<nav>")
    assert "--share:0.3000" in bars(Bars("t", "u", {"a": 3.0}, largest=10.0))
