"""The front of a ranking does not depend on rounding: torch and NumPy name the same five, ties keep their order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")

from costmodel.simulated import simulated_kernels
from tilewise.costmodel import load_scorer, rank, train
from tilewise.costmodel.data.dataset import dataset_from_kernels, from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.ranker import RankerFeatures

MODELS = ["MLP", "LateJoinSAGE", "EarlyJoinSAGE", "LateJoinResGCN", "EarlyJoinResGCN", "TileRanker"]


def times(kernel: Kernel, repeats: int) -> Kernel:
    """The different configurations of the kernel, all of them `repeats` times over."""
    rows = np.tile(np.sort(np.unique(kernel.config_feat, axis=0, return_index=True)[1]), repeats)
    parts = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **parts)


@pytest.mark.parametrize("name", MODELS)
def test_repeated_configurations_tie_and_keep_their_order(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    kernels = simulated_kernels(10, n_configs=40)
    model = train(dataset_from_kernels(kernels[:6], kernels[6:8]), name, epochs=1, progress=False, device="cpu")
    model.save(tmp_path / "m.safetensors")
    scorer = load_scorer(tmp_path / "m.safetensors")
    for kernel in kernels[8:]:
        once, thrice = rank(scorer, times(kernel, 1)), rank(scorer, times(kernel, 3))
        (best, second), n = once.top(2), len(once.order)
        assert thrice.top(5) == [best, best + n, best + 2 * n, second, second + n]
        assert rank(model, times(kernel, 3)).top(5) == thrice.top(5)
        assert sorted(thrice.order.tolist()) == list(range(3 * n))


@pytest.mark.parametrize("name", MODELS)
def test_float64_scores_are_the_float32_ones_to_rounding(name: str) -> None:
    kernels = simulated_kernels(9, seed=1, n_configs=30)
    model = train(dataset_from_kernels(kernels[:6], kernels[6:8]), name, epochs=1, progress=False, device="cpu")
    rows = np.array([3, 1, 20])
    exact = model.exact(kernels[8], rows)
    assert exact is not None and exact.dtype == np.float64
    np.testing.assert_allclose(exact, model.score(kernels[8])[rows], atol=1e-4)


def test_a_column_constant_in_training_changes_no_score() -> None:
    kernels = simulated_kernels(9, seed=2, n_configs=30)
    # Columns without a known meaning; the meaning of a TPU's tile bounds does not depend on the train split.
    data = dataset_from_kernels(kernels[:6], kernels[6:8], schema=Schema(tuple(f"p{i}" for i in range(24))))
    model = train(data, "TileRanker", epochs=1, progress=False, device="cpu")
    changed = kernels[8].node_feat.copy()
    node_rows = np.concatenate([kernel.node_feat for kernel in kernels[:6]])
    constant = np.flatnonzero((node_rows == node_rows[0]).all(axis=0))
    changed[:, constant] += 3
    other = dataclasses.replace(kernels[8], node_feat=changed)
    np.testing.assert_array_equal(model.score(other), model.score(kernels[8]))


def test_what_a_column_is_called_or_where_it_stands_changes_no_ranking() -> None:
    kernels = simulated_kernels(10, seed=3)
    columns = np.random.default_rng(0).permutation(kernels[0].config_feat.shape[1])
    permuted = [dataclasses.replace(k, config_feat=k.config_feat[:, columns]) for k in kernels]
    plain = RankerFeatures.fit(from_kernels(kernels, Schema(tuple(f"q{i}" for i in range(len(columns))))))
    other = RankerFeatures.fit(from_kernels(permuted, Schema(tuple(f"p{i}" for i in range(len(columns))))))
    pairs = {(int(column), int(slot)) for column, slot in plain.pairs}
    assert pairs <= {(int(columns[column]), int(slot)) for column, slot in other.pairs}
