"""Replay on the embedded collection, as CI runs it: from recorded runtimes alone."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tilewise.cli.replay import replay as command
from tilewise.costmodel import load_dataset
from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import find_collection
from tilewise.errors import ConfigurationError
from tilewise.tune import replay
from tilewise.tune.choose.scores import shape_fields, shipped_guide
from tilewise.tune.problem import Problem
from tilewise.tune.search.calibration import make_case
from tilewise.tune.search.gaussian_process import Belief, Memory
from tilewise.tune.search.loop import Rule, search
from tilewise.tune.search.replay import Replay, plot, table


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


def test_measurements_of_other_shapes_do_not_lead_astray():
    """A tuner that comes from shape to shape with one cache does as well as one that starts anew with each."""
    data, guide = load_dataset("h200"), shipped_guide("h200", "H200")
    problems = {m.kernel.name: Problem(m.problem) for m in read_collection(find_collection("h200")).splits["valid"]}
    lost: dict[bool, list[float]] = {False: [], True: []}
    earlier: list[tuple[Any, ...]] = []
    products = [kernel for kernel in data.valid if problems[kernel.name].family == "matmul"]
    for kernel in random.Random(1).sample(products, 60):
        case = make_case(guide.model, kernel, data.schema.config_features)
        sizes, settings = shape_fields(problems[kernel.name]), guide.prior.scaled(case.features, case.names)
        near = sorted(earlier, key=lambda told: float(np.square(told[1][0] - sizes).sum()))[:6]
        near = [(np.full(len(told[1]), number), *told[1:]) for number, told in enumerate(near)]
        memory = Memory(*(np.concatenate(column) for column in zip(*near, strict=True))) if near else None
        for known in (None, memory):
            belief = Belief(case.scores, settings, guide.prior, known, sizes)
            found = search(belief, lambda index, case=case: float(case.runtime[index]), Rule(0.0, 0.0, 5))
            lost[known is not None].append(math.log(found.runtime_ns / case.best))
            rows = [step.index for step in found.steps]
        times = np.log(case.runtime[rows])
        earlier.append((0, np.tile(sizes, (5, 1)), settings[rows], case.scores[rows] - case.scores.min(), times))
    assert len(lost[True]) == 59
    assert np.mean(lost[True]) < np.mean(lost[False]) + 0.001
