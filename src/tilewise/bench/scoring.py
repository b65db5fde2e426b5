"""Scores a recipe in one process: build, validate, time interleaved with the baseline, measure memory, and compute.

    score = (latency gain × memory gain × size gain) ^ (1/3),   if the accuracy rule holds; otherwise there is none

Each gain is plain tilewise over the entry, measured in the same run. The runner that was validated is the runner that
is timed: its stored numbers are hashed before and after, and the answers given while the clock ran are checked too.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import tilewise
from tilewise._extension import native
from tilewise.bench.build import build, build_stages
from tilewise.bench.events import TinyMLPerf
from tilewise.bench.floor import check_floor, least_seconds
from tilewise.bench.integrity import ClockWatch, check_baseline_speed, check_numpy_backend
from tilewise.bench.measure import (
    Gain,
    Settings,
    Speedup,
    Together,
    measure_together,
    weigh,
)
from tilewise.bench.recipe import Recipe
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.validation import Validation, validate, worst_difference
from tilewise.errors import FileFormatError, Rejected
from tilewise.profile.timing.statistics import signed_rank_test

NO_TRUTH = (
    "TILE_OLYMPIAD is ranked against a collection that only the teacher has (--truth); the practice split's best "
    "configurations are known to everybody"
)
TRUTH_SPLIT = "the class's truth"
PRACTICE_SPLIT = ("h200", "valid")  # the embedded collection that anyone may practise on


@dataclass(frozen=True)
class Score:
    """A score with all figures that it was computed from, as plain data."""

    event: str
    score: float
    speedup: float
    memory_gain: float
    size_gain: float
    interval: tuple[float, float]  # of the score
    figures: dict[str, Any]  # baseline and entry: latency, throughput, memory, file, dtypes, accuracy
    steps: list[dict[str, Any]]  # cumulative gain after each step
    validation: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=lambda: machine_facts())
    notes: list[str] = field(default_factory=list)
    practice: bool = False  # measured without the limit on noise, so it is never ranked

    def as_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    @classmethod
    def of_gains(cls, event: str, latency: Gain, memory: float, size: float, **more: Any) -> Score:
        """Combine the gains in speed, memory and size to a score with its interval."""
        score, low, high = (combined(ratio, memory, size) for ratio in (latency.ratio, latency.low, latency.high))
        gains: dict[str, Any] = {"speedup": latency.ratio, "memory_gain": memory, "size_gain": size}
        return cls(event=event, score=score, interval=(low, high), **gains, **more)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Score:
        return cls(**{**facts, "interval": tuple(facts["interval"])})


def check_ranked(practice: bool) -> None:
    """Reject a practice score, which leaderboards do not accept."""
    if practice:
        raise Rejected("practice", "a practice score is not ranked: score the entry without --practice")


def combined(speedup: float, memory_gain: float, size_gain: float) -> float:
    """Return the geometric mean of the three gains."""
    return math.exp((math.log(speedup) + math.log(memory_gain) + math.log(size_gain)) / 3)


def validate_recipe(recipe: Recipe, settings: Settings | None = None) -> Validation:
    """Build the entry of a recipe and check its answers, without timing it."""
    settings = settings or Settings()
    if recipe.event.kind == "tiles":
        share = score_tiles(recipe, settings.truth).score
        return _tiles_validation(share, [f"tile score {share:.4f}"])
    reference = baseline(recipe.event)
    check_numpy_backend(reference.backend)
    return validate(build_stages(recipe)[-1].runner, reference, settings)


def score_recipe(recipe: Recipe, settings: Settings | None = None) -> Score:
    """Validate and score an entry in this process; Rejected and TooNoisy say why there is no score."""
    settings = settings or Settings()
    if recipe.event.kind == "tiles":
        return score_tiles(recipe, settings.truth)
    rng = settings.rng()
    clock = ClockWatch()
    stages = build_stages(recipe)
    runners = {f"{at} {stage.label}": stage.runner for at, stage in enumerate(stages)}
    names = list(runners)
    first, last = runners[names[0]], runners[names[-1]]
    check_numpy_backend(first.backend)
    memory = weigh(runners, recipe.event.timed_inputs(rng, 1)[0])
    validation = validate(last, first, settings, rng)
    seals = first.fingerprint(), last.fingerprint()
    together = measure_together(runners, settings, rng, memory)
    clock.check()
    if seals != (first.fingerprint(), last.fingerprint()):
        raise Rejected("another model timed", "the stored weights changed between the accuracy test and the timing")
    check_timed_answers(together, last, first, names[-1])
    loaded = any(reason.startswith("load") for reason in together.comparison.reasons)
    anchor = check_baseline_speed(recipe.event, first, together.inputs[0], loaded)
    if not settings.practice:
        together.check_noise(names[-1], settings.widest_interval)
    threads = tilewise.get_num_threads()
    p50 = together.benchmarks[names[-1]].latency.p50
    floor = check_floor(p50, lambda machine: least_seconds(last, threads, machine))
    gains = together.speedup(names[-1])
    figures = {"baseline": together.benchmarks[names[0]].as_dict(), "entry": together.benchmarks[names[-1]].as_dict()}
    return Score.of_gains(
        recipe.event.name,
        gains.latency,
        gains.memory.ratio,
        gains.size.ratio,
        figures=figures | {"speedup": gains.as_dict(), "baseline_over_arithmetic": anchor, "floor_s": floor},
        steps=[_figures_after_step(together, name, stage.label) for name, stage in zip(names, stages, strict=True)],
        validation=validation.as_dict(),
        notes=list(together.comparison.reasons),
        practice=settings.practice,
    )


def score_tiles(recipe: Recipe, truth: str | None) -> Score:
    """Compute Kaggle's tile score of a predictions file, on the practice split or on a teacher's private data."""
    from tilewise.costmodel import load_dataset
    from tilewise.costmodel.course.predictions import score_predictions

    where, split = (truth, "test") if truth else PRACTICE_SPLIT
    try:
        result = score_predictions(recipe.read_file(recipe.predictions), load_dataset(where).split(split))
    except FileFormatError as error:
        raise Rejected("wrong answer", str(error)) from None
    figures = {"error_at": {str(k): v for k, v in result.error_at.items()}, "kernels": result.kernels}
    figures |= {"split": TRUTH_SPLIT if truth else "practice"}
    checks = [f"{result.kernels} kernels, top-1 error {result.error_at[1]:.4f}, top-5 error {result.error_at[5]:.4f}"]
    share = max(result.tile_score, 0.0)
    return Score(
        event=recipe.event.name,
        score=share,
        speedup=1.0,
        memory_gain=1.0,
        size_gain=1.0,
        interval=(share, share),
        figures=figures,
        steps=[],
        validation=_tiles_validation(share, checks).as_dict(),
    )


def _tiles_validation(share: float, checks: list[str]) -> Validation:
    """Return the validation of a predictions file, for which no inputs are drawn."""
    return Validation(accuracy=share, floor=0.0, agreement=share, drawn=0, left_out=0, dtypes=(), checks=checks)


def check_timed_answers(together: Together, entry: Runner, reference: Runner, name: str) -> None:
    """Reject an entry whose answers during timing differ from its own earlier ones, or are wrong."""
    for at, answer in together.answers[name].items():
        x = together.inputs[at]
        again = entry.answer(x if entry.event.kind == "images" else x[None])
        again = again if entry.event.kind == "images" else again[0]
        if answer.shape != again.shape or not np.allclose(answer, again, rtol=1e-4, atol=1e-4):
            raise Rejected("another model timed", "answers given while the clock ran differ from those given before it")
        if entry.event.kind == "text" and worst_difference(x, answer, reference)[1] >= 1e-3:
            raise Rejected("wrong answer", "a text generated while the clock ran is not the shipped model's")


def _figures_after_step(together: Together, name: str, label: str) -> dict[str, Any]:
    """Return latency, memory, size and score after the recipe step `name`, as JSON data."""
    figures = together.benchmarks[name]
    facts: dict[str, Any] = {"label": label, "latency_s": figures.latency.p50, "accuracy": figures.accuracy}
    facts |= {"memory_bytes": figures.memory_bytes, "file_bytes": figures.file_bytes}
    gains: Speedup | None = together.speedup(name) if name in together.comparison.ratios else None
    facts["speedup"] = gains.latency.ratio if gains else 1.0
    facts["speedup_interval"] = [gains.latency.low, gains.latency.high] if gains else [1.0, 1.0]
    memory, size = (gains.memory.ratio, gains.size.ratio) if gains else (1.0, 1.0)
    facts["score"] = combined(facts["speedup"], memory, size)
    return facts


def machine_facts() -> dict[str, Any]:
    """Return the versions, instruction set and threads that a measurement depends on."""
    return {
        "tilewise": tilewise.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "kernels": "none" if native is None else str(native.isa()),
        "threads": tilewise.get_num_threads(),
    }


def check_consistent(facts: dict[str, Any]) -> None:
    """Reject stored results whose score does not follow from its gains, or these from the figures."""
    try:
        score = Score.from_dict(facts)
        check_ranked(score.practice)
        if TinyMLPerf.event(score.event).kind == "tiles":
            if score.figures["split"] != TRUTH_SPLIT:
                raise Rejected("no truth", NO_TRUTH)
            if not 0 <= score.score <= 1 or abs(score.score - max(1 - score.figures["error_at"]["5"], 0)) > 1e-9:
                raise Rejected("invented numbers", "this tile score does not follow from its top-5 error")
            return
        base, entry = score.figures["baseline"], score.figures["entry"]
        expected = {
            "memory gain": (score.memory_gain, base["memory_bytes"] / entry["memory_bytes"]),
            "size gain": (score.size_gain, base["file_bytes"] / entry["file_bytes"]),
            "score": (score.score, combined(score.speedup, score.memory_gain, score.size_gain)),
        }
        loose = base["latency_s"]["p50"] / entry["latency_s"]["p50"]
    except Rejected:
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise Rejected("invented numbers", "this result does not have the figures that a measurement has") from None
    for what, (stated, follows) in expected.items():
        if not math.isfinite(stated) or abs(stated / follows - 1) > 1e-6:
            raise Rejected("invented numbers", f"a {what} of {stated:.4g} does not follow from its figures")
    if abs(score.speedup / loose - 1) > 0.25:
        raise Rejected(
            "invented numbers",
            f"a speed-up of {score.speedup:.4g} does not follow from latencies of ratio {loose:.4g}; "
            "if it was measured, the machine was too busy; measure it again",
        )


# --- records ---


_RUNS = 24  # twelve blocks; eight is the least with which a signed-rank test can reach p < 0.01


def duel(challenger: Recipe, record: Recipe, settings: Settings) -> dict[str, Any]:
    """Time two entries interleaved; return whether the challenger is faster at p < 0.01, that p, and the factor."""
    runs = max(settings.runs or challenger.event.runs, _RUNS)
    most = max(settings.most_runs or 4 * runs, runs)
    runners = {"record": build(record), "challenger": build(challenger)}
    together = measure_together(runners, replace(settings, runs=runs, most_runs=most))
    gains = together.speedup("challenger")
    constant = (math.log(gains.memory.ratio) + math.log(gains.size.ratio)) / 3  # memory and size do not vary
    ours, theirs = (  # log seconds per block of the comparison
        np.log(together.comparison.measurements[name].samples).reshape(-1, 2).mean(1)
        for name in ("challenger", "record")
    )
    differences = (theirs - ours) / 3 + constant  # of the log scores
    test = signed_rank_test(differences)
    beaten = bool(test.p_value < 0.01 and test.centre > 0)
    return {"beaten": beaten, "p_value": float(test.p_value), "factor": math.exp(float(differences.mean()))}
