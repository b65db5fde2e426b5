"""Kernels unlike the train split are recognised, and a blend says so and gives no confidence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("lightgbm")

from course.synthetic_tiles import synthetic_dataset
from tilewise.costmodel import load_scorer, train
from tilewise.costmodel.confidence_fit import calibrate
from tilewise.costmodel.data.dataset import Dataset
from tilewise.costmodel.data.kernel import ranking
from tilewise.costmodel.data.schema import OPCODE_NUMBER
from tilewise.costmodel.models.blend import Blend, Familiarity, blend
from tilewise.costmodel.models.gbdt import train_gbdt
from tilewise.costmodel.ranking import rank
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


def test_one_strange_train_kernel_does_not_make_everything_familiar(data: Dataset) -> None:
    kernels = list(data.train)
    strange = dataclasses.replace(kernels[0], node_opcode=np.full_like(kernels[0].node_opcode, OPCODE_NUMBER["fft"]),
                                  node_feat=kernels[0].node_feat * 4096)  # fmt: skip
    other = dataclasses.replace(kernels[0], node_opcode=np.full_like(kernels[0].node_opcode, OPCODE_NUMBER["sort"]),
                                node_feat=kernels[0].node_feat * 16)  # fmt: skip
    assert Familiarity.fit(kernels).distance(other) > 1
    assert Familiarity.fit([*kernels, strange]).distance(other) > 1


def test_a_blend_warns_of_unfamiliar_kernels_and_gives_no_confidence(data: Dataset, tmp_path: Path) -> None:
    ranker = train(data, "TileRanker", epochs=1, progress=False, device="cpu")
    trees = train_gbdt(data, trees=8)
    only_first = Familiarity.fit([data.train[0]])
    unfamiliar = next(kernel for kernel in data.valid if only_first.distance(kernel) > 1)
    fused = blend([ranker, trees], list(data.valid))
    fused.record["calibration"] = calibrate(fused, list(data.valid))
    assert rank(fused, unfamiliar).confidence_top5 is not None
    with_familiarity = Blend(fused.models, fused.weights, fused.record, only_first)
    with_familiarity.save(tmp_path / "model.safetensors")
    for model in (with_familiarity, load_scorer(tmp_path)):
        with pytest.warns(UserWarning, match="unlike the kernels of the train split.*measure some"):
            np.testing.assert_array_equal(ranking(model.score(unfamiliar)), ranking(fused.score(unfamiliar)))
            assert rank(model, unfamiliar).confidence_top5 is None


def test_rankings_are_fused_and_scores_keep_the_scale_of_the_network(data: Dataset) -> None:
    kernel = data.valid[0]
    ranker = train(data, "TileRanker", epochs=1, progress=False, device="cpu")
    trees = [train_gbdt(data, seed, trees=8) for seed in (0, 1)]
    fused = blend([ranker, *trees], list(data.valid))
    scores = [model.score(kernel) for model in fused.models]
    # The mean rank of configurations with equal scores.
    ranks = [[1 + (s < x).sum() + ((s == x).sum() - 1) / 2 for x in s] for s in scores]
    expected = ranking(-(1 / np.array(ranks)).sum(axis=0))
    assert ranking(fused.score(kernel))[:5].tolist() == expected[:5].tolist()
    total = sum(w * model.score(kernel) for w, model in zip(fused.weights, fused.models, strict=True))
    np.testing.assert_allclose(np.sort(fused.score(kernel)), np.sort(total), rtol=1e-5, atol=1e-6)
    rows = np.array([3, 1])
    np.testing.assert_array_equal(fused.score(kernel, rows), fused.score(kernel)[rows])


def test_trees_stop_at_the_time_limit(data: Dataset) -> None:
    trees = train(data, "GBDT", max_seconds=0.05, model_kwargs={"trees": 4000})
    assert trees.booster.num_trees() < 4000


def test_the_recipe_of_the_winners_blends_ranks_and_reads_finished_members(data: Dataset, tmp_path: Path) -> None:
    options = {"members": 2, "epochs": 1, "configs": 16, "device": "cpu", "model_kwargs": {"hidden_dim": 16}}
    first = train_winners(data, out_dir=tmp_path, **options)
    again = train_winners(data, out_dir=tmp_path, **options)
    kernel = data.valid[1]
    np.testing.assert_array_equal(first.score(kernel), again.score(kernel))
    np.testing.assert_allclose(load_scorer(tmp_path).score(kernel), first.score(kernel), rtol=1e-5)
    assert sorted({m.name for m in first.models}) == ["GBDT", "TileRanker"]
    np.testing.assert_array_equal(first.score(kernel, np.array([3, 1])), first.score(kernel)[[3, 1]])
