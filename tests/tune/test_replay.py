"""Replay on the embedded collection, as CI runs it: from recorded runtimes alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tilewise.cli.replay import replay as command
from tilewise.errors import ConfigurationError
from tilewise.tune import replay
from tilewise.tune.replay import Replay, plot, table


@pytest.fixture(scope="module")
def h200() -> Replay:
    return replay("h200", trees=False, most=6)


def test_every_strategy_gets_better_with_measurements(h200: Replay):
    names = {"random", "exhaustive", "analytical", "model, fixed top k", "ours, fixed top k", "ours, updated"}
    assert {strategy.name for strategy in h200.strategies} == names
    for strategy in h200.strategies:
        assert len(strategy.regret) == 6
        assert all(a >= b - 1e-12 for a, b in zip(strategy.regret, strategy.regret[1:], strict=False))


def test_the_model_beats_chance_the_formula_and_the_default(h200: Replay):
    ours = h200.strategy("ours, updated").regret
    for name in ("random", "exhaustive", "analytical"):
        assert ours[0] < h200.strategy(name).regret[5] / 2
    assert ours[0] < h200.default / 2
    assert h200.first_choice > 0.9


def test_the_adaptive_tuner_stops_early_and_says_what_it_claims(h200: Replay):
    own = h200.adaptive
    assert own.measurements <= 4 and own.regret < 0.02
    assert len(own.counts) == h200.kernels
    assert own.right_when_sure is None or own.right_when_sure >= 0.95


def test_table_plot_and_json_say_the_same(h200: Replay, tmp_path: Path):
    lines = table(h200)
    assert f"{100 * h200.strategy('random').regret[0]:.2f}" in "\n".join(lines)
    plot(h200, tmp_path / "replay.png")
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
