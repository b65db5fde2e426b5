"""Scoring in the open division: a plugin answers from its sandbox; this process has the clock, inputs and labels.

All questions are drawn alike when the plugin is scored, and come in random order: some are timed, some are not, and
some come twice, because an answer may depend on its question only. Every answer is checked. Only the first occurrence
of a timed question counts for speed. CPU time while no question is open is added to the time of the answers, so that
work before or after them gains nothing; output then is rejected. The baseline answers from its own sandbox of the same
kind. A third sandbox returns zeros; no plugin is faster than that, or than its arithmetic.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend import OptimizedBackend
from tilewise.bench.drawing import prompts_without_loops
from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.floor import check_floor, least_plugin_seconds
from tilewise.bench.integrity import ClockWatch, check_baseline_speed
from tilewise.bench.measure import Gain, Settings, file_bytes
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.scoring import Score
from tilewise.bench.validation import check_accuracy, check_agreement, check_logits, check_tokens
from tilewise.errors import Rejected, TooNoisy
from tilewise.profile.timing.statistics import signed_rank_test
from tilewise_arena.sandbox import bubblewrap, wire
from tilewise_arena.sandbox.host import Host, Submitted, hosted

Array = npt.NDArray[Any]
_UNTIMED_PROMPTS = 4  # arbitrary
# The baseline in its sandbox may be this much slower than outside: a factor, and the time of the pipe.
_MAX_SLOWDOWN, _PIPE_SECONDS = 3.0, 2e-3
_FLOOR_FRACTION = 0.7  # a plugin must take at least this fraction of the time of an empty answer


@dataclass
class PluginCall:
    """One question to a plugin: the inputs, image labels, and the question that it repeats, if any."""

    inputs: Array
    labels: Array | None
    is_timed: bool
    repeats: int | None = None


@dataclass
class Answers:
    """A plugin's answers by question index, and the seconds of those that count for speed."""

    outputs: dict[int, Array] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    idle_seconds: float = 0.0  # processor time between two questions, included in `seconds`


