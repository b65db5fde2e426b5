"""`--model auto`: all members are fused, a cut-off run goes on, failures are left out."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightgbm")

from costmodel.simulated import simulated_kernels
from tilewise.costmodel import load_model, load_scorer
from tilewise.costmodel.data.dataset import dataset_from_kernels
from tilewise.costmodel.features.ranker import RankerFeatures
from tilewise.costmodel.models import gbdt
from tilewise.costmodel.training import auto
from tilewise.costmodel.training.config import default_settings
from tilewise.errors import ConfigurationError


@pytest.fixture(scope="module")
def data():
    kernels = simulated_kernels(16, seed=3, n_configs=30)
    return dataset_from_kernels(kernels[:10], kernels[10:13], kernels[13:])


MEMBERS = ("TileRanker_1", "TileRanker_2", "TileRanker_3", "GBDT")


def test_every_kind_takes_part_and_the_ensemble_is_read_again(data, tmp_path, capsys):
    trained = auto.train_auto(data, out_dir=tmp_path, epochs=2)
    assert set(trained.record["auto"]["valid"]) == {*auto.KINDS, trained.name}
    assert [model.name for model in trained.models] == ["TileRanker"] * 3 + ["GBDT"]
    kernel = data.test[0]
    for again in (load_scorer(tmp_path), load_model(tmp_path)):
        assert again.name == trained.name
        assert again.score(kernel) == pytest.approx(trained.score(kernel), rel=1e-4, abs=1e-4)
    messages = capsys.readouterr().err
    assert f"{trained.name} " in messages and "on 3 valid kernels" in messages
    assert all(re.search(rf"^member {number} of 4: \d+\.\d s", messages, re.MULTILINE) for number in range(1, 5))


@pytest.mark.parametrize("count", [1, 6])
def test_a_collection_without_a_valid_split_lends_one_from_train(count, tmp_path, capsys):
    data = dataset_from_kernels(simulated_kernels(count, seed=3, n_configs=30), [])
    model = auto.train_auto(data, out_dir=tmp_path, epochs=1)
    assert set(auto.KINDS) <= set(model.record["auto"]["valid"])
    assert "no valid split" in capsys.readouterr().err


def test_kernels_too_small_to_lend_anything_are_one_sentence(tmp_path):
    data = dataset_from_kernels(simulated_kernels(1, seed=3, n_configs=4), [])
    with pytest.raises(ConfigurationError, match="fewer than 5"):
        auto.train_auto(data, out_dir=tmp_path, epochs=1)


def test_a_run_that_was_cut_off_goes_on_with_the_candidate_it_was_at(data, tmp_path, monkeypatch):
    train, calls = auto.train, []

    def cut_off(dataset, name, **settings):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(dataset, name, **settings)

    monkeypatch.setattr(auto, "train", cut_off)
    with pytest.raises(KeyboardInterrupt):
        auto.train_auto(data, out_dir=tmp_path, epochs=1)
    first = tmp_path / MEMBERS[0] / auto.MODEL_FILE
    before = first.stat().st_mtime_ns
    auto.train_auto(data, out_dir=tmp_path, epochs=1)
    assert first.stat().st_mtime_ns == before
    assert all((tmp_path / name / auto.MODEL_FILE).is_file() for name in MEMBERS)
    auto.train_auto(data, out_dir=tmp_path, epochs=2)  # another run: nothing is taken over
    assert first.stat().st_mtime_ns > before


def test_a_candidate_that_cannot_be_trained_is_left_out(data, tmp_path, monkeypatch, capsys):
    train = auto.train

    def picky(dataset, name, **settings):
        if name == auto.KINDS[0]:
            raise ConfigurationError("Training diverged.")
        return train(dataset, name, **settings)

    monkeypatch.setattr(auto, "train", picky)
    model = auto.train_auto(data, out_dir=tmp_path, epochs=1)
    assert auto.KINDS[0] not in model.record["auto"]["valid"]
    assert f"{MEMBERS[0]} is skipped: Training diverged." in capsys.readouterr().err


def test_a_time_limit_is_shared_by_networks_and_forest(data, tmp_path, monkeypatch):
    train, limits = auto.train, {}

    def recorded(dataset, name, **settings):
        limits[name] = limits.get(name, 0) + settings["max_seconds"]
        return train(dataset, name, **settings)

    monkeypatch.setattr(auto, "train", recorded)
    auto.train_auto(data, out_dir=tmp_path, epochs=1, max_seconds=20.0)
    assert limits == pytest.approx({"TileRanker": 12.0, "GBDT": 8.0})


def test_trees_learn_faster_if_a_limit_cuts_their_number(data, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(gbdt.time, "monotonic", lambda: float(next(clock)))
    cut = gbdt.train_gbdt(data, trees=300, max_seconds=100.0)
    rates = [float(rate) for rate in re.findall(r"^shrinkage=(.*)$", cut.booster.model_to_string(), re.MULTILINE)]
    assert 90 <= len(rates) <= 101
    assert rates[1] == gbdt.DEFAULTS["learning_rate"] and 0.2 < rates[-1] <= 0.3


def test_a_damaged_or_other_model_of_a_candidate_is_trained_again(data, tmp_path):
    model = auto.train(data, "MLP", out_dir=tmp_path, epochs=1, progress=False)
    content = (tmp_path / auto.MODEL_FILE).read_bytes()
    for damaged in (content[:-5], b""):
        (tmp_path / auto.MODEL_FILE).write_bytes(damaged)
        again = auto.train(data, "MLP", out_dir=tmp_path, epochs=1, progress=False)
        assert again.score(data.test[0]) == pytest.approx(model.score(data.test[0]), abs=1e-6)
        assert (tmp_path / auto.MODEL_FILE).stat().st_size > len(damaged)
    other = dataset_from_kernels(list(data.train)[::-1], list(data.valid), list(data.test))
    for dataset, settings in ((other, {}), (data, {"seed": 1})):
        again = auto.train(dataset, "MLP", out_dir=tmp_path, epochs=1, progress=False, **settings)
        assert again.record["fingerprint"] != model.record["fingerprint"]


@pytest.mark.parametrize(("least", "batches", "passes"), [(0, 5, 1), (32, 1, 32), (32, 10, 4), (32, 40, 1)])
def test_few_kernels_are_gone_through_more_often(least, batches, passes):
    assert default_settings("TileRanker", least_steps=least).passes(batches) == passes


def test_members_share_the_features_of_the_train_split(data, monkeypatch):
    fits = []
    fit = RankerFeatures.fit
    monkeypatch.setattr(RankerFeatures, "fit", lambda split: fits.append(len(split)) or fit(split))
    fresh = dataset_from_kernels(list(data.train), list(data.valid))
    one = auto.train(fresh, "TileRanker", epochs=1, progress=False)
    trees = auto.train(fresh, "GBDT", model_kwargs={"trees": 3})
    assert fits == [len(fresh.train)]
    assert one.preparation is trees.preparation
    alone = auto.train(dataset_from_kernels(list(data.train), list(data.valid)), "GBDT", model_kwargs={"trees": 3})
    assert alone.score(data.test[0]).tolist() == trees.score(data.test[0]).tolist()
