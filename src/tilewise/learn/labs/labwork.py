"""A lab in progress: predictions are stored before anything is measured.

>>> import tempfile
>>> work = Lab("caching", tempfile.mkdtemp() + "/lab.json", "ada")
>>> work.predict("cache_gain", 10)
>>> [entry["kind"] for entry in work.record["entries"]]
['prediction']
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewise._atomic import write_atomic
from tilewise._files import read_json_input
from tilewise._system import cpu_name
from tilewise.errors import ConfigurationError, FileFormatError, did_you_mean
from tilewise.learn.checking import check_lesson
from tilewise.learn.labs.questions import LIMITS, QUESTIONS, Question, Sizes
from tilewise.learn.labs.record import FORMAT, MAX_ATTEMPTS, LabGrade, drawn_sizes, grade, machine_key, seal, verify

_MAX_RECORD_BYTES = 1 << 20


def lab(lesson: str, student: str = "", file: str | Path | None = None) -> Lab:
    """Open the lab of a lesson, or continue the one in `file` (default: lab-LESSON.json in this folder)."""
    return Lab(lesson, file or f"lab-{check_lesson(lesson)}.json", student)


class Lab:
    """The predictions, measurements and decisions of one student for one lesson, on one machine."""

    def __init__(self, lesson: str, file: str | Path, student: str = "") -> None:
        """Read the lab's record from `file`, or begin one with this machine's peak rates."""
        self.questions = {question.name: question for question in QUESTIONS[check_lesson(lesson)]}
        self.file = Path(file)
        if self.file.exists():
            self.record: dict[str, Any] = read_json_input(self.file)
            verify(self.record)
            if self.record["lesson"] != lesson:
                raise ConfigurationError(f"{file} is the lab of {self.record['lesson']}, not of {lesson}")
        else:
            self.record = {"format": FORMAT, "lesson": lesson, "student": student, "machine": roofline(), "entries": []}

    # --- questions ---

    @property
    def attempt(self) -> int:
        """Return the number of the current attempt: one more than the attempts that are fully measured."""
        measurements = self._questions_with_entry("measurement")
        return 1 + sum(
            all((name, attempt) in measurements for name in self.questions) for attempt in range(1, MAX_ATTEMPTS + 1)
        )

    def sizes(self, question: Question) -> Sizes:
        return drawn_sizes(self.record, question, self.attempt)

    def __str__(self) -> str:
        """Format the questions of the current attempt with the ceilings of this machine."""
        machine, attempt = self.record["machine"], self.attempt
        lines = [
            f"Lab {self.record['lesson']}, attempt {min(attempt, MAX_ATTEMPTS)} of {MAX_ATTEMPTS}. This machine: "
            f"{machine['flops_per_second'] / 1e9:.0f} GFLOP/s on one thread, "
            f"{machine['bytes_per_second'] / 1e9:.0f} GB/s ({machine['isa']})."
        ]
        if attempt > MAX_ATTEMPTS:
            return f"{lines[0]} All attempts are used."
        for question in self.questions.values():
            limit_question = " And what limits it: compute, memory or overhead?" if question.work else ""
            lines.append(f"  {question.name}: {question.wording(self.sizes(question))}{limit_question}")
        return "\n".join(lines)

    __repr__ = __str__

    # --- predict, measure, decide ---

    def predict(self, name: str, value: float, limit: str = "") -> None:
        """Store a sealed prediction: seconds, a factor, or the number of a choice; `limit` names the bottleneck."""
        question = self._question(name)
        if self.attempt > MAX_ATTEMPTS:
            raise ConfigurationError(f"all {MAX_ATTEMPTS} attempts of this lab are used")
        if (name, self.attempt) in self._questions_with_entry("prediction"):
            raise ConfigurationError(f"{name} is predicted already; a sealed prediction does not change")
        choices = range(4)
        if question.unit == "choice" and value not in choices:
            raise ConfigurationError(f"{name} is one of the choices 0 to 3, not {value!r}")
        if question.unit != "choice" and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigurationError(f"{name} must be a positive number, not {value!r}")
        if question.work is not None and limit not in LIMITS:
            raise ConfigurationError(f"{name} also needs its limit: {', '.join(LIMITS)}")
        self._add_entry({"kind": "prediction", "question": name, "value": float(value), "limit": limit})

    def measure(self) -> LabGrade:
        """Measure every question of this attempt on this machine and grade it; all need sealed predictions."""
        attempt = self.attempt
        if attempt > MAX_ATTEMPTS:
            raise ConfigurationError(f"all {MAX_ATTEMPTS} attempts of this lab are used")
        missing = [name for name in self.questions if (name, attempt) not in self._questions_with_entry("prediction")]
        if missing:
            raise ConfigurationError(f"predict before you measure: {', '.join(missing)}")
        self._check_machine()
        for name, question in self.questions.items():
            if (name, attempt) not in self._questions_with_entry("measurement"):
                value = question.measure(self.sizes(question))
                self._add_entry({"kind": "measurement", "question": name, "value": value}, attempt)
        return grade(self.record)

    def decide(self, numbers: str, why: str, trade_off: str) -> list[str]:
        """Store a sealed decision: measured numbers, a reason, and its trade-off.

        Return what is missing in it, as sentences.
        """
        self._append({"kind": "decision", "numbers": numbers, "why": why, "trade_off": trade_off, "when": _now()})
        return grade(self.record).remarks

    def grade(self) -> LabGrade:
        return grade(self.record)

    # --- the record as text, for notebooks that are handed in ---

    def token(self) -> str:
        """Return the lab's record as one line of text, to hand in."""
        return base64.b85encode(zlib.compress(json.dumps(self.record).encode(), 9)).decode()

    def _question(self, name: str) -> Question:
        """Return the question called `name`; raise `ConfigurationError` with the nearest name otherwise."""
        if name not in self.questions:
            raise ConfigurationError(f"this lab has no question {name!r}; {did_you_mean(name, self.questions)}")
        return self.questions[name]

    def _questions_with_entry(self, kind: str) -> set[tuple[str, int]]:
        return {(e["question"], e["attempt"]) for e in self.record["entries"] if e["kind"] == kind}

    def _check_machine(self) -> None:
        """Raise `ConfigurationError` if the lab was begun on another CPU or instruction set."""
        current = roofline()
        if (current["cpu"], current["isa"]) != (self.record["machine"]["cpu"], self.record["machine"]["isa"]):
            raise ConfigurationError("this lab was begun on another machine; finish it there, or begin a new file")

    def _add_entry(self, entry: dict[str, Any], attempt: int | None = None) -> None:
        """Append an entry to the record, with its attempt, its sizes and the time."""
        question = self.questions[entry["question"]]
        attempt = attempt or self.attempt
        sizes = drawn_sizes(self.record, question, attempt)
        self._append(entry | {"attempt": attempt, "sizes": sizes, "when": _now()})

    def _append(self, entry: dict[str, Any]) -> None:
        """Seal an entry with a hash and write the record to disk."""
        entries = self.record["entries"]
        previous = entries[-1]["seal"] if entries else machine_key(self.record["machine"])
        plain = json.loads(json.dumps(entry))
        entries.append(plain | {"seal": seal(previous, plain)})
        write_atomic(self.file, json.dumps(self.record, indent=1) + "\n")


def read_token(text: str) -> dict[str, Any]:
    """Return the record in a token, or raise FileFormatError."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b85decode(text), _MAX_RECORD_BYTES)
        if not unpacker.eof:  # cut off, or too long: the checksum at the end was not reached
            raise ValueError
        record: dict[str, Any] = json.loads(data)
    except (ValueError, zlib.error, RecursionError, TypeError):
        raise FileFormatError("this is not the token of a tilewise lab") from None
    verify(record)
    return record


def roofline() -> dict[str, Any]:
    """Return this machine's peak rates on one thread, its CPU and its instruction set."""
    from tilewise.profile.machine import active_isa, machine

    ceilings = machine()
    rates = {"flops_per_second": ceilings.peak(1), "bytes_per_second": ceilings.memory_bandwidth()}
    return {"cpu": cpu_name(), "isa": active_isa(), **rates}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
