"""pack_parameters: a model's matrices lie one after the other, and nothing else changes."""

from __future__ import annotations

import copy
import itertools

import numpy as np

from tilewise import models
from tilewise.nn import GPT, Linear
from tilewise.nn.module import pack_parameters


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_parameters_keep_their_values_and_stand_in_order_on_cache_lines() -> None:
    layers = [Linear(5, 7, rng=1), Linear(7, 3, rng=2), Linear(3, 40, rng=3)]
    before = [layer.weight.data.copy() for layer in layers]
    pack_parameters(layer.weight for layer in layers)
    places = [address(layer.weight.data) for layer in layers]
    assert all(place % 64 == 0 for place in places)
    assert places[1] - places[0] == 192 and places[2] - places[1] == 128
    for layer, old in zip(layers, before, strict=True):
        np.testing.assert_array_equal(layer.weight.data, old)
        assert layer.weight.data.flags.c_contiguous and layer.weight.data.flags.writeable


def test_a_gpt_has_its_matrices_in_the_order_in_which_a_token_reads_them() -> None:
    model = GPT(2, 32, 2, vocab=11, context=8)
    names = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    own = dict(model.named_parameters())
    reading = [f"blocks.{i}.{name}" for i in range(2) for name in names] + ["head.weight"]
    places = [address(own[name].data) for name in reading]
    sizes = [own[name].data.nbytes for name in reading]
    assert [b - a for a, b in itertools.pairwise(places)] == sizes[:-1]


def test_a_copied_model_and_a_float64_one_are_independent() -> None:
    model = models.gpt("4x128")
    twin = copy.deepcopy(model)
    twin.head.weight.data[:] = 0
    assert np.abs(model.head.weight.data).max() > 0
    assert model.astype(np.float64).head.weight.dtype == np.float64
