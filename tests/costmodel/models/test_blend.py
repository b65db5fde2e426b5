"""Promises of blends: scores add up by their spread, a file holds all of it, damage is one sentence."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("lightgbm")

from costmodel.simulated import simulated_kernels
from tilewise.costmodel import rank
from tilewise.costmodel.data.dataset import dataset_from_kernels
from tilewise.costmodel.models.blend import BLEND, Blend, blend
from tilewise.costmodel.models.file_writer import write_tensors
from tilewise.costmodel.models.files import read_model_file, read_tensors
from tilewise.costmodel.models.gbdt import train_gbdt
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.models.trained import load_model
from tilewise.errors import FileFormatError


@pytest.fixture(scope="module")
def kernels():
    return simulated_kernels(8, seed=2, n_configs=20)


@pytest.fixture(scope="module")
def parts(kernels):
    return [
        train_gbdt(dataset_from_kernels(some, []), seed, trees=5, threads=1, min_data_in_leaf=2)
        for seed, some in enumerate((kernels[:4], kernels[4:]))
    ]


def test_parts_count_alike_whatever_their_units(kernels, parts):
    class Louder:
        name = "GBDT"

        def score(self, kernel, rows=None):
            return 1000 * parts[1].score(kernel, rows)

    one, other = blend(parts, kernels), blend([parts[0], Louder()], kernels)
    np.testing.assert_allclose(one.score(kernels[0]), other.score(kernels[0]), rtol=1e-4, atol=1e-5)


def test_one_part_alone_is_itself_and_rows_are_scored_as_in_the_whole(kernels, parts):
    np.testing.assert_allclose(blend(parts[:1], kernels).score(kernels[0]), parts[0].score(kernels[0]))
    both, rows = blend(parts, kernels), np.array([3, 7])
    np.testing.assert_allclose(both.score(kernels[0], rows), both.score(kernels[0])[rows], rtol=1e-5, atol=1e-5)


def test_scores_that_never_differ_do_no_harm(kernels, parts):
    class Flat:
        name = "flat"

        def score(self, kernel, rows=None):
            return np.zeros(kernel.n_configs, np.float32)

    scores = blend([parts[0], Flat()], kernels).score(kernels[0])
    assert (np.argsort(scores) == np.argsort(parts[0].score(kernels[0]))).all()


def test_a_file_holds_all_parts(kernels, parts, tmp_path):
    blend = Blend(parts, [0.5, 2.0], {"seed": 3})
    blend.save(tmp_path / "b.safetensors")
    assert read_model_file(tmp_path / "b.safetensors").record["model"] == BLEND
    for load in (load_scorer, load_model):
        again = load(tmp_path / "b.safetensors")
        assert (again.name, again.record["seed"]) == ("GBDT", 3)
        np.testing.assert_array_equal(again.score(kernels[0]), blend.score(kernels[0]))
    again.save(tmp_path / "c.safetensors")
    assert rank(tmp_path / "c.safetensors", kernels[0]).order.tolist() == rank(blend, kernels[0]).order.tolist()


@pytest.mark.parametrize(
    "damage",
    [
        lambda parts: None,
        lambda parts: [],
        lambda parts: parts * 9,
        lambda parts: [*parts, 3],
        lambda parts: [parts[0], parts[1] | {"weight": -1}],
        lambda parts: [parts[0], parts[1] | {"weight": "1"}],
        lambda parts: [parts[0], parts[1] | {"record": parts[1]["record"] | {"model": BLEND}}],
        lambda parts: [parts[0], parts[1] | {"record": parts[1]["record"] | {"config_features": ["other"]}}],
        lambda parts: [*parts, parts[1]],
    ],
)
def test_a_damaged_list_of_parts_is_one_sentence(kernels, parts, tmp_path, damage):
    Blend(parts, [1.0, 1.0]).save(tmp_path / "b.safetensors")
    tensors, record = read_tensors(tmp_path / "b.safetensors")
    write_tensors(tmp_path / "c.safetensors", tensors, record | {"parts": damage(record["parts"])})
    with pytest.raises(FileFormatError):
        load_scorer(tmp_path / "c.safetensors").score(kernels[0])
