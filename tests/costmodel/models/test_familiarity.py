"""Kernels unlike the train split are recognised, and a blend ranks them by its fallback and says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("lightgbm")

from course.synthetic_tiles import synthetic_dataset
from tilewise.costmodel import load_scorer, train
from tilewise.costmodel.data.dataset import Dataset
from tilewise.costmodel.data.kernel import ranking
from tilewise.costmodel.data.schema import OPCODE_NUMBER
from tilewise.costmodel.models.blend import Blend, Familiarity
from tilewise.costmodel.models.gbdt import train_gbdt
from tilewise.costmodel.training import auto
from tilewise.costmodel.training.auto import train_winners


@pytest.fixture(scope="module")
def data() -> Dataset:
    return synthetic_dataset(60, 12, n_configs=24)


def test_a_kernel_of_another_kind_is_unfamiliar(data: Dataset) -> None:
    familiarity = Familiarity.fit(list(data.train))
    assert max(familiarity.distance(kernel) for kernel in data.train) <= 1
    assert np.mean([familiarity.distance(kernel) <= 1 for kernel in data.valid]) > 0.9
    kernel = data.valid[0]
    strange = np.full_like(kernel.node_opcode, OPCODE_NUMBER["fft"])
    sizes = kernel.node_feat * 64
    assert familiarity.distance(dataclasses.replace(kernel, node_opcode=strange, node_feat=sizes)) > 1


def test_a_blend_falls_back_on_unfamiliar_kernels_and_says_so(data: Dataset, tmp_path: Path) -> None:
    ranker = train(data, "TileRanker", epochs=1, progress=False, device="cpu")
    trees = train_gbdt(data, trees=8)
    only_first = Familiarity.fit([data.train[0]])
    unfamiliar = next(kernel for kernel in data.valid if only_first.distance(kernel) > 1)
    blend = Blend([ranker, trees], [1.0, 0.0], {"fallback": "GBDT"}, only_first)
    assert blend.name == "TileRanker"
    blend.save(tmp_path / "model.safetensors")
    for model in (blend, load_scorer(tmp_path)):
        with pytest.warns(UserWarning, match="unlike the kernels of the train split"):
            np.testing.assert_array_equal(ranking(model.score(unfamiliar)), ranking(trees.score(unfamiliar)))
    blend.record["fallback"] = "random order"
    with pytest.warns(UserWarning, match="a random order"):
        assert sorted(blend.score(unfamiliar)) == list(range(unfamiliar.n_configs))


def test_the_fallback_is_judged_on_families_that_are_left_out(
    data: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = auto._left_out_kernels(data)
    assert 5 <= len(left_out) <= 0.4 * len(data.train)
    fallback = auto._choose_fallback(data, ["TileRanker", "GBDT"], seed=0, max_seconds=4.0)
    assert fallback in ("TileRanker", "GBDT", "TileRanker + GBDT")
    assert "left-out families" in capsys.readouterr().err


def test_trees_stop_at_the_time_limit(data: Dataset) -> None:
    trees = train(data, "GBDT", max_seconds=0.05, model_kwargs={"trees": 4000})
    assert trees.booster.num_trees() < 4000


def test_the_recipe_of_the_winners_blends_ranks_and_reads_finished_members(data: Dataset, tmp_path: Path) -> None:
    options = {"members": 2, "epochs": 1, "configs": 16, "device": "cpu", "model_kwargs": {"hidden_dim": 16}}
    first = train_winners(data, out_dir=tmp_path, **options)
    again = train_winners(data, out_dir=tmp_path, **options)
    kernel = data.valid[1]
    np.testing.assert_array_equal(first.score(kernel), again.score(kernel))
    np.testing.assert_array_equal(load_scorer(tmp_path).score(kernel), first.score(kernel))
    assert sorted({m.name for m in first.models}) == ["GBDT", "TileRanker"]
    np.testing.assert_array_equal(first.score(kernel, np.array([3, 1])), first.score(kernel)[[3, 1]])
