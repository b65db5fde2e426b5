"""The zoo: the published numbers of parameters, sizes other than the usual, the same weights from the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise import Tensor, no_grad
from tilewise.models import zoo

# in millions, as the papers and torchvision count them
PARAMETERS = {
    "resnet18": 11.69, "resnet50": 25.56, "resnext50": 25.03, "mobilenet_v2": 3.50, "mobilenet_v3": 5.48,
    "efficientnet_b0": 5.29, "shufflenet_v2": 2.28, "densenet121": 7.98, "squeezenet": 1.24, "unet": 7.76,
    "vit_tiny": 5.72, "bert_small": 28.50,
}  # fmt: skip


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_network_of_the_zoo_has_its_published_number_of_parameters(name: str) -> None:
    assert round(sum(p.size for p in zoo.ZOO[name]().parameters()) / 1e6, 2) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3", "shufflenet_v2", "densenet121", "squeezenet"])
def test_a_network_of_the_zoo_takes_odd_sizes(name: str) -> None:
    model = zoo.ZOO[name](classes=7).eval()
    with no_grad():
        out = model(Tensor(np.random.default_rng(0).standard_normal((2, 3, 75, 98)).astype(np.float32)))
    assert out.shape == (2, 7) and np.isfinite(out.data).all() and out.data.std() > 1e-4


def test_the_same_seed_gives_the_same_network() -> None:
    first, second = zoo.squeezenet(seed=3), zoo.squeezenet(seed=3)
    for (name, a), (_, b) in zip(first.named_tensors(), second.named_tensors(), strict=True):
        np.testing.assert_array_equal(a.data, b.data, err_msg=name)
    assert not np.array_equal(zoo.squeezenet(seed=4).features[0].weight.data, first.features[0].weight.data)
