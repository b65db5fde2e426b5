"""The open division: a Python file answers from its jail, and this process holds the clock, the inputs and the truth.

Every question looks alike and comes once for accuracy (public inputs), once for speed (inputs drawn now), some twice
(an answer may depend on nothing but its question), in random order; every answer is checked, so there is no other time
at which to be right. Only drawn questions asked for the first time count for speed. Processor time that the plugin
spends while no question is open is counted too, and so is whatever it writes then. The baseline answers from a jail of
its own, of the same kind; a third one answers nothing at all, which is the floor: nobody is faster than the pipe.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import select
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.bench import jail, wire
from tilewise.bench.errors import Rejected, TooNoisy
from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.integrity import ClockWatch, check_baseline_speed
from tilewise.bench.measure import Settings, file_bytes
from tilewise.bench.recipe import MOST_FILE_BYTES
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.scoring import Score, combined, machine_facts
from tilewise.bench.validation import check_accuracy, check_agreement, check_fresh, check_logits, check_tokens
from tilewise.errors import UnavailableError
from tilewise.profile.statistics import signed_rank_test

Array = npt.NDArray[Any]
_LOAD_SECONDS = 60.0
_ANSWER_SECONDS = 60.0
_FRESH = 8  # batches of images that nobody has, to judge accuracy on
_SLOWED, _PIPE_SECONDS = 3.0, 2e-3  # the baseline's distance to itself outside of the jail
_FLOOR_SHARE = 0.7  # of an empty answer's time
_IDLE_SECONDS, _IDLE_SHARE = 0.005, 0.01  # processor time allowed between questions; an honest plugin needs 3 µs each


@dataclass
class Host:
    """A plugin in its jail and the harness's end of its pipe."""

    process: subprocess.Popen[bytes]
    pid: int  # of the plugin's process, outside of the jail
    event: Event
    rss_before: int = 0
    busy: float = 0.0  # processor seconds while a question was open
    idle: float = 0.0  # and while none was
    scratch: int = 0  # the most it kept in its scratch folder
    _cpu: float = 0.0

    def ask(self, question: Array) -> tuple[Array, float]:
        """The answer, and how long it took by this process's clock."""
        message = np.ascontiguousarray(question, wire.question_of(self.event)[1])
        layout = wire.answer_of(self.event)
        length = math.prod(layout[0]) * np.dtype(layout[1]).itemsize
        asking, answering = self._pipes()
        if select.select([answering], [], [], 0)[0]:
            raise Rejected("plugin failed", f"the plugin wrote while no question was open{self.last_words()}")
        before = self._cpu_time()
        self.idle += before - self._cpu
        start = time.perf_counter()
        try:
            wire.send(asking, message)
            content = wire.receive(answering, length, _ANSWER_SECONDS)
        except wire.Ended as error:
            raise Rejected("plugin failed", f"the plugin gave no answer: {error}{self.last_words()}") from None
        seconds = time.perf_counter() - start
        self._cpu = self._cpu_time()
        self.busy += self._cpu - before
        self.scratch = max(self.scratch, self._scratch_bytes())
        return wire.decode(content, layout), seconds

    def load(self) -> None:
        """Let the plugin load, within its time."""
        asking, answering = self._pipes()
        rules = jail.allowed_calls()
        try:
            wire.receive(answering, 1, _LOAD_SECONDS)
            self.rss_before = _status_bytes(self.pid, "VmRSS")
            wire.send(asking, struct.pack("<I", len(rules)) + rules)
            wire.receive(answering, 1, _LOAD_SECONDS)
        except wire.Ended as error:
            raise Rejected("plugin failed", f"the plugin did not load: {error}{self.last_words()}") from None
        self._cpu = self._cpu_time()

    def _pipes(self) -> tuple[int, int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin.fileno(), self.process.stdout.fileno()

    def last_words(self) -> str:
        """The last line the process wrote about its end, if it has ended."""
        assert self.process.stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
            said = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            return f" ({said[-1][:200]})" if said else ""
        return ""

    def memory_bytes(self, least: int) -> int:
        """The most it held beyond what it held before the plugin was loaded, its files in memory included.

        `least` is what any program must hold: its weights, a question and an answer. Memory that was there before can
        be given back and taken again without the kernel's count going up, but not below that.
        """
        return max(_status_bytes(self.pid, "VmHWM") - self.rss_before, least) + self.scratch

    def check_idle(self) -> None:
        """Work outside of the timed calls shows as processor time between them."""
        if self.idle > _IDLE_SECONDS + _IDLE_SHARE * self.busy:
            raise Rejected(
                "work outside timing",
                f"the plugin used {self.idle:.2f} s of processor time while no question was open, and {self.busy:.2f} "
                "s on the questions: work before or after timing does not count as fast",
            )

    def _cpu_time(self) -> float:
        try:
            return time.clock_gettime_ns((~self.pid << 3) | 2) * 1e-9  # Linux: the clock of that process, all threads
        except OSError:
            return self._cpu

    def _scratch_bytes(self) -> int:
        """What lies in the scratch folder, files without a name included."""
        try:
            found = os.statvfs(f"/proc/{self.pid}/root{jail.SCRATCH}")
        except OSError:
            return 0
        return (found.f_blocks - found.f_bfree) * found.f_frsize


def _status_bytes(pid: int, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


@dataclass(frozen=True)
class Submitted:
    """What a plugin consists of: files by name, as they were handed in."""

    files: dict[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Submitted:
        """The plugin at `path` and the files beside it; what is called otherwise becomes plugin.py."""
        if not path.is_file():
            raise UnavailableError(f"there is no plugin at {path}")
        beside = [f for f in sorted(path.parent.iterdir()) if f.is_file() and not f.is_symlink() and f != path]
        beside = [f for f in beside if f.suffix != ".py"]
        if sum(f.stat().st_size for f in (path, *beside)) > MOST_FILE_BYTES:
            raise Rejected("too large", f"a plugin and its files have {MOST_FILE_BYTES:,} bytes at most")
        return cls({"plugin.py": path.read_bytes()} | {f.name: f.read_bytes() for f in beside})

    @property
    def brings_weights(self) -> bool:
        return len(self.files) > 1

    @property
    def size(self) -> int:
        """Bytes of everything handed in: weights in the program's text are weights too."""
        return sum(len(content) for content in self.files.values())

    def write(self, folder: Path) -> None:
        folder.chmod(0o755)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o644)

    def check_unchanged(self, folder: Path) -> None:
        """The folder holds what was handed in, byte for byte."""
        found = {f.name: hashlib.sha256(f.read_bytes()).digest() for f in folder.iterdir()}
        if found != {name: hashlib.sha256(content).digest() for name, content in self.files.items()}:
            raise Rejected("changed files", "the plugin's folder is not what was handed in")


@contextmanager
def hosted(role: str, submitted: Submitted, event: Event, threads: int = 1) -> Iterator[Host]:
    """A plugin (or the baseline, or an empty answer) in a jail of its own, ended with the block."""
    jail.check()
    words = ("-m", "tilewise.bench.plugin_host", role, event.name, str(jail.fresh_user()))
    hides = role == "plugin" and submitted.brings_weights
    with tempfile.TemporaryDirectory(prefix="tilewise-plugin-") as folder:
        shown = submitted if role == "plugin" else Submitted({})
        shown.write(Path(folder))
        with jail.started(Path(folder), words, threads, hides) as (process, pid):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(pid, jail.cores_for(threads))
            host = Host(process, pid, event)
            host.load()
            yield host
        shown.check_unchanged(Path(folder))


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
    submitted = Submitted.read(Path(plugin).resolve())
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
    _check_baseline(event, reference, questions, base)
    _check_floor(event, submitted, questions, ours, threads)
    return _score(event, base.seconds, ours.seconds, memory, size, bytes_, validation, settings)


def _least_memory(event: Event, stored: int) -> int:
    """Bytes that a program for this event holds at the least."""
    layouts = (wire.question_of(event), wire.answer_of(event))
    return stored + sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in layouts)


def _check_baseline(event: Event, reference: Runner, questions: list[Question], base: Answers) -> None:
    """The baseline in its jail keeps the distance that it has outside of it, and its answers are right."""
    inputs = [q.inputs for q in questions if q.kind == "drawn"]
    check_baseline_speed(event, reference, inputs[0], under_load=True)
    here = []
    with reference.active():
        for x in inputs[: 2 if event.kind == "text" else 20]:
            start = time.perf_counter()
            reference.call(x)
            here.append(time.perf_counter() - start)
    if min(base.seconds) > _SLOWED * min(here) + _PIPE_SECONDS:
        raise Rejected(
            "slowed baseline",
            f"the baseline took {1e3 * min(base.seconds):.2f} ms at best in its jail and {1e3 * min(here):.2f} ms here",
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
            answers.given[at], seconds = host.ask(question.inputs)
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
    check_fresh(given, plain_fresh, classes, event, "held-out images moved and speckled anew")
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
