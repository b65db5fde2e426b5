"""Comparing two measurements of the same kernels: numbers worked out by hand, and SciPy's rank correlation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.costmodel.data.collection import Collection, MeasuredKernel
from tilewise.costmodel.data.kernel import make_kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.errors import ConfigurationError
from tilewise.profile.timing.statistics import rank_correlation
from tilewise.tune.measure.export import compare, open_collection


def collection(
    runtimes: dict[str, list[int]], columns: tuple[str, ...] = ("x",), kind: str | None = None
) -> Collection:
    kernels = []
    for name, times in runtimes.items():
        configs = np.arange(len(times) * len(columns), dtype=np.float32).reshape(len(times), -1)
        graph = (np.zeros((1, 140), np.float32), np.ones(1, np.uint8), np.empty((0, 2), np.int32))
        kernel = make_kernel(name, *graph, configs, np.array(times), np.full(len(times), 100))
        kernels.append(MeasuredKernel(kernel, np.zeros(len(times)), np.ones(len(times)), {}))
    return Collection(Schema(columns, {"kind": kind} if kind else {}), {"train": kernels})


def test_agreement_is_what_hand_and_pencil_give() -> None:
    first = collection({"a_1": [100, 200, 300], "b_2": [10, 11, 50]})
    second = collection({"other_1": [110, 220, 330], "b_2": [12, 10, 50], "c_3": [1, 2]})
    result = compare(first, second)
    one, two = result["kernels"]
    assert (one["kernel"], one["rank_correlation"], one["choice_loss"]) == ("a_1", pytest.approx(1.0), 0.0)
    assert one["speed_ratio"] == pytest.approx(1.1)
    assert two["rank_correlation"] == pytest.approx(0.5)
    assert two["choice_loss"] == pytest.approx(0.2)
    assert (result["configs"], result["least_correlation"]) == (6, pytest.approx(0.5))
    assert result["largest_choice_loss"] == pytest.approx(0.2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=30))
def test_rank_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    a, b = np.array(pairs).T
    if len(set(a)) == 1 or len(set(b)) == 1:
        return
    assert rank_correlation(a, b) == pytest.approx(scipy_stats.spearmanr(a, b).statistic, abs=1e-12)


def test_nothing_in_common_and_another_kind_of_machine_are_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="no kernel in common"):
        compare(collection({"a_1": [1, 2]}), collection({"a_2": [1, 2]}))
    with pytest.raises(ConfigurationError, match="by the cpu and one by the triton collector"):
        compare(collection({"a_1": [1, 2]}, kind="triton"), collection({"a_1": [1, 2]}, kind="cpu"))


def test_a_column_that_one_of_them_has_no_kernel_for_does_not_matter() -> None:
    first, second = collection({"a_1": [1, 2, 3]}), collection({"a_1": [1, 2, 3]}, ("x", "y"))
    wide = second.splits["train"][0].kernel.config_feat
    wide[:] = [[0, 0], [1, 0], [2, 5]]
    (kernel,) = compare(first, second)["kernels"]
    assert kernel["configs"] == 2


def test_an_embedded_collection_agrees_with_itself_and_a_wrong_place_is_one_sentence(tmp_path: Path) -> None:
    result = compare(open_collection("h200"), open_collection("h200"))
    assert result["least_correlation"] == pytest.approx(1.0)
    assert result["largest_choice_loss"] == 0.0
    with pytest.raises(ConfigurationError, match="There is nothing at"):
        open_collection(tmp_path / "nowhere")
