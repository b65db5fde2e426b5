"""Records of labs: sealed entries, verification and grades.

Every entry carries a seal, the SHA-256 of the entry and of the seal before it. Changing or reordering an entry breaks
all seals after it, so a prediction cannot be adjusted once its measurement is recorded. A seal proves the order inside
one record; it is no protection against somebody who writes a whole record by hand on a machine of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.errors import FileFormatError
from tilewise.learn.labs.questions import LIMITS, QUESTIONS, Question

FORMAT = "tilewise lab 1"
MAX_ATTEMPTS = 3
_FULL = math.log(1.25)  # predictions within this factor get all points
_NONE = math.log(2.0)  # predictions beyond this factor get none; at 2.5 a laptop's textbook roofline gets half
_TILE_NONE = math.log(1.5)  # a choice that is this much slower than the best gets no points
_NUMBER_SHARE = 0.8  # of a question's points; the rest is for its limit
_OVERHEAD = 5.0  # times the roofline: slower work is limited by neither arithmetic nor memory


@dataclass(frozen=True)
class QuestionGrade:
    """Grade of one question: the prediction, the measurement, and points between 0 and 1."""

    name: str
    attempt: int
    predicted: float
    measured: float
    points: float
    remark: str


@dataclass(frozen=True)
class LabGrade:
    """Grades of the last attempt at each question, and what is wrong with the decision log."""

    lesson: str
    student: str
    questions: list[QuestionGrade]
    attempts: int
    remarks: list[str]

    @property
    def percent(self) -> float:
        """Points in percent of all questions of the lesson."""
        return 100 * sum(question.points for question in self.questions) / len(QUESTIONS[self.lesson])


def seal(previous: str, entry: dict[str, Any]) -> str:
    """Return the hash that seals an entry, which covers the seal of the entry before it."""
    text = json.dumps({key: value for key, value in entry.items() if key != "seal"}, sort_keys=True)
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


def machine_key(machine: dict[str, Any]) -> str:
    """Return a short hash of the machine that a record belongs to."""
    return hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]


def drawn_sizes(record: dict[str, Any], question: Question, attempt: int) -> dict[str, Any]:
    """Draw a question's sizes; they depend only on the student, the machine and the attempt."""
    words = (record["student"], machine_key(record["machine"]), question.name, str(attempt))
    digest = hashlib.sha256("\n".join(words).encode()).digest()
    return question.draw(np.random.default_rng(int.from_bytes(digest[:8], "little")))


def verify(record: Any) -> None:
    """Raise FileFormatError if a record was changed, or has a measurement without an earlier prediction."""
    try:
        if record["format"] != FORMAT or record["lesson"] not in QUESTIONS:
            raise FileFormatError("this is not the record of a tilewise lab")
        questions = {question.name: question for question in QUESTIONS[record["lesson"]]}
        previous, predicted = machine_key(record["machine"]), set()
        for number, entry in enumerate(record["entries"], 1):
            if entry["seal"] != seal(previous, entry):
                raise FileFormatError(f"entry {number} of the lab was changed after it was sealed")
            previous = entry["seal"]
            if entry["kind"] == "decision":
                continue
            key = (entry["question"], entry["attempt"])
            sizes = drawn_sizes(record, questions[entry["question"]], entry["attempt"])
            if entry["sizes"] != sizes or not 1 <= entry["attempt"] <= MAX_ATTEMPTS:
                raise FileFormatError(f"entry {number} of the lab has other sizes or attempts than were drawn")
            if entry["kind"] == "measurement" and key not in predicted:
                raise FileFormatError(f"{key[0]} was measured before it was predicted")
            if entry["kind"] == "prediction":
                predicted.add(key)
    except FileFormatError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError):
        raise FileFormatError("this is not the record of a tilewise lab") from None


def grade(record: dict[str, Any]) -> LabGrade:
    """Verify a record and grade the last measured attempt at each question."""
    verify(record)
    predictions: dict[tuple[str, int], dict[str, Any]] = {}
    latest: dict[str, QuestionGrade] = {}
    questions = {question.name: question for question in QUESTIONS[record["lesson"]]}
    for entry in record["entries"]:
        if entry["kind"] == "prediction":
            predictions.setdefault((entry["question"], entry["attempt"]), entry)
        elif entry["kind"] == "measurement":
            question = questions[entry["question"]]
            prediction = predictions[question.name, entry["attempt"]]
            latest[question.name] = _grade_question(question, prediction, entry, record["machine"])
    attempts = max((entry.get("attempt", 0) for entry in record["entries"]), default=0)
    return LabGrade(record["lesson"], record["student"], list(latest.values()), attempts, read_decision(record))


