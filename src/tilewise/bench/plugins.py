"""The open division: a Python file answers over a pipe, and this process holds the clock, the inputs and the truth.

Every question looks alike and comes once for accuracy (public inputs), once for speed (inputs drawn now), some twice
(an answer may depend on nothing but its question), in random order; every answer is checked, so there is no other time
at which to be right. Only drawn questions asked for the first time count for speed. Processor time that the plugin
spends while no question is open is counted too. The baseline goes through a process and a pipe of the same kind.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.bench import wire
from tilewise.bench.errors import Rejected, TooNoisy
from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.integrity import ClockWatch
from tilewise.bench.measure import Settings, file_bytes
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.scoring import Score, combined, machine_facts
from tilewise.bench.submission import _environment
from tilewise.bench.validation import check_accuracy, check_agreement, check_logits, check_tokens
from tilewise.errors import UnavailableError
from tilewise.profile.statistics import signed_rank_test

Array = npt.NDArray[Any]
_LOAD_SECONDS = 60.0
_ANSWER_SECONDS = 60.0
_IDLE_SECONDS, _IDLE_SHARE = 0.005, 0.01  # processor time allowed between questions; an honest plugin needs 3 µs each


@dataclass
class Host:
    """A running plugin process and the harness's end of its pipe."""

    process: subprocess.Popen[bytes]
    network: str
    rss_before: int = 0
    busy: float = 0.0  # processor seconds while a question was open
    idle: float = 0.0  # and while none was
    _cpu: float = 0.0

    def ask(self, question: Array) -> tuple[Array, float]:
        """The answer, and how long it took by this process's clock."""
        message = wire.encode(question)
        assert self.process.stdin is not None and self.process.stdout is not None
        before = self._cpu_time()
        self.idle += before - self._cpu
        start = time.perf_counter()
        try:
            wire.send(self.process.stdin.fileno(), message)
            content = wire.receive(self.process.stdout.fileno(), _ANSWER_SECONDS)
        except wire.Ended as error:
            raise Rejected("plugin failed", f"the plugin gave no answer: {error}{self.last_words()}") from None
        seconds = time.perf_counter() - start
        self._cpu = self._cpu_time()
        self.busy += self._cpu - before
        try:
            return wire.decode(content), seconds
        except wire.Ended as error:
            raise Rejected("plugin failed", str(error)) from None

    def load(self) -> None:
        """Let the plugin load, within its time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            wire.receive(self.process.stdout.fileno(), _LOAD_SECONDS)
            self.rss_before = _status_bytes(self.process.pid, "VmRSS")
            wire.send(self.process.stdin.fileno(), wire.encode(np.zeros(0)))
            wire.receive(self.process.stdout.fileno(), _LOAD_SECONDS)
        except wire.Ended as error:
            raise Rejected("plugin failed", f"the plugin did not load: {error}{self.last_words()}") from None
        self._cpu = self._cpu_time()

    def last_words(self) -> str:
        """The last line the process wrote about its end, if it has ended."""
        assert self.process.stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
            said = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            return f" ({said[-1][:200]})" if said else ""
        return ""

    def memory_bytes(self) -> int:
        """The most it held beyond what it held before the plugin was loaded, as the kernel counts."""
        return max(_status_bytes(self.process.pid, "VmHWM") - self.rss_before, 4096)

    def check_idle(self) -> None:
        """Work outside of the timed calls shows as processor time between them, or as other processes."""
        if self.idle > _IDLE_SECONDS + _IDLE_SHARE * self.busy:
            raise Rejected(
                "work outside timing",
                f"the plugin used {self.idle:.2f} s of processor time while no question was open, and {self.busy:.2f} "
                "s on the questions: work before or after timing does not count as fast",
            )
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                if (task / "children").read_text().strip():
                    raise Rejected("work outside timing", "the plugin started other processes")

    def _cpu_time(self) -> float:
        try:
            return time.clock_gettime_ns((~self.process.pid << 3) | 2) * 1e-9  # Linux: the clock of that process
        except OSError:
            return self._cpu


def _status_bytes(pid: int, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


@contextmanager
def hosted(plugin: str, event: Event, threads: int = 1) -> Iterator[Host]:
    """A plugin in its own process: clean environment, fresh folder, no network, killed at the end."""
    if not sys.platform.startswith("linux"):
        raise UnavailableError("the open division needs Linux: its limits are Linux's")
    prefix, network = _without_network()
    with tempfile.TemporaryDirectory(prefix="tilewise-plugin-") as scratch:
        host_of = ("-P", "-m", "tilewise.bench.plugin_host", plugin, event.name, str(threads))
        command = [*prefix, sys.executable, *host_of]
        pipe = subprocess.PIPE
        environment = _environment(threads) | {"HOME": scratch, "TMPDIR": scratch}
        process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=scratch,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        try:
            host = Host(process, network)
            host.load()
            yield host
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _without_network() -> tuple[list[str], str]:
    """A prefix that starts a command without network, and how."""
    tool = shutil.which("unshare")
    prefix = [tool or "unshare", "--user", "--map-root-user", "--net", "--"]
    if tool and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
        return prefix, "no network (a network namespace of its own)"
    return [], "network refused by Python only: this system gives no namespaces to this user"


# --- questions ---


@dataclass
class Question:
    """One call: what is asked, whether its time counts, and which question it repeats."""

    inputs: Array
    kind: str  # "public", "drawn" or "repeat"
    of: int = -1


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
    first = len(batches)
    return asked + [Question(new[i], "repeat", first + i) for i in range(0, drawn, 4)]


def score_plugin(plugin: str | Path, event: Event | str, settings: Settings | None = None, threads: int = 1) -> Score:
    """Validate and score a plugin on this machine; Rejected and TooNoisy say why there is no score."""
    settings, event = settings or Settings(), TinyMLPerf.event(event)
    event.check_timed()
    path = Path(plugin).resolve()
    if not path.is_file():
        raise UnavailableError(f"there is no plugin at {plugin}")
    rng, clock = settings.rng(), ClockWatch()
    drawn = (settings.runs or event.runs) * (4 if event.kind == "images" else 1)
    questions = questions_for(event, rng, drawn)
    with hosted(str(path), event, threads) as entry, hosted("baseline", event, threads) as plain:
        base, ours = _interrogate(plain, entry, questions, rng)
        entry.check_idle()
        memory = plain.memory_bytes() / entry.memory_bytes()
        network = entry.network
    clock.check()
    reference = baseline(event)
    validation = _check_answers(event, questions, ours, reference)
    size, bytes_ = _size_gain(path, reference)
    return _score(event, base.seconds, ours.seconds, memory, size, bytes_, validation, network, settings)


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
        counts = question.kind != "public" and which not in met
        met.add(which)
        sides = [(plain, base), (entry, ours)]
        for host, answers in sides if rng.integers(2) else sides[::-1]:
            time.sleep(float(rng.uniform(0, 2e-3)))  # whoever works on between questions is seen doing so
            answers.given[at], seconds = host.ask(question.inputs)
            if counts:
                answers.seconds.append(seconds)
    return base, ours


def _check_answers(event: Event, questions: list[Question], ours: Answers, reference: Runner) -> dict[str, Any]:
    for at, question in enumerate(questions):
        if question.kind == "repeat" and not _equal(ours.given[at], ours.given[question.of]):
            raise Rejected("wrong answer", "the same question got two different answers: they depend on something else")
    public = [at for at, q in enumerate(questions) if q.kind == "public"]
    drawn = [at for at, q in enumerate(questions) if q.kind != "public"]
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
    expected = reference.answer(np.concatenate([questions[at].inputs for at in drawn]))
    agreement, used = check_agreement(np.concatenate([ours.given[at] for at in drawn]), expected, event)
    checks = [f"{100 * share:.2f} % of {len(labels)} held-out images, floor {100 * floor:.2f} %"]
    checks += [f"the reference's class on {100 * agreement:.1f} % of {used} drawn images"]
    return {"accuracy": share, "floor": floor, "agreement": agreement, "checks": checks}


def _equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-3, atol=1e-3))


def _size_gain(plugin: Path, reference: Runner) -> tuple[float, int]:
    """True bytes of the weights it brings; a plugin without any uses the shipped ones and gains nothing."""
    shipped = file_bytes(reference)
    own = sum(f.stat().st_size for f in plugin.parent.iterdir() if f.is_file() and f.suffix != ".py")
    return (shipped / own, own) if own else (1.0, shipped)


def _score(
    event: Event,
    base: list[float],
    ours: list[float],
    memory: float,
    size: float,
    file_size: int,
    validation: dict[str, Any],
    network: str,
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
    notes = [network, "timed over a pipe, both sides alike"]
    score = combined(speedup, memory, size)
    return Score(event.name, score, speedup, memory, size, interval, sides, [], validation, machine_facts(), notes)
