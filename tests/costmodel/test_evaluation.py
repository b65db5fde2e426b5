"""Evaluation tables, trees, calibration, and the commands around them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from costmodel.simulated import simulated_kernels, write_collection
from tilewise.cli.tiles.app import tiles
from tilewise.cli.tiles.drawings import draw_evaluation
from tilewise.costmodel import evaluate, load_model, load_scorer, rank, train
from tilewise.costmodel.baselines import Analytical, random_errors
from tilewise.costmodel.confidence import confidence
from tilewise.costmodel.confidence_fit import calibrate
from tilewise.costmodel.data.dataset import dataset_from_kernels, load_dataset
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.evaluation import leave_one_program_out
from tilewise.costmodel.metrics import top_k_error
from tilewise.errors import ConfigurationError, TilewiseError


@pytest.fixture(scope="module")
def data():
    kernels = simulated_kernels(36, seed=0, n_configs=40)
    return dataset_from_kernels(kernels[:24], kernels[24:30], kernels[30:])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_collection(tmp_path_factory.mktemp("c"), 12, 6, 4)


class Oracle:
    calibration = None

    def score(self, kernel):
        return kernel.target


def test_a_perfect_model_has_no_error_and_stands_above_the_baselines(data, tmp_path):
    table = evaluate({"oracle": Oracle()}, data, "test")
    oracle = table.row("oracle").metrics
    assert oracle["top1"].mean == 0.0 and oracle["opa"].mean == 1.0 and oracle["tile_score"].mean == 1.0
    for name in ("analytical", "default configuration", "random"):
        row = table.row(name).metrics
        assert row["top1"].low <= row["top1"].mean <= row["top1"].high and row["top1"].mean > 0
        assert row["top10"].mean <= row["top5"].mean <= row["top1"].mean
    assert set(table.row("oracle").by_program) == set(data.test.programs)
    draw_evaluation(table, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes()[:4] == b"\x89PNG"


def test_an_unlabelled_split_cannot_be_evaluated(data):
    empty = dataset_from_kernels(data.train[:], data.valid[:])
    with pytest.raises(ConfigurationError, match="no runtimes"):
        evaluate(Oracle(), empty, "test")


def test_trees_learn_and_come_back_from_their_file(data, tmp_path):
    pytest.importorskip("lightgbm")
    trees = train(data, "GBDT", out_dir=tmp_path, model_kwargs={"trees": 40, "threads": 1})
    errors = [top_k_error(k.target, trees.score(k), 5) for k in data.test]
    assert np.mean(errors) < evaluate(trees, data, "test").row("random").metrics["top5"].mean
    again, scorer = load_model(tmp_path), load_scorer(tmp_path)
    np.testing.assert_array_equal(again.score(data.test[0]), trees.score(data.test[0]))
    assert rank(scorer, data.test[0]).top(3) == rank(trees, data.test[0]).top(3)
    with pytest.raises(TilewiseError):
        train(data, "GBDT", model_kwargs={"objective": "no such"})


def test_confidence_is_high_for_an_oracle_and_low_for_a_guesser(data):
    rng = np.random.default_rng(0)

    class Sharp:
        def score(self, kernel):
            return np.log(kernel.target)

    class Guess:
        def score(self, kernel):
            return rng.standard_normal(kernel.n_configs)

    kernels = simulated_kernels(60, seed=5)
    sharp, guess = (calibrate(model, kernels) for model in (Sharp(), Guess()))
    test_kernels = simulated_kernels(20, seed=6)
    sure = [confidence(Sharp().score(k), sharp) for k in test_kernels]
    unsure = [confidence(Guess().score(k), guess) for k in test_kernels]
    assert np.mean(sure) > 0.9 > 0.6 > np.mean(unsure)
    hits = [top_k_error(k.target, Guess().score(k), 5) <= 0.01 for k in test_kernels]
    assert abs(np.mean(unsure) - np.mean(hits)) < 0.3
    assert calibrate(Sharp(), kernels[:3]) is None and confidence(np.zeros(3), None) is None


def test_a_few_kernels_that_agree_are_no_certainty():
    class Sharp:
        def score(self, kernel):
            return np.log(kernel.target)

    kernels = simulated_kernels(8, seed=5)
    sure = [confidence(Sharp().score(k), calibrate(Sharp(), kernels)) for k in kernels]
    assert max(sure) < 0.93 and np.mean(sure) == pytest.approx(9 / 10, abs=0.03)


def test_each_program_is_scored_by_a_model_that_has_not_seen_it(data):
    metrics = leave_one_program_out(data, "MLP", epochs=1)
    assert set(metrics) == set(data.train.programs) and all(np.isfinite(row["top1"]) for row in metrics.values())


def invoke(*arguments: str):
    return CliRunner().invoke(tiles, list(arguments), catch_exceptions=True)


def test_the_commands_from_training_to_predictions(root, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    run = str(tmp_path / "run")
    quick = ["--epochs", "2", "--device", "cpu", "--json"]
    trained = invoke("train", str(root), "--out", run, *quick)
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["summary"]["test"]["top5"]["mean"] >= 0
    assert (tmp_path / "run" / "curve.png").exists()
    table = invoke("evaluate", str(root), run, "--split", "test", "--no-gbdt", "--json")
    names = [row["name"] for row in json.loads(table.stdout)["rows"]]
    assert names == [run, "analytical", "default configuration", "random"]
    out = str(tmp_path / "p.csv")
    assert invoke("predict", run, str(root), "--out", out).exit_code == 0
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0] == "ID,TopConfigs" and len(lines) == 5 and all(line.count(";") == 4 for line in lines[1:])
    scored = invoke("score", out, "--truth", str(root / "test"))
    assert scored.exit_code == 0, scored.output
    exported = str(tmp_path / "one.safetensors")
    assert invoke("export", run, exported).exit_code == 0
    kernel = simulated_kernels(1)[0]
    np.testing.assert_array_equal(load_scorer(exported).score(kernel), load_scorer(run).score(kernel))


def test_several_seeds_report_an_interval(root, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    arguments = ["--model", "MLP", "--epochs", "1", "--seeds", "2", "--device", "cpu", "--json"]
    output = invoke("train", str(root), "--out", str(tmp_path / "r"), *arguments)
    summary = json.loads(output.stdout)["summary"]["valid"]["opa"]
    assert summary["low"] <= summary["mean"] <= summary["high"]
    assert (tmp_path / "r" / "seed_1" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "/nowhere", "--out", "x"),
        ("train", "{root}", "--out", "{tmp}", "--model", "Nope"),
        ("train", "{root}", "--out", "{tmp}", "--model-kwargs", "["),
        ("train", "{root}", "--out", "{tmp}", "--losses", "x"),
        ("evaluate", "{root}", "/nowhere/model"),
        ("predict", "/nowhere/model", "{root}"),
        ("export", "/nowhere", "{tmp}/y"),
    ],
)
def test_bad_requests_are_one_sentence(root, tmp_path, arguments):
    filled = [a.replace("{root}", str(root)).replace("{tmp}", str(tmp_path)) for a in arguments]
    result = invoke(*filled)
    assert isinstance(result.exception, TilewiseError) and "\n" not in str(result.exception)


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_embedded_collections_know_their_noise_and_the_formula_beats_chance(name):
    data = load_dataset(name)
    formula = Analytical(data.train)
    errors = np.mean([top_k_error(kernel.target, formula.score(kernel), 1) for kernel in data.test])
    assert errors < 0.5 * random_errors(data.test, (1,))["top1"].mean()
    assert 0 < data.schema.extra["noise"] < 0.05


def test_the_formula_is_left_out_where_columns_mean_nothing_to_it():
    kernels = [dataclasses.replace(k, config_feat=k.config_feat[:, 8:11]) for k in simulated_kernels(8)]
    data = dataset_from_kernels(kernels[:5], kernels[5:], schema=Schema(("a", "b", "c")))
    names = [row.name for row in evaluate({"formula": Analytical(data.train)}, data, "valid").rows]
    assert "analytical" not in names and "random" in names
