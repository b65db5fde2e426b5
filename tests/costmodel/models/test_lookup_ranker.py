"""LookupRanker scores a list of configurations like the direct computation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.costmodel import load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.models.numpy import lookup_ranker as lookup_module
from tilewise.costmodel.models.numpy.lookup_ranker import LookupRanker
from tilewise.costmodel.models.scorer import Scorer, shipped_scorer


def plain(scorer: Scorer, kernel: Kernel) -> np.ndarray:
    return scorer._score(scorer.preparation.apply(kernel))


def lookup_ranker(scorer: Scorer, kernel: Kernel) -> LookupRanker | None:
    folded = scorer._folded_for(np.dtype(np.float32))
    return LookupRanker.build(scorer.preparation, folded, kernel.config_feat)


@pytest.fixture(scope="module")
def gpu() -> Scorer:
    return shipped_scorer("h200")


@pytest.fixture(params=["compiled", "plain NumPy"])
def either_way(request, monkeypatch):
    if request.param == "plain NumPy":
        monkeypatch.setattr(lookup_module, "native", None)
    elif native is None:
        pytest.skip("the compiled kernels are not built")


def test_every_family_is_scored_alike(gpu, either_way):
    seen = set()
    for kernel in load_dataset("h200").test:
        kind = (kernel.config_feat.shape, kernel.n_nodes)
        if kind not in seen:
            seen.add(kind)
            table = lookup_ranker(gpu, kernel)
            assert table is not None
            np.testing.assert_allclose(table.score(kernel), plain(gpu, kernel), atol=5e-5)
    assert len(seen) > 5


def test_a_list_that_comes_again_is_scored_as_a_table(gpu):
    first, *others = [k for k in load_dataset("h200").test if k.config_feat.shape[0] == 376][:4]
    shared = [dataclasses.replace(k, config_feat=first.config_feat) for k in (first, *others)]
    gpu._last_config = gpu._lookup = None
    for kernel in shared:
        expected = plain(gpu, kernel)
        np.testing.assert_allclose(gpu.score(kernel), expected, atol=5e-5)
        assert np.argmin(expected) in np.argsort(gpu.score(kernel))[:2]
    assert isinstance(gpu._lookup[1], LookupRanker)


def test_a_list_never_seen_in_training_is_scored_alike(gpu, either_way):
    kernel = next(k for k in load_dataset("h200").test if k.n_configs == 376)
    odd = kernel.config_feat.copy()
    odd[::3, 0], odd[::5, 24], odd[1::7, 8] = 48.0, 6.0, 1e6
    strange = dataclasses.replace(kernel, config_feat=odd)
    np.testing.assert_allclose(lookup_ranker(gpu, strange).score(strange), plain(gpu, strange), atol=5e-5)


def test_members_of_an_ensemble_are_summed(gpu, either_way):
    weights = dict(gpu.weights)
    weights["scaling"] = np.concatenate([weights["scaling"] * factor for factor in (0.8, 1.0, 1.1)])
    weights["out"] = np.concatenate([weights["out"] * factor for factor in (2.0, 1.0, -0.5)])
    several = dataclasses.replace(gpu, weights=weights, _folded={}, _last_inputs=None, _last_config=None, _lookup=None)
    kernel = load_dataset("h200").test[0]
    np.testing.assert_allclose(lookup_ranker(several, kernel).score(kernel), plain(several, kernel), atol=1e-4)


def test_features_of_several_columns_and_long_lists_go_the_plain_way(gpu):
    kernel = load_dataset("h200").test[0]
    many = np.tile(kernel.config_feat, (4097 // kernel.n_configs + 1, 1))
    assert lookup_ranker(gpu, dataclasses.replace(kernel, config_feat=many)) is None
    spread = kernel.config_feat.copy()
    spread[:, 0] = np.arange(len(spread))
    assert lookup_ranker(gpu, dataclasses.replace(kernel, config_feat=spread)) is None or len(spread) < 160