def questions_for(event: Event, rng: np.random.Generator, count: int) -> list[PluginCall]:
    """Draw `count` timed questions and some that are not timed, and repeat every fourth timed one.

    All images are transformed in the same way, the held-out ones too, so that a plugin cannot tell what they are for.
    """
    if event.kind == "images":
        held_out, labels = event.public_inputs(), event.public_labels()
        indices = np.resize(rng.permutation(len(labels)), -(-len(labels) // event.batch) * event.batch)
        questions = _batches(event, event.transform(held_out[indices], rng), labels[indices], is_timed=False)
        questions += _batches(event, *event.draw_labelled(rng, count * event.batch, held_out=True), is_timed=True)
    else:
        prompts = _unpredictable_prompts(event, rng, _UNTIMED_PROMPTS + count)
        questions = [PluginCall(prompt, None, is_timed=at >= _UNTIMED_PROMPTS) for at, prompt in enumerate(prompts)]
    timed_indices = [at for at, question in enumerate(questions) if question.is_timed]
    return questions + [replace(questions[at], repeats=at) for at in timed_indices[::4]]


def _batches(event: Event, images: Array, labels: Array, is_timed: bool) -> list[PluginCall]:
    """Split images with their labels into questions, one per batch of the event's size."""
    inputs = images.reshape(-1, event.batch, *event.input_shape)
    return [
        PluginCall(*batch, is_timed=is_timed) for batch in zip(inputs, labels.reshape(len(inputs), -1), strict=True)
    ]


def _unpredictable_prompts(event: Event, rng: np.random.Generator, count: int) -> Array:
    """Draw prompts whose continuation does not end in a loop, which needs no computing to repeat."""
    fast = Runner(event, event.model(), OptimizedBackend(), use_cache=True)
    return prompts_without_loops(
        lambda number: event.draw(rng, number), lambda prompt: fast.answer(prompt[None])[0], count
    )


def score_plugin(plugin: str | Path, event: Event | str, settings: Settings | None = None, threads: int = 1) -> Score:
    """Validate and score a plugin on this machine; raises Rejected or TooNoisy if there is no score."""
    settings, event = settings or Settings(), TinyMLPerf.event(event)
    event.check_timed()
    bubblewrap.require_sandbox()
    deadline = time.monotonic() + settings.run_seconds
    submitted = Submitted.read(Path(plugin).absolute())
    rng, clock = settings.rng(), ClockWatch()
    count = (settings.runs or event.runs) * (4 if event.kind == "images" else 1)
    questions = questions_for(event, rng, count)
    reference = baseline(event)
    size, bytes_ = _size_gain(submitted, reference)
    with (
        hosted("plugin", submitted, event, threads, deadline) as entry,
        hosted("baseline", submitted, event, threads, deadline) as plain,
    ):
        base, ours = _ask_interleaved(plain, entry, questions, rng)
        baseline_bytes = plain.memory_bytes(_least_memory(event, file_bytes(reference)))
        memory = baseline_bytes / entry.memory_bytes(_least_memory(event, bytes_))
    clock.check()
    validation = _check_answers(event, questions, ours, reference)
    _check_baseline(event, reference, questions, plain.quickest)
    _check_floor(reference, questions, ours, threads, deadline)
    latency = _check_noise(base.seconds, ours.seconds, settings)
    before, after = float(np.median(base.seconds)), float(np.median(ours.seconds))
    sides = {  # memory and size are multiples of the entry's
        "baseline": {"latency_s": {"p50": before}, "memory_bytes": memory, "file_bytes": size},
        "entry": {"latency_s": {"p50": after}, "memory_bytes": 1.0, "file_bytes": 1.0},
    }
    sides["entry"] |= {"stored_bytes": bytes_, "throughput": event.units_per_call / after}
    notes = ["timed over a pipe; entry and baseline each in their own sandbox"]
    notes.append(f"an answer's time includes {1e6 * ours.idle_seconds:.0f} µs of processor time between questions")
    return Score.of_gains(
        event.name, latency, memory, size,
        figures=sides, steps=[], validation=validation, notes=notes, practice=settings.practice,
    )  # fmt: skip


def _least_memory(event: Event, weight_bytes: int) -> int:
    """Return the bytes that any program for this event needs: weights, a question and an answer."""
    layouts = (wire.question_of(event), wire.answer_of(event))
    return weight_bytes + sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in layouts)


def _check_baseline(event: Event, reference: Runner, questions: list[PluginCall], quickest: float) -> None:
    """Raise TooNoisy if the baseline was much slower in its sandbox (`quickest` seconds) than it is outside."""
    inputs = [q.inputs for q in questions if q.is_timed]
    check_baseline_speed(event, reference, inputs[0], under_load=True)
    outside = []
    with reference.active():
        for x in inputs[: 2 if event.kind == "text" else 20]:
            start = time.perf_counter()
            reference.call(x)
            outside.append(time.perf_counter() - start)
    if quickest > _MAX_SLOWDOWN * min(outside) + _PIPE_SECONDS:
        raise TooNoisy(
            f"not scored: the baseline took {1e3 * quickest:.2f} ms at best in its sandbox and "
            f"{1e3 * min(outside):.2f} ms outside; something else uses this machine"
        )


def _check_floor(reference: Runner, questions: list[PluginCall], ours: Answers, threads: int, deadline: float) -> None:
    """Reject a plugin that is faster than its arithmetic, or than an empty plugin over the same pipe."""
    inputs = [q.inputs for q in questions if q.is_timed]
    with hosted("empty", Submitted({}), reference.event, threads, deadline) as empty:
        seconds = [empty.ask(x)[1] for x in inputs[:40]]
    floor, median = min(seconds), float(np.median(ours.seconds))
    if median < _FLOOR_FRACTION * floor:
        raise Rejected(
            "below the floor of time",
            f"an answer took {1e6 * median:.0f} µs, and an empty one over the same pipe takes {1e6 * floor:.0f} µs: no "
            "program on this machine is that fast",
        )
    check_floor(median, lambda machine: least_plugin_seconds(reference, threads, machine))


def _ask_interleaved(
    plain: Host, entry: Host, questions: list[PluginCall], rng: np.random.Generator
) -> tuple[Answers, Answers]:
    """Ask both plugins all questions in one random order; a coin decides which answers first each time."""
    base, ours = Answers(), Answers()
    for host in (plain, entry):
        host.ask(questions[0].inputs)
        host.idle = 0.0
    asked_before: set[int] = set()
    for at in (int(i) for i in rng.permutation(len(questions))):
        question = questions[at]
        original = at if question.repeats is None else question.repeats
        counts = question.is_timed and original not in asked_before
        asked_before.add(original)
        sides = [(plain, base), (entry, ours)]
        for host, answers in sides if rng.integers(2) else sides[::-1]:
            time.sleep(float(rng.uniform(0, 2e-3)))  # makes work between questions visible as idle CPU time
            answers.outputs[at], seconds = host.ask(question.inputs, watched=not counts)
            if counts:
                answers.seconds.append(seconds)
    for host, answers in ((plain, base), (entry, ours)):
        answers.idle_seconds = host.idle / len(asked_before)
        answers.seconds = [seconds + answers.idle_seconds for seconds in answers.seconds]
    return base, ours


def _check_answers(event: Event, questions: list[PluginCall], ours: Answers, reference: Runner) -> dict[str, Any]:
    """Compare the plugin's answers with the reference's, and repeated questions with each other; reject wrong ones.

    Returns the measured quality for the score's record.
    """
    for at, question in enumerate(questions):
        if question.repeats is not None and not _equal(ours.outputs[at], ours.outputs[question.repeats]):
            raise Rejected(
                "wrong answer", "the same question got two different answers; answers must depend on the question alone"
            )
    if event.kind == "images":
        return _check_images(event, questions, ours, reference)
    tokens = [ours.outputs[at] for at in range(len(questions))]
    if any(np.shape(answer) != (event.new_tokens,) for answer in tokens):
        raise Rejected("wrong answer", f"the plugin does not answer a prompt with {event.new_tokens} tokens")
    check_tokens(np.stack(tokens), np.stack([question.inputs for question in questions]), reference)
    return {"accuracy": 1.0, "floor": 1.0, "checks": [f"every token equal on {len(questions)} prompts"]}


def _check_images(event: Event, questions: list[PluginCall], ours: Answers, reference: Runner) -> dict[str, Any]:
    """Reject a plugin with too little accuracy on all images, or agreement with the reference's logits.

    Every question counts, the timed ones too: wrong answers to some of them are lost accuracy like any other. Returns
    the measured quality.
    """
    for answer in ours.outputs.values():
        check_logits(answer, event.batch)
    originals = [at for at, question in enumerate(questions) if question.repeats is None]
    labels = np.concatenate([np.asarray(questions[at].labels) for at in originals])
    expected = reference.answer(np.concatenate([questions[at].inputs for at in originals]))
    answers = np.concatenate([ours.outputs[at] for at in originals])
    floor = check_accuracy(answers, expected, labels, event, "digits, transformed and with new noise")
    agreement, clear = check_agreement(answers, expected, event)
    share = (answers.argmax(1) == labels).mean()
    checks = [f"{100 * share:.2f} % of {len(labels)} transformed images, floor {100 * floor:.2f} %"]
    checks += [f"the reference's class on {100 * agreement:.1f} % of {clear} clear images"]
    return {"accuracy": float(share), "floor": floor, "agreement": agreement, "checks": checks}


def _equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-3, atol=1e-3))


def _size_gain(submitted: Submitted, reference: Runner) -> tuple[float, int]:
    """Return the shipped file's bytes divided by those that the plugin needs, and the latter.

    Everything that a plugin brings counts, its code too, which could contain weights or a table of answers. A plugin
    without other files can use the shipped weights, so these count as well.
    """
    shipped = file_bytes(reference)
    needed_bytes = submitted.size + (0 if submitted.brings_weights else shipped)
    return shipped / needed_bytes, needed_bytes


def _check_noise(base: list[float], ours: list[float], settings: Settings) -> Gain:
    """Return the gain in speed from seconds per question; raise TooNoisy if its interval is too wide."""
    test = signed_rank_test(np.log(base) - np.log(ours))
    speedup, low, high = (math.exp(v) for v in (test.centre, test.interval.low, test.interval.high))
    if not settings.practice and (high - low) / (2 * speedup) > settings.widest_interval:
        raise TooNoisy(f"not scored: the speed-up of {speedup:.2f} is known only from {low:.2f} to {high:.2f}")
    return Gain(speedup, low, high)
