"""TileRanker with scikit-learn's manners."""

from __future__ import annotations

import numpy as np
import pytest

from tests.costmodel.simulated import simulated_kernels
from tilewise.costmodel import TileRanker
from tilewise.errors import ConfigurationError


def test_fit_predict_and_score_rank_kernels_that_were_not_taught():
    kernels, unseen = simulated_kernels(20), simulated_kernels(4, seed=9)
    ranker = TileRanker(epochs=2, seed=3).fit(kernels)
    scores = ranker.predict(unseen)
    assert [len(s) for s in scores] == [len(k.target) for k in unseen]
    assert ranker.score(unseen, k=60) == 1.0 and ranker.score(unseen, k=1) <= 1.0
    again = TileRanker(**ranker.get_params()).fit(kernels).predict(unseen)
    assert all(np.array_equal(a, b) for a, b in zip(scores, again, strict=True))


def test_params_are_set_and_mistakes_are_said_at_once():
    ranker = TileRanker(epochs=2).set_params(epochs=5, seed=1)
    assert ranker.get_params() == {"model": "TileRanker", "seed": 1, "epochs": 5}
    with pytest.raises(ConfigurationError, match="no training setting 'epoch'"):
        TileRanker(epoch=2)
    with pytest.raises(ConfigurationError, match="fit first"):
        ranker.predict([])
    with pytest.raises(ConfigurationError, match="two measured kernels"):
        ranker.fit([])
    with pytest.raises(ConfigurationError, match="not ndarray"):
        ranker.fit(list(np.ones((3, 4))))
