"""Replay on the embedded collection, as CI runs it: from recorded runtimes alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tilewise.cli.tiles.replay import draw, table
from tilewise.cli.tiles.replay import replay as command
from tilewise.errors import ConfigurationError
from tilewise.tune import replay
from tilewise.tune.search.replay import OURS, SIMPLE, Replay, compare_curves, replay_without_model


@pytest.fixture(scope="module")
def h200() -> Replay:
    return replay("h200", trees=False, most=6)


def test_every_strategy_gets_better_with_measurements(h200: Replay):
    names = {"random", "exhaustive", "analytical", SIMPLE, OURS}
    assert {strategy.name for strategy in h200.strategies} == names
    for strategy in h200.strategies:
        assert len(strategy.regret) == 6
        assert all(a >= b - 1e-12 for a, b in zip(strategy.regret, strategy.regret[1:], strict=False))


def test_the_model_beats_chance_the_formula_and_the_default(h200: Replay):
    ours = h200.strategy(OURS).regret
    for name in ("random", "exhaustive", "analytical"):
        assert ours[0] < h200.strategy(name).regret[5] / 2
    assert ours[0] < h200.default / 2
    assert h200.first_choice > 0.9


def test_what_the_search_saves_over_the_models_order_comes_with_an_interval(h200: Replay):
    assert [c.measurements for c in h200.comparisons] == [1, 2, 3, 5]
    for c in h200.comparisons:
        simple, ours = (h200.strategy(name).regret[c.measurements - 1] for name in (SIMPLE, OURS))
        assert c.saving == pytest.approx(simple - ours) and c.low <= c.saving <= c.high


def test_an_interval_excludes_zero_where_one_way_is_always_better():
    better = np.full((20, 1), 0.01) + 0.001 * np.arange(20)[:, None]
    (comparison,) = compare_curves({"new": better, "old": better + 0.02}, "new", "old")
    assert comparison.low > 0 and comparison.saving == pytest.approx(0.02)


def test_table_plot_and_json_say_the_same(h200: Replay, tmp_path: Path):
    lines = table(h200)
    assert f"{100 * h200.strategy('random').regret[0]:.2f}" in "\n".join(lines)
    draw(h200, tmp_path / "replay.png")
    assert (tmp_path / "replay.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(json.dumps(h200.as_dict()))["kernels"] == h200.kernels


def test_the_command_prints_the_table():
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["h200", "--no-trees", "--most", "2", "--split", "valid", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["split"] == "valid"


def test_replaying_twice_gives_the_same_numbers(h200: Replay):
    assert replay("h200", trees=False, most=6) == h200


def test_no_measurements_at_all_is_refused():
    with pytest.raises(ConfigurationError, match="at least 1"):
        replay("h200", most=0)


def test_without_a_model_a_process_over_problems_beats_the_simpler_ways():
    report = replay_without_model("cpu", most_problems=10)
    regret = {strategy.name: strategy.regret for strategy in report["strategies"]}
    assert regret["a process over problems"][4] < min(regret["random"][4], regret["a process of one problem"][4])
    pairs = {(c.mechanism, c.simpler) for c in report["comparisons"]}
    assert ("a process over problems", "the mean over earlier problems") in pairs
    assert all(c.low <= c.saving <= c.high for c in report["comparisons"])
