"""What a plan leaves in memory: its own layers, and nothing that running the module once would keep."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise import Tensor, models, no_grad, plan
from tilewise._extension import native

pytestmark = pytest.mark.skipif(native is None, reason="plans need the compiled kernels")


def test_making_a_plan_keeps_no_weights_packed_for_single_layers() -> None:
    assert native is not None
    native.clear_weight_cache()
    limit = native.weight_cache_limit()
    plan.compile(models.resnet8().eval(), np.zeros((1, 3, 32, 32), np.float32))
    assert native.weight_cache_bytes() == 0
    assert native.weight_cache_limit() == limit


def test_what_others_keep_stays() -> None:
    assert native is not None
    native.clear_weight_cache()
    model, x = models.resnet8().eval(), np.zeros((1, 3, 32, 32), np.float32)
    with no_grad():
        model(Tensor(x))
    before = native.weight_cache_bytes()
    plan.compile(models.resnet8().eval(), x)
    assert native.weight_cache_bytes() >= before
    native.clear_weight_cache()
