"""The open division: a Python file answers from its jail, and this process holds the clock, the inputs and the truth.

Every question looks alike and comes once for accuracy (public inputs), once for speed (inputs drawn now), some twice
(an answer may depend on nothing but its question), in random order; every answer is checked, so there is no other time
at which to be right. Only drawn questions asked for the first time count for speed. Processor time that the plugin
spends while no question is open is counted too, and so is whatever it writes then. The baseline answers from a jail of
its own, of the same kind; a third one answers nothing at all, which is the floor: nobody is faster than the pipe.
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
from tilewise_arena.sandbox import jail, wire
from tilewise_arena.sandbox.host import Host, Submitted, hosted

Array = npt.NDArray[Any]
_FRESH = 8  # batches of images that nobody has, to judge accuracy on
_SLOWED, _PIPE_SECONDS = 3.0, 2e-3  # the baseline's distance to itself outside of the jail
_FLOOR_SHARE = 0.7  # of an empty answer's time


# --- questions ---


@dataclass
class Question:
    """One call: what is asked, whether its time counts, and which question it repeats."""

    inputs: Array
    kind: str  # "public", "drawn", "fresh" (held-out images disturbed anew) or "repeat"
    of: int = -1
    labels: Array | None = None


@dataclass
class Answers:
    """Answers in the order of the questions, and the seconds of those that count."""

    given: dict[int, Array] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def questions_for(event: Event, rng: np.random.Generator, drawn: int) -> list[Question]:
    """Public inputs, inputs drawn now, and some of these a second time; images in batches of the event's size."""
    if event.kind == "images":
        public = event.public_inputs()
        padded = np.concatenate([public, public[: -len(public) % event.batch]])
        batches = list(padded.reshape(-1, event.batch, *event.input_shape))
    else:
        batches = list(event.public_inputs()[:4])
    new = event.timed_inputs(rng, drawn)
    asked = [Question(b, "public") for b in batches] + [Question(b, "drawn") for b in new]
    if event.kind == "images":
        x, y = event.draw_labelled(rng, _FRESH * event.batch)
        parts = zip(x.reshape(_FRESH, event.batch, *event.input_shape), y.reshape(_FRESH, -1), strict=True)
        asked += [Question(images, "fresh", labels=labels) for images, labels in parts]
    first = len(batches)
    return asked + [Question(new[i], "repeat", first + i) for i in range(0, drawn, 4)]


def score_plugin(plugin: str | Path, event: Event | str, settings: Settings | None = None, threads: int = 1) -> Score:
    """Validate and score a plugin on this machine; Rejected and TooNoisy say why there is no score."""
    settings, event = settings or Settings(), TinyMLPerf.event(event)
    event.check_timed()
    jail.check()
    submitted = Submitted.read(Path(plugin).absolute())
    rng, clock = settings.rng(), ClockWatch()
    drawn = (settings.runs or event.runs) * (4 if event.kind == "images" else 1)
    questions = questions_for(event, rng, drawn)
    reference = baseline(event)
    size, bytes_ = _size_gain(submitted, reference)
    with hosted("plugin", submitted, event, threads) as entry, hosted("baseline", submitted, event, threads) as plain:
        base, ours = _interrogate(plain, entry, questions, rng)
        entry.check_idle()
        held = plain.memory_bytes(_least_memory(event, file_bytes(reference)))
        memory = held / entry.memory_bytes(_least_memory(event, bytes_))
    clock.check()
    validation = _check_answers(event, questions, ours, reference, rng)
    _check_baseline(event, reference, questions, plain.quickest)
    _check_floor(event, submitted, questions, ours, threads)
    return _score(event, base.seconds, ours.seconds, memory, size, bytes_, validation, settings)


def _least_memory(event: Event, stored: int) -> int:
    """Bytes that a program for this event holds at the least."""
    layouts = (wire.question_of(event), wire.answer_of(event))
    return stored + sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in layouts)


def _check_baseline(event: Event, reference: Runner, questions: list[Question], quickest: float) -> None:
    """The baseline in its jail keeps the distance that it has outside of it, and its answers are right."""
    inputs = [q.inputs for q in questions if q.kind == "drawn"]
    check_baseline_speed(event, reference, inputs[0], under_load=True)
    here = []
    with reference.active():
        for x in inputs[: 2 if event.kind == "text" else 20]:
            start = time.perf_counter()
            reference.call(x)
            here.append(time.perf_counter() - start)
    if quickest > _SLOWED * min(here) + _PIPE_SECONDS:
        raise Rejected(
            "slowed baseline",
            f"the baseline took {1e3 * quickest:.2f} ms at best in its jail and {1e3 * min(here):.2f} ms here",
        )


def _check_floor(event: Event, submitted: Submitted, questions: list[Question], ours: Answers, threads: int) -> None:
    """Nobody answers faster than a program that reads the question and writes nothing but zeros."""
    inputs = [q.inputs for q in questions if q.kind == "drawn"]
    with hosted("empty", submitted, event, threads) as empty:
        seconds = [empty.ask(x)[1] for x in inputs[:40]]
    floor, given = min(seconds), float(np.median(ours.seconds))
    if given < _FLOOR_SHARE * floor:
        raise Rejected(
            "below the floor of time",
            f"an answer took {1e6 * given:.0f} µs, and an empty one over the same pipe takes {1e6 * floor:.0f} µs: no "
            "program on this machine is that fast",
        )


