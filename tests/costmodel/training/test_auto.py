"""`--model auto`: what valid cannot tell apart is blended, a cut-off run goes on, failures are left out."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightgbm")

from costmodel.simulated import simulated_kernels
from tilewise.costmodel import load_model, load_scorer
from tilewise.costmodel.data.dataset import dataset_from_kernels
from tilewise.costmodel.training import auto
from tilewise.costmodel.training.config import default_settings
from tilewise.errors import ConfigurationError


@pytest.fixture(scope="module")
def data():
    kernels = simulated_kernels(16, seed=3, n_configs=30)
    return dataset_from_kernels(kernels[:10], kernels[10:13], kernels[13:])


def found(*each, times=1):
    return {"each": list(each) * times}


def test_one_alone_is_believed_only_where_it_is_clearly_better():
    first, second, third = auto.CANDIDATES
    few = {first: found(0.5, 0.6, times=3), second: found(0.6, 0.1, times=3), third: found(0.1, 0.1, times=3)}
    assert auto._blend_names(few) == [first, second]  # half of the kernels suit it
    assert auto._blend_names(few | {second: found(0.1, 0.2, times=3)}) == [second]
    assert auto._blend_names(few | {second: found(0.9, 1.0, times=3)}) == [first]
    assert auto._blend_names({first: found(0.5, 0.6), second: found(0.1, 0.2)}) == [first, second]  # two tell nothing
    unsure = {first: found(*[0.0] * 6), second: found(0.9, 0.9, 0.1, 0.5, 1.2, -0.3)}  # 2.4 standard errors
    assert auto._blend_names(unsure) == [first, second]  # Student's t of six is 2.6
    assert auto._blend_names({second: found(0.5, times=5), third: found(0.1, times=5)}) == [second]
    assert auto._blend_names({third: found(0.5, 0.6)}) == [third]


def test_what_is_kept_is_read_again_and_the_blend_is_told_with_its_parts(data, tmp_path, capsys):
    kept = auto.train_auto(data, out_dir=tmp_path, epochs=2)
    record = kept.record["auto"]
    assert set(auto.CANDIDATES) <= set(record["valid"])
    assert record["chosen"] == kept.name and kept.name in record["valid"]
    kernel = data.test[0]
    for again in (load_scorer(tmp_path), load_model(tmp_path)):
        assert again.name == kept.name
        assert again.score(kernel) == pytest.approx(kept.score(kernel), rel=1e-4, abs=1e-4)
    messages = capsys.readouterr().err
    assert f"{kept.name} is kept." in messages
    assert all(re.search(rf"^{name}: \d+\.\d s$", messages, re.MULTILINE) for name in auto.CANDIDATES)


def test_a_candidate_outside_the_blend_must_beat_it_clearly(data, tmp_path, monkeypatch):
    third = auto.CANDIDATES[2]
    for each, name in ((found(0.0, times=6), third), (found(9.0, 0.0, 9.0, times=2), "TileRanker + GBDT")):
        told = {"TileRanker": found(1.0, 2.0, 3.0, times=2), "GBDT": found(2.0, 1.0, 3.0, times=2), third: each}
        models = {candidate: Constant(candidate) for candidate in told}
        monkeypatch.setattr(auto, "valid_errors", lambda model, dataset: found(1.0, 1.0, 1.5, times=2))
        assert auto._select(models, told, data, data, seed=0).name == name


class Constant:
    def __init__(self, name):
        self.name, self.record = name, {}

    def score(self, kernel, rows=None):
        return kernel.config_feat[:, 0]


@pytest.mark.parametrize("count", [1, 6])
def test_a_collection_without_a_valid_split_lends_one_from_train(count, tmp_path, capsys):
    data = dataset_from_kernels(simulated_kernels(count, seed=3, n_configs=30), [])
    kept = auto.train_auto(data, out_dir=tmp_path, epochs=1)
    assert set(auto.CANDIDATES) <= set(kept.record["auto"]["valid"])
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
    first = tmp_path / auto.CANDIDATES[0] / auto.MODEL_FILE
    before = first.stat().st_mtime_ns
    auto.train_auto(data, out_dir=tmp_path, epochs=1)
    assert first.stat().st_mtime_ns == before
    assert all((tmp_path / name / auto.MODEL_FILE).is_file() for name in auto.CANDIDATES)
    auto.train_auto(data, out_dir=tmp_path, epochs=2)  # another run: nothing is taken over
    assert first.stat().st_mtime_ns > before


def test_a_candidate_that_cannot_be_trained_is_left_out(data, tmp_path, monkeypatch, capsys):
    train = auto.train

    def picky(dataset, name, **settings):
        if name == auto.CANDIDATES[0]:
            raise ConfigurationError("Training diverged.")
        return train(dataset, name, **settings)

    monkeypatch.setattr(auto, "train", picky)
    kept = auto.train_auto(data, out_dir=tmp_path, epochs=1)
    assert auto.CANDIDATES[0] not in kept.record["auto"]["valid"]
    assert f"{auto.CANDIDATES[0]} is skipped: Training diverged." in capsys.readouterr().err


def test_a_damaged_or_other_model_of_a_candidate_is_trained_again(data, tmp_path):
    kept = auto.train(data, "MLP", out_dir=tmp_path, epochs=1, progress=False)
    content = (tmp_path / auto.MODEL_FILE).read_bytes()
    for damaged in (content[:-5], b""):
        (tmp_path / auto.MODEL_FILE).write_bytes(damaged)
        again = auto.train(data, "MLP", out_dir=tmp_path, epochs=1, progress=False)
        assert again.score(data.test[0]) == pytest.approx(kept.score(data.test[0]), abs=1e-6)
        assert (tmp_path / auto.MODEL_FILE).stat().st_size > len(damaged)
    other = dataset_from_kernels(list(data.train)[::-1], list(data.valid), list(data.test))
    for dataset, settings in ((other, {}), (data, {"seed": 1})):
        again = auto.train(dataset, "MLP", out_dir=tmp_path, epochs=1, progress=False, **settings)
        assert again.record["fingerprint"] != kept.record["fingerprint"]


@pytest.mark.parametrize(("least", "batches", "passes"), [(0, 5, 1), (32, 1, 32), (32, 10, 4), (32, 40, 1)])
def test_few_kernels_are_gone_through_more_often(least, batches, passes):
    assert default_settings("TileRanker", least_steps=least).passes(batches) == passes
