"""Scoring in the open division: a plugin answers from its sandbox; this process has the clock, inputs and labels.

Questions of all kinds look alike and come in random order: public inputs for accuracy, inputs drawn now for speed, and
some inputs twice, because an answer may depend on its question only. Every answer is checked. Only the first occurrence
of a drawn input counts for speed. CPU time and output while no question is open are detected. The baseline answers from
its own sandbox of the same kind. A third sandbox returns zeros, which gives the floor: no plugin is faster than that.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.bench.errors import Rejected, TooNoisy
from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.integrity import ClockWatch, check_baseline_speed
from tilewise.bench.measure import Settings, file_bytes
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.scoring import Score, combined, machine_facts
from tilewise.bench.validation import check_accuracy, check_agreement, check_fresh, check_logits, check_tokens
from tilewise.profile.timing.statistics import signed_rank_test
from tilewise_arena.sandbox import bubblewrap, wire
from tilewise_arena.sandbox.host import Host, Submitted, hosted

Array = npt.NDArray[Any]
_FRESH_BATCHES = 8  # batches of newly disturbed images for the accuracy check
# The baseline in its sandbox may be this much slower than outside: a factor, and the time of the pipe.
_MAX_SLOWDOWN, _PIPE_SECONDS = 3.0, 2e-3
_FLOOR_FRACTION = 0.7  # a plugin must take at least this fraction of the time of an empty answer


@dataclass
class Question:
    """One call of the plugin: the inputs, the kind of question, and the question that it repeats."""

    inputs: Array
    kind: str  # "public", "drawn", "fresh" (held-out images disturbed anew) or "repeat"
    of: int = -1
    labels: Array | None = None


@dataclass
class Answers:
    """Answers by the index of the question, and the seconds of those that count for speed."""

    outputs: dict[int, Array] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def questions_for(event: Event, rng: np.random.Generator, drawn: int) -> list[Question]:
    """Make the questions: public inputs, `drawn` new inputs, disturbed images, and every fourth new input again."""
    if event.kind == "images":
        public = event.public_inputs()
        padded = np.concatenate([public, public[: -len(public) % event.batch]])
        batches = list(padded.reshape(-1, event.batch, *event.input_shape))
    else:
        batches = list(event.public_inputs()[:4])
    new = event.timed_inputs(rng, drawn)
    questions = [Question(b, "public") for b in batches] + [Question(b, "drawn") for b in new]
    if event.kind == "images":
        x, y = event.draw_labelled(rng, _FRESH_BATCHES * event.batch)
        batches_with_labels = zip(
            x.reshape(_FRESH_BATCHES, event.batch, *event.input_shape), y.reshape(_FRESH_BATCHES, -1), strict=True
        )
        questions += [Question(images, "fresh", labels=labels) for images, labels in batches_with_labels]
    first = len(batches)
    return questions + [Question(new[i], "repeat", first + i) for i in range(0, drawn, 4)]


def score_plugin(plugin: str | Path, event: Event | str, settings: Settings | None = None, threads: int = 1) -> Score:
    """Validate and score a plugin on this machine; raises Rejected or TooNoisy if there is no score."""
    settings, event = settings or Settings(), TinyMLPerf.event(event)
    event.check_timed()
    bubblewrap.require_sandbox()
    deadline = time.monotonic() + settings.run_seconds
    submitted = Submitted.read(Path(plugin).absolute())
    rng, clock = settings.rng(), ClockWatch()
    drawn = (settings.runs or event.runs) * (4 if event.kind == "images" else 1)
    questions = questions_for(event, rng, drawn)
    reference = baseline(event)
    size, bytes_ = _size_gain(submitted, reference)
    with (
        hosted("plugin", submitted, event, threads, deadline) as entry,
        hosted("baseline", submitted, event, threads, deadline) as plain,
    ):
        base, ours = _ask_interleaved(plain, entry, questions, rng)
        entry.check_idle()
        baseline_bytes = plain.memory_bytes(_least_memory(event, file_bytes(reference)))
        memory = baseline_bytes / entry.memory_bytes(_least_memory(event, bytes_))
    clock.check()
    validation = _check_answers(event, questions, ours, reference, rng)
    _check_baseline(event, reference, questions, plain.quickest)
    _check_floor(event, submitted, questions, ours, threads, deadline)
    return _score(
        event=event, base=base.seconds, ours=ours.seconds, memory=memory, size=size, file_size=bytes_,
        validation=validation, settings=settings,
    )  # fmt: skip


def _least_memory(event: Event, stored: int) -> int:
    """Return the bytes that any program for this event needs: weights, a question and an answer."""
    layouts = (wire.question_of(event), wire.answer_of(event))
    return stored + sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in layouts)


def _check_baseline(event: Event, reference: Runner, questions: list[Question], quickest: float) -> None:
    """Check that the baseline in its sandbox is not much slower than outside, and that its answers are right."""
    inputs = [q.inputs for q in questions if q.kind == "drawn"]
    check_baseline_speed(event, reference, inputs[0], under_load=True)
    outside = []
    with reference.active():
        for x in inputs[: 2 if event.kind == "text" else 20]:
            start = time.perf_counter()
            reference.call(x)
            outside.append(time.perf_counter() - start)
    if quickest > _MAX_SLOWDOWN * min(outside) + _PIPE_SECONDS:
        raise Rejected(
            "slowed baseline",
            f"the baseline took {1e3 * quickest:.2f} ms at best in its sandbox and {1e3 * min(outside):.2f} ms outside",
        )


def _check_floor(
    event: Event, submitted: Submitted, questions: list[Question], ours: Answers, threads: int, deadline: float
) -> None:
    """Reject a plugin that is faster than a program that reads the question and writes zeros."""
    inputs = [q.inputs for q in questions if q.kind == "drawn"]
    with hosted("empty", submitted, event, threads, deadline) as empty:
        seconds = [empty.ask(x)[1] for x in inputs[:40]]
    floor, median = min(seconds), float(np.median(ours.seconds))
    if median < _FLOOR_FRACTION * floor:
        raise Rejected(
            "below the floor of time",
            f"an answer took {1e6 * median:.0f} µs, and an empty one over the same pipe takes {1e6 * floor:.0f} µs: no "
            "program on this machine is that fast",
        )


def _ask_interleaved(
    plain: Host, entry: Host, questions: list[Question], rng: np.random.Generator
) -> tuple[Answers, Answers]:
    """Ask both plugins all questions, interleaved in one random order; a coin decides who answers first."""
    base, ours = Answers(), Answers()
    for host in (plain, entry):
        host.ask(questions[0].inputs)
    plain.idle = entry.idle = plain.busy = entry.busy = 0.0
    asked_before: set[int] = set()
    for at in (int(i) for i in rng.permutation(len(questions))):
        question = questions[at]
        which = question.of if question.kind == "repeat" else at
        counts = question.kind in ("drawn", "repeat") and which not in asked_before
        asked_before.add(which)
        sides = [(plain, base), (entry, ours)]
        for host, answers in sides if rng.integers(2) else sides[::-1]:
            time.sleep(float(rng.uniform(0, 2e-3)))  # makes work between questions visible as idle CPU time
            answers.outputs[at], seconds = host.ask(question.inputs, watched=not counts)
            if counts:
                answers.seconds.append(seconds)
    return base, ours


def _check_answers(
    event: Event, questions: list[Question], ours: Answers, reference: Runner, rng: np.random.Generator
) -> dict[str, Any]:
    """Check that repeated questions got equal answers, and that all answers are right."""
    for at, question in enumerate(questions):
        if question.kind == "repeat" and not _equal(ours.outputs[at], ours.outputs[question.of]):
            raise Rejected("wrong answer", "the same question got two different answers: they depend on something else")
    public = [at for at, q in enumerate(questions) if q.kind == "public"]
    drawn = [at for at, q in enumerate(questions) if q.kind in ("drawn", "repeat")]
    if event.kind == "text":
        prompts = np.stack([questions[at].inputs for at in public + drawn])
        tokens = [ours.outputs[at] for at in public + drawn]
        if any(np.shape(answer) != (event.new_tokens,) for answer in tokens):
            raise Rejected("wrong answer", f"the plugin does not answer a prompt with {event.new_tokens} tokens")
        check_tokens(np.stack(tokens), prompts, reference)
        return {"accuracy": 1.0, "floor": 1.0, "checks": [f"every token equal on {len(prompts)} prompts"]}
    return _check_images(event, questions, ours, reference, public, drawn)


def _check_images(
    event: Event, questions: list[Question], ours: Answers, reference: Runner, public: list[int], drawn: list[int]
) -> dict[str, Any]:
    """Check accuracy on public and on disturbed images, and agreement with the reference on drawn images."""
    for answer in ours.outputs.values():
        check_logits(answer, event.batch)
    labels = event.public_labels()
    answered = np.concatenate([ours.outputs[at] for at in public])[: len(labels)]
    share = float((answered.argmax(1) == labels).mean())
    plain = float((reference.answer(event.public_inputs()).argmax(1) == labels).mean())
    floor = plain - event.points_to_lose / 100
    check_accuracy(share, floor, event)
    fresh = [at for at, q in enumerate(questions) if q.kind == "fresh"]
    plain_fresh = reference.answer(np.concatenate([questions[at].inputs for at in fresh]))
    fresh_logits = np.concatenate([ours.outputs[at] for at in fresh])
    classes = np.concatenate([np.asarray(questions[at].labels) for at in fresh])
    check_fresh(fresh_logits, plain_fresh, classes, event, "held-out images, shifted and with new noise")
    expected = reference.answer(np.concatenate([questions[at].inputs for at in drawn]))
    agreement, used = check_agreement(np.concatenate([ours.outputs[at] for at in drawn]), expected, event)
    checks = [f"{100 * share:.2f} % of {len(labels)} held-out images, floor {100 * floor:.2f} %"]
    checks += [f"the reference's class on {100 * agreement:.1f} % of {used} drawn images"]
    return {"accuracy": share, "floor": floor, "agreement": agreement, "checks": checks}


def _equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-3, atol=1e-3))


def _size_gain(submitted: Submitted, reference: Runner) -> tuple[float, int]:
    """Return the ratio of the shipped file's bytes to the plugin's, and the plugin's bytes.

    A plugin without files uses the shipped weights, so its ratio is 1.
    """
    shipped = file_bytes(reference)
    return (shipped / submitted.size, submitted.size) if submitted.brings_weights else (1.0, shipped)


def _score(
    event: Event,
    base: list[float],
    ours: list[float],
    memory: float,
    size: float,
    file_size: int,
    validation: dict[str, Any],
    settings: Settings,
) -> Score:
    """Combine the gains in speed, memory and size; raises TooNoisy if the speed-up is too uncertain."""
    test = signed_rank_test(np.log(base) - np.log(ours))
    speedup, low, high = (math.exp(v) for v in (test.centre, test.interval.low, test.interval.high))
    if not settings.practice and (high - low) / (2 * speedup) > settings.widest_interval:
        raise TooNoisy(f"not scored: the speed-up of {speedup:.2f} is known only from {low:.2f} to {high:.2f}")
    sides = {
        "baseline": {"latency_s": {"p50": float(np.median(base))}, "memory_bytes": memory, "file_bytes": size},
        "entry": {"latency_s": {"p50": float(np.median(ours))}, "memory_bytes": 1.0, "file_bytes": 1.0},
    }
    sides["entry"] |= {"stored_bytes": file_size, "throughput": event.units_per_call / float(np.median(ours))}
    interval = combined(low, memory, size), combined(high, memory, size)
    return Score(
        event=event.name,
        score=combined(speedup, memory, size),
        speedup=speedup,
        memory_gain=memory,
        size_gain=size,
        interval=interval,
        figures=sides,
        steps=[],
        validation=validation,
        machine=machine_facts(),
        notes=["timed over a pipe; entry and baseline each in their own sandbox"],
        practice=settings.practice,
    )
