"""Questions are new: no table, no learned held-out image and no visible difference between questions helps."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from tilewise import data
from tilewise.backend import OptimizedBackend
from tilewise.bench import Rejected, Settings, TinyMLPerf, build, floor
from tilewise.bench.drawing import ends_in_a_loop, prompts_without_loops, transformed_digits
from tilewise.bench.events import Event
from tilewise.bench.floor import check_floor, least_plugin_seconds
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.validation import validate
from tilewise.prune import prune
from tilewise_arena.sandbox.host import Submitted
from tilewise_arena.sandbox.score import Answers, PluginCall, _check_images, _size_gain, questions_for

MLP, TEXT = TinyMLPerf.MLP_SPRINT, TinyMLPerf.TRANSFORMER_DECATHLON


@lru_cache
def _questions() -> list[PluginCall]:
    return questions_for(MLP, np.random.default_rng(3), 96)


def test_prompts_are_not_windows_of_the_text() -> None:
    corpus = data.text()
    text = np.concatenate([corpus.train, corpus.valid])
    windows = {text[at : at + 32].tobytes() for at in range(len(text) - 32)}
    prompts = TEXT.draw(np.random.default_rng(0), 200)
    assert not windows & {prompt.tobytes() for prompt in prompts}
    assert prompts.min() >= 0 and prompts.max() < 96


def test_a_loop_at_the_end_of_a_text_is_recognised() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 96, 200)
    assert not ends_in_a_loop(tokens)
    assert ends_in_a_loop(np.resize(tokens[:50], 200))
    assert ends_in_a_loop(np.concatenate([tokens[:160], np.zeros(40, np.int64)]))
    assert not ends_in_a_loop(np.concatenate([np.resize(tokens[:5], 150), tokens[:50]]))


def test_prompts_that_lead_into_loops_are_replaced() -> None:
    rng = np.random.default_rng(0)
    endings = {0: np.zeros(200, np.int64), 1: rng.integers(0, 96, 200)}
    prompts = prompts_without_loops(lambda n: rng.integers(0, 2, (n, 1)), lambda prompt: endings[int(prompt[0])], 5)
    assert prompts.ravel().tolist() == [1] * 5
    assert len(prompts_without_loops(lambda n: np.zeros((n, 1)), lambda prompt: endings[0], 2)) == 2


def test_transformed_digits_keep_their_shape_range_and_class() -> None:
    images = data.digits()
    transformed = transformed_digits(images.x_test, np.random.default_rng(0))
    assert transformed.shape == images.x_test.shape and transformed.dtype == np.float32
    assert transformed.min() >= 0 and transformed.max() <= 1
    logits = baseline(MLP).answer(transformed.reshape(len(transformed), -1))
    assert (logits.argmax(1) == images.y_test).mean() > 0.94


def test_no_question_shows_what_it_is_for() -> None:
    """Exact sixteenths were held-out images once, and everything else was known to be checked less strictly."""
    for question in _questions():
        assert not (question.inputs * 16 == np.round(question.inputs * 16)).all(1).any()
        assert question.labels is not None and question.labels.shape == (32,)


def _answers(wrong_share: float) -> Answers:
    """Answers of the shipped model, of which a share is wrong."""
    questions, rng = _questions(), np.random.default_rng(0)
    outputs = {at: baseline(MLP).answer(question.inputs) for at, question in enumerate(questions)}
    for answer in outputs.values():
        wrong = rng.random(len(answer)) < wrong_share
        answer[wrong] = np.roll(answer[wrong], 1, axis=1)
    return Answers(outputs, [])


def test_deliberate_errors_count_on_every_question() -> None:
    reference = baseline(MLP)
    assert _check_images(MLP, _questions(), _answers(0.005), reference)["accuracy"] > 0.95
    with pytest.raises(Rejected, match="more than 1 point"):
        _check_images(MLP, _questions(), _answers(0.03), reference)


def test_everything_that_a_plugin_brings_counts_as_its_size() -> None:
    reference = baseline(MLP)
    small, shipped = _size_gain(Submitted({"plugin.py": b"x" * 400}), reference)
    assert 0.99 < small < 1 and shipped > 100_000
    table, _ = _size_gain(Submitted({"plugin.py": b"x" * shipped}), reference)
    assert table == pytest.approx(0.5, rel=0.01)
    own, plugin_bytes = _size_gain(Submitted({"plugin.py": b"x" * 400, "w": b"y" * 600}), reference)
    assert plugin_bytes == 1001 and own > 100


@pytest.mark.parametrize("event", [MLP, TinyMLPerf.CNN_MARATHON, TEXT])
def test_every_event_has_a_floor_by_arithmetic(event: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer to a prompt from a table takes 60 microseconds; the arithmetic of 200 tokens does not."""
    fast = floor.Ceilings(4e11, 1e12)  # operations and bytes a second of a fast core
    monkeypatch.setattr(floor, "ceilings", lambda: fast)
    monkeypatch.setattr(floor, "measure_ceilings", lambda attempts: fast)
    monkeypatch.setattr(floor, "_INT8_TILES", 4.0)
    reference = baseline(event)
    least = least_plugin_seconds(reference)
    assert least > (1e-4 if event is TEXT else 1e-8)
    with pytest.raises(Rejected, match="arithmetic"):
        check_floor(0.1 * least, lambda machine: least_plugin_seconds(reference, 1, machine))


def test_held_out_images_that_were_learned_do_not_help(quick: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model pruned to a fifth passes on the held-out images it was trained on, and loses elsewhere."""
    images = data.digits().flat()
    everything = np.concatenate([images.x_train, images.x_test]), np.concatenate([images.y_train, images.y_test])
    monkeypatch.setattr(Event, "training_images", lambda self: everything)
    model = copy.deepcopy(MLP.model())
    for sparsity in (0.6, 0.82):
        model = prune(model, sparsity, "global")
        build.retrain(model, MLP, 8, 0, model.pruning.apply)  # type: ignore[attr-defined]
    entry = Runner(MLP, model.eval(), OptimizedBackend())
    with pytest.raises(Rejected, match="training images, transformed"):
        validate(entry, baseline(MLP), replace(quick, drawn_inputs=512))