def _interrogate(
    plain: Host, entry: Host, questions: list[Question], rng: np.random.Generator
) -> tuple[Answers, Answers]:
    """Ask both hosts everything, in one random order, taking turns at who is asked first."""
    base, ours = Answers(), Answers()
    for host in (plain, entry):
        host.ask(questions[0].inputs)
    plain.idle = entry.idle = plain.busy = entry.busy = 0.0
    met: set[int] = set()
    for at in (int(i) for i in rng.permutation(len(questions))):
        question = questions[at]
        which = question.of if question.kind == "repeat" else at
        counts = question.kind in ("drawn", "repeat") and which not in met
        met.add(which)
        sides = [(plain, base), (entry, ours)]
        for host, answers in sides if rng.integers(2) else sides[::-1]:
            time.sleep(float(rng.uniform(0, 2e-3)))  # whoever works on between questions is seen doing so
            answers.given[at], seconds = host.ask(question.inputs, watched=not counts)
            if counts:
                answers.seconds.append(seconds)
    return base, ours


def _check_answers(
    event: Event, questions: list[Question], ours: Answers, reference: Runner, rng: np.random.Generator
) -> dict[str, Any]:
    for at, question in enumerate(questions):
        if question.kind == "repeat" and not _equal(ours.given[at], ours.given[question.of]):
            raise Rejected("wrong answer", "the same question got two different answers: they depend on something else")
    public = [at for at, q in enumerate(questions) if q.kind == "public"]
    drawn = [at for at, q in enumerate(questions) if q.kind in ("drawn", "repeat")]
    if event.kind == "text":
        prompts = np.stack([questions[at].inputs for at in public + drawn])
        given = [ours.given[at] for at in public + drawn]
        if any(np.shape(answer) != (event.new_tokens,) for answer in given):
            raise Rejected("wrong answer", f"the plugin does not answer a prompt with {event.new_tokens} tokens")
        check_tokens(np.stack(given), prompts, reference)
        return {"accuracy": 1.0, "floor": 1.0, "checks": [f"every token equal on {len(prompts)} prompts"]}
    return _check_images(event, questions, ours, reference, public, drawn)


def _check_images(
    event: Event, questions: list[Question], ours: Answers, reference: Runner, public: list[int], drawn: list[int]
) -> dict[str, Any]:
    for answer in ours.given.values():
        check_logits(answer, event.batch)
    labels = event.public_labels()
    answered = np.concatenate([ours.given[at] for at in public])[: len(labels)]
    share = float((answered.argmax(1) == labels).mean())
    plain = float((reference.answer(event.public_inputs()).argmax(1) == labels).mean())
    floor = plain - event.points_to_lose / 100
    check_accuracy(share, floor, event)
    fresh = [at for at, q in enumerate(questions) if q.kind == "fresh"]
    plain_fresh = reference.answer(np.concatenate([questions[at].inputs for at in fresh]))
    given = np.concatenate([ours.given[at] for at in fresh])
    classes = np.concatenate([np.asarray(questions[at].labels) for at in fresh])
    check_fresh(given, plain_fresh, classes, event, "held-out images, shifted and with new noise")
    expected = reference.answer(np.concatenate([questions[at].inputs for at in drawn]))
    agreement, used = check_agreement(np.concatenate([ours.given[at] for at in drawn]), expected, event)
    checks = [f"{100 * share:.2f} % of {len(labels)} held-out images, floor {100 * floor:.2f} %"]
    checks += [f"the reference's class on {100 * agreement:.1f} % of {used} drawn images"]
    return {"accuracy": share, "floor": floor, "agreement": agreement, "checks": checks}


def _equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-3, atol=1e-3))


def _size_gain(submitted: Submitted, reference: Runner) -> tuple[float, int]:
    """Bytes handed in against the shipped file's; a plugin without files uses the shipped weights and gains nothing."""
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
    test = signed_rank_test(np.log(base) - np.log(ours))
    speedup, low, high = (math.exp(v) for v in (test.centre, test.interval.low, test.interval.high))
    if (high - low) / (2 * speedup) > settings.widest_interval:
        raise TooNoisy(f"not scored: the speed-up of {speedup:.2f} is known only from {low:.2f} to {high:.2f}")
    sides = {
        "baseline": {"latency_s": {"p50": float(np.median(base))}, "memory_bytes": memory, "file_bytes": size},
        "entry": {"latency_s": {"p50": float(np.median(ours))}, "memory_bytes": 1.0, "file_bytes": 1.0},
    }
    sides["entry"] |= {"stored_bytes": file_size, "throughput": event.units_per_call / float(np.median(ours))}
    interval = combined(low, memory, size), combined(high, memory, size)
    notes = ["timed over a pipe, both sides alike, each in a jail of its own"]
    score = combined(speedup, memory, size)
    return Score(event.name, score, speedup, memory, size, interval, sides, [], validation, machine_facts(), notes)