def _grade_question(
    question: Question, prediction: Mapping[str, Any], measurement: Mapping[str, Any], machine: dict[str, Any]
) -> QuestionGrade:
    """Grade a prediction against its measurement: points from 0 to 1 and a remark."""
    predicted, value = float(prediction["value"]), measurement["value"]
    if question.unit == "choice":
        slower = value[int(predicted)] / min(value)
        points = _log_points(slower, math.log(1.03), _TILE_NONE)
        remark = f"choice {predicted:.0f} is {slower:.2f} times as slow as the best, {int(np.argmin(value))}"
        return QuestionGrade(question.name, prediction["attempt"], predicted, float(np.argmin(value)), points, remark)
    actual = float(value)
    points = _log_points(max(predicted / actual, actual / predicted), _FULL, _NONE)
    remark = f"measured {actual:.3g} {question.unit}, a factor of {predicted / actual:.2f} from the prediction"
    if question.work is not None:
        limit = limit_of(question, measurement["sizes"], actual, machine)
        correct = prediction["limit"] == limit
        points = _NUMBER_SHARE * points + (1 - _NUMBER_SHARE) * correct * (points > 0)
        remark += f"; by the roofline it is limited by {limit}"
    return QuestionGrade(question.name, prediction["attempt"], predicted, actual, points, remark)


def limit_of(question: Question, sizes: dict[str, Any], seconds: float, machine: dict[str, Any]) -> str:
    """Return what bounds a measured time on this machine's roofline: arithmetic, memory or overhead."""
    assert question.work is not None
    flops, num_bytes = question.work(sizes)
    bounds = flops / machine["flops_per_second"], num_bytes / machine["bytes_per_second"]
    return LIMITS[2] if seconds > _OVERHEAD * max(bounds) else LIMITS[int(bounds[1] > bounds[0])]


def _log_points(factor: float, full: float, none: float) -> float:
    """Grade a ratio of prediction to measurement, on a log scale: 1 up to a log ratio of `full`, 0 from `none` on."""
    return min(1.0, max(0.0, (none - math.log(factor)) / (none - full)))


def statistics(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each question, students, mean points, share without points, median factor and attempts."""
    grades: dict[tuple[str, str], list[tuple[QuestionGrade, int]]] = defaultdict(list)
    for record in records:
        graded = grade(record)
        for question in graded.questions:
            grades[graded.lesson, question.name].append((question, graded.attempts))
    rows = []
    for (lesson, name), entries in grades.items():
        points = [question.points for question, _ in entries]
        factors = [question.predicted / question.measured for question, _ in entries if question.measured > 0]
        row = {"lesson": lesson, "question": name, "students": len(entries), "mean points": float(np.mean(points))}
        row |= {
            "without points": float(np.mean([p == 0 for p in points])),
            "median factor": float(np.median(factors or [0])),
        }
        rows.append(row | {"mean attempts": float(np.mean([attempts for _, attempts in entries]))})
    return rows


# --- decision logs ---


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
_TRADE_WORDS = (
    "but",
    "cost",
    "price",
    "instead",
    "lose",
    "loses",
    "loss",
    "less",
    "slower",
    "larger",
    "worse",
    "while",
)
_MIN_WORDS = 5  # shorter texts are not a sentence


def read_decision(record: dict[str, Any]) -> list[str]:
    """Return what is missing in the last decision of a record, as sentences; empty if nothing is."""
    decisions = [entry for entry in record["entries"] if entry["kind"] == "decision"]
    if not decisions:
        return ["there is no decision log: lab.decide(numbers=..., why=..., trade_off=...)"]
    last, remarks = decisions[-1], []
    if not _names_a_measurement(last["numbers"], record):
        remarks.append("the numbers name no measurement of this lab: quote at least one with two digits")
    if len(last["why"].split()) < _MIN_WORDS:
        remarks.append("the reason is too short: say in a sentence what limits the time")
    elif any(q.work for q in QUESTIONS[record["lesson"]]) and not any(word in last["why"].lower() for word in LIMITS):
        remarks.append(f"the reason names no limit ({', '.join(LIMITS)})")
    if not any(word in last["trade_off"].lower().split() for word in _TRADE_WORDS):
        remarks.append("the trade-off says nothing that gets worse: what does the decision cost?")
    return remarks


def _names_a_measurement(text: str, record: dict[str, Any]) -> bool:
    """Tell whether a number in a text is within 5 % of a measurement of the record."""
    quoted = [float(number) for number in _NUMBER.findall(text)]
    values_in_units = []
    for entry in record["entries"]:
        if entry["kind"] == "measurement":
            values = entry["value"] if isinstance(entry["value"], list) else [entry["value"]]
            values_in_units += [float(value) * unit for value in values for unit in (1.0, 1e3, 1e6)]
    return any(abs(q - m) <= 0.05 * m for q in quoted for m in values_in_units)
