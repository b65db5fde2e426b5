"""What a model's engine prepares is kept with the model, and never outlives a change of its weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.errors import ConfigurationError
from tilewise.generate import generate, make_engine
from tilewise.nn import GPT

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
KINDS = ["float32", "int8", "int4"]


def small(seed: int = 3) -> GPT:
    return GPT(2, 48, 3, vocab=31, context=40, rng=seed)


def tokens(model: GPT, weights: str) -> list[int]:
    return list(generate(model, [1, 2, 3], 30, weights=weights))


def write_into_the_array(model: GPT, other: GPT) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data[...] = theirs.data


def replace_the_arrays(model: GPT, other: GPT) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data.copy()


def replace_a_layer(model: GPT, other: GPT) -> None:
    model.head, model.blocks, model.norm = other.head, other.blocks, other.norm
    model.token_embedding, model.position_embedding = other.token_embedding, other.position_embedding


CHANGES = [
    lambda model, other: model.load_state_dict(other.state_dict()),
    write_into_the_array,
    replace_the_arrays,
    replace_a_layer,
]


@pytest.mark.parametrize("weights", KINDS)
def test_the_next_generation_finds_the_engine_ready(weights: str) -> None:
    model = small()
    engine = make_engine(model, weights)
    tokens(model, weights)
    assert make_engine(model, weights) is engine
    assert make_engine(small(), weights) is not engine


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("change", CHANGES, ids=["load_state_dict", "in place", "arrays", "layers"])
def test_tokens_are_those_of_the_weights_as_they_are_now(change: Callable[[GPT, GPT], None], weights: str) -> None:
    model, other = small(), small(seed=8)
    before, expected = tokens(model, weights), tokens(copy.deepcopy(other), weights)
    assert before != expected
    change(model, other)
    assert tokens(model, weights) == expected


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("index", [0, 1, 767, 768, -1])
def test_one_changed_weight_makes_integer_copies_stale(index: int, weights: str) -> None:
    model = small()
    engine = make_engine(model, weights)
    model.blocks[1].linear2.weight.data.flat[index] += 1e-3
    assert make_engine(model, weights) is not engine


def test_a_changed_setting_makes_a_new_engine() -> None:
    model = small()
    engine = make_engine(model)
    model.norm.eps = 1e-3
    assert make_engine(model) is not engine


def test_a_copied_model_has_an_engine_of_its_own() -> None:
    model = small()
    expected = tokens(model, "int8")
    twin = copy.deepcopy(model)
    model.head.weight.data[...] = 0
    assert tokens(twin, "int8") == expected


def test_what_was_prepared_goes_with_the_model() -> None:
    gc.collect()
    before = native.memory_in_use()
    model = small()
    tokens(model, "int8")
    assert native.memory_in_use() > before
    del model
    gc.collect()
    assert native.memory_in_use() == before


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_without_an_int8_form_are_refused(value: float) -> None:
    model = small()
    model.blocks[0].linear1.weight.data[5, 47] = value
    with pytest.raises(ConfigurationError, match="NaN or infinity, which have no int8 form"):
        generate(model, [1], 2, weights="int8")
