"""The floor of time: no entry is faster than its own arithmetic on this machine, and honest ones are above it."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.bench import Rejected, TinyMLPerf, reference_recipe
from tilewise.bench.build import build
from tilewise.bench.floor import check_floor, least_seconds
from tilewise.bench.runner import baseline

EVENTS = ("MLP_SPRINT", "CNN_MARATHON", "TRANSFORMER_DECATHLON")


@pytest.mark.parametrize("name", EVENTS)
def test_what_is_faster_than_its_arithmetic_is_refused(name: str) -> None:
    entry = build(reference_recipe(name))
    least = least_seconds(entry)
    assert check_floor(entry, 1.01 * least) == least > 0
    with pytest.raises(Rejected, match="no program on this machine") as refused:
        check_floor(entry, 0.5 * least)
    assert refused.value.code == "below the floor of time"


def test_fewer_and_smaller_weights_may_be_faster() -> None:
    event = TinyMLPerf.event("MLP_SPRINT")
    plain, halved = baseline(event), baseline(event)
    for _, tensor in halved.model.named_tensors():
        tensor.data[...] = np.where(np.arange(tensor.data.size).reshape(tensor.data.shape) % 2, 0, tensor.data)
    assert least_seconds(halved) < least_seconds(plain)
    assert least_seconds(build(reference_recipe("MLP_SPRINT"))) < least_seconds(plain)
