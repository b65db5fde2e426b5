"""Text as token ids, and loaders whose position is enough to resume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise import data
from tilewise.errors import ConfigurationError, TilewiseError


def test_the_vocabulary_is_newline_and_printable_ascii():
    assert data.VOCABULARY[0] == "\n"
    assert len(data.VOCABULARY) == 96
    assert data.decode(np.arange(96)) == data.VOCABULARY


@given(st.text(alphabet=data.VOCABULARY))
def test_encoding_then_decoding_gives_the_same_text(string):
    assert data.decode(data.encode(string)) == string


def test_other_characters_are_spelled_or_become_question_marks():
    assert data.decode(data.encode("“a’s” – b…\té\x7f🙂")) == '"a\'s" - b...????'
    with pytest.raises(ConfigurationError):
        data.decode([96])
    assert data.decode(data.encode("a\udcff")) == "a?"  # a byte that is no UTF-8, as a terminal hands it over


def test_the_last_tenth_of_the_text_is_held_out():
    text = data.text()
    assert len(text.train) + len(text.valid) > 300_000
    assert len(text.valid) == (len(text.train) + len(text.valid)) // 10
    own = data.text("0123456789" * 10)
    assert data.decode(own.valid) == "0123456789"


def batches(loader: data.BatchLoader) -> list[tuple[int, ...]]:
    return [tuple(x) for x, y in loader if (x == y).all()]


def test_an_epoch_visits_every_example_once_in_an_order_of_its_own():
    loader = data.BatchLoader(np.arange(23), np.arange(23), batch_size=5, seed=3)
    first, second = batches(loader), batches(loader)
    assert [len(b) for b in first] == [5, 5, 5, 5, 3]
    assert sorted(sum(first, ())) == sorted(sum(second, ())) == list(range(23))
    assert first != second
    assert batches(data.BatchLoader(np.arange(23), np.arange(23), 5, seed=3)) == first
    assert batches(data.BatchLoader(np.arange(23), np.arange(23), 5, seed=4)) != first


def test_a_loader_resumed_in_the_middle_of_an_epoch_yields_what_was_left():
    loader = data.BatchLoader(np.arange(23), np.arange(23), batch_size=5, seed=3)
    batches(loader)
    rest = iter(loader)
    next(rest), next(rest)
    resumed = data.BatchLoader(np.arange(23), np.arange(23), batch_size=5)
    resumed.load_state_dict(loader.state_dict())
    assert [tuple(x) for x, _ in rest] == batches(resumed)
    assert batches(loader) == batches(resumed)


def test_text_batches_are_shifted_by_one_and_resume():
    loader = data.TextLoader(np.arange(100), batch_size=4, context=8, seed=1)
    for _ in range(3):
        x, y = loader.next()
        np.testing.assert_array_equal(x + 1, y)
        assert x.shape == (4, 8)
    resumed = data.TextLoader(np.arange(100), batch_size=4, context=8)
    resumed.load_state_dict(loader.state_dict())
    np.testing.assert_array_equal(loader.next()[0], resumed.next()[0])


def test_loaders_refuse_what_makes_no_batches():
    for call in (
        lambda: data.BatchLoader(np.arange(3), np.arange(3), 0),
        lambda: data.BatchLoader(np.arange(3), np.arange(2), 1),
        lambda: data.BatchLoader(np.arange(0), np.arange(0), 1),
        lambda: data.TextLoader(np.arange(8), 1, 8),
    ):
        with pytest.raises(TilewiseError):
            call()
