"""Checks an entry's answers: on all public data, and on inputs drawn for this validation.

For images: the accuracy floor on every held-out image and on images nobody has, and on drawn images the reference's
class and much the same logits. For text: every token of every prompt equal to the reference's. A generated text is
checked in one pass of the plain model over prompt and answer: if each new token is the most likely one there, greedy
generation would have given the same. Where two tokens are so close that float32 rounding decides, the prompt says
nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.bench.events import Event
from tilewise.bench.measure import Settings
from tilewise.bench.runner import Runner
from tilewise.costmodel.data.npz import read_npz
from tilewise.errors import Rejected, TilewiseError, UnavailableError
from tilewise.nn import GPT

Array = npt.NDArray[Any]
_NEAR_TIE = 1e-3  # logits closer than this may swap when sums are taken in another order
_CLEAR_MARGIN = 1.0  # drawn images on which the reference itself is undecided say nothing about an entry
_LEAST_CORRELATION = 0.9
_MOST_UNDECIDED = 0.25


@dataclass(frozen=True)
class Validation:
    """Result of a validation: what was checked, with its figures. `accuracy` of text is the share of equal tokens."""

    accuracy: float
    floor: float
    agreement: float  # on drawn inputs
    drawn: int
    left_out: int
    dtypes: tuple[str, ...]
    checks: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def validate(
    entry: Runner, reference: Runner, settings: Settings, rng: np.random.Generator | None = None
) -> Validation:
    """Validate `entry` against the reference; raise Rejected with the reason, or return the checks."""
    rng = rng or settings.rng()
    dtypes = tuple(sorted({array.dtype.name for array in entry.stored_arrays().values()}))
    check = _validate_images if entry.event.kind == "images" else _validate_text
    return check(entry, reference, settings, rng, dtypes)


def _validate_images(
    entry: Runner, reference: Runner, settings: Settings, rng: np.random.Generator, dtypes: tuple[str, ...]
) -> Validation:
    """Check accuracy on held-out and fresh images, and agreement with the reference on drawn ones."""
    event = entry.event
    x, y = event.public_inputs(), event.public_labels()
    answer = entry.answer(x)
    floor = check_accuracy(answer, reference.answer(x), y, event, "held-out images")
    share = float((answer.argmax(1) == y).mean())
    fresh, described = _fresh_images(event, settings, rng)
    check_accuracy(entry.answer(fresh[0]), reference.answer(fresh[0]), fresh[1], event, described)
    inputs = event.draw(rng, settings.drawn_inputs)
    agreement, used = check_agreement(entry.answer(inputs), reference.answer(inputs), event)
    checks = [f"{100 * share:.2f} % of {len(x)} held-out images, floor {100 * floor:.2f} %"]
    checks += [f"no worse than that on {len(fresh[1])} {described}"]
    checks += [f"the reference's class on {100 * agreement:.1f} % of {used} drawn images"]
    return Validation(
        accuracy=share,
        floor=floor,
        agreement=agreement,
        drawn=len(inputs),
        left_out=len(inputs) - used,
        dtypes=dtypes,
        checks=checks,
    )


def _fresh_images(event: Event, settings: Settings, rng: np.random.Generator) -> tuple[tuple[Array, Array], str]:
    """Return images and labels that an entry cannot have learned, and what they are: the teacher's, or new."""
    if settings.images is None:
        return event.draw_labelled(rng, 32 * settings.drawn_inputs), "training images, transformed and with new noise"
    return read_images(Path(settings.images), event), "images that only the teacher has"


def read_images(path: Path, event: Event) -> tuple[Array, Array]:
    """Read `x` (values from 0 to 1) and `y` (classes) of an npz file, as the event's model takes them."""
    try:
        stored = read_npz(path, ("x", "y"))
        x, y = stored["x"].astype(np.float32), stored["y"].astype(np.int64).reshape(-1)
        x = x.reshape(len(y), *event.input_shape)
    except (TilewiseError, ValueError, TypeError) as error:
        raise UnavailableError(f"{path} does not hold images x and classes y for {event.name}: {error}") from None
    if not len(y) or not np.isfinite(x).all() or y.min() < 0 or y.max() > 9 or x.min() < 0 or x.max() > 1:
        raise UnavailableError(f"the images of {path} must have finite values from 0 to 1 and classes from 0 to 9")
    return x, y


def check_accuracy(answer: Array, plain: Array, labels: Array, event: Event, described: str) -> float:
    """Reject an entry that loses too much accuracy against the shipped model's logits `plain`; return the floor.

    Two standard deviations of the paired difference are granted to chance. They are 1 to 2 points on the few held-out
    images, which everybody has, and little on the many new ones, which therefore decide: an entry that has learned the
    held-out images is not accepted where another one is refused.
    """
    ours = check_logits(answer, len(labels)).argmax(1) == labels
    theirs = plain.argmax(1) == labels
    chance = 2 * math.sqrt(float((ours != theirs).sum())) / len(labels)
    floor = float(theirs.mean()) - event.points_to_lose / 100 - chance
    if ours.mean() < floor:
        raise Rejected(
            "below the floor",
            f"on {len(labels)} {described} the entry is right {100 * ours.mean():.1f} % of the time and the shipped "
            f"model {100 * theirs.mean():.1f} %: more than {event.points_to_lose:g} point is lost",
        )
    return floor


def check_logits(answer: Array, count: int) -> Array:
    """Check that logits have the right shape and are finite, and return them."""
    good = isinstance(answer, np.ndarray) and answer.shape == (count, 10) and answer.dtype.kind == "f"
    if not good or not np.isfinite(answer).all():
        raise Rejected("wrong answer", f"the entry does not answer {count} images with finite logits of 10 classes")
    return answer


def check_agreement(answer: Array, expected: Array, event: Event) -> tuple[float, int]:
    """Return the share of clear drawn images that get the reference's class, and the number of clear ones."""
    check_logits(answer, len(expected))
    ordered = np.sort(expected, 1)
    clear = ordered[:, -1] - ordered[:, -2] >= _CLEAR_MARGIN
    agreement = float((answer.argmax(1) == expected.argmax(1))[clear].mean())
    if agreement < event.agreement:
        raise Rejected(
            "drawn inputs",
            f"on inputs drawn for this validation the entry gives the shipped model's class {100 * agreement:.1f} % of "
            f"the time, and {100 * event.agreement:g} % is required: its answers do not come from this model",
        )
    likeness = float(np.corrcoef(_subtract_row_mean(answer[clear]), _subtract_row_mean(expected[clear]))[0, 1])
    if not likeness >= _LEAST_CORRELATION:
        raise Rejected(
            "drawn inputs",
            f"the entry's logits on drawn inputs correlate with the shipped model's by only {likeness:.2f}; "
            f"{_LEAST_CORRELATION} is required",
        )
    return agreement, int(clear.sum())


def _subtract_row_mean(logits: Array) -> Array:
    """Subtract the mean of each row: adding a constant to a row of logits does not change the prediction."""
    centred: Array = (logits - logits.mean(1, keepdims=True)).ravel()
    return centred


# --- text ---


def _validate_text(
    entry: Runner, reference: Runner, settings: Settings, rng: np.random.Generator, dtypes: tuple[str, ...]
) -> Validation:
    """Check that every token equals the reference's, on public prompts and on new ones."""
    event = entry.event
    public, fresh = event.public_inputs(), event.draw(rng, max(4, settings.drawn_inputs // 32))
    prompts = np.concatenate([public, fresh])
    answers = entry.answer(prompts)
    left_out = check_tokens(answers, prompts, reference)
    used = len(prompts) - left_out
    checks = [f"all {event.new_tokens} tokens equal on {used} prompts, {len(fresh)} of them drawn for this validation"]
    return Validation(
        accuracy=1.0, floor=1.0, agreement=1.0, drawn=len(fresh), left_out=left_out, dtypes=dtypes, checks=checks
    )


def check_tokens(answers: Array, prompts: Array, reference: Runner) -> int:
    """Reject generated tokens (count, length) that differ from the reference's, except at near ties.

    Returns the number of prompts with such a difference.
    """
    event = reference.event
    expected_shape = (len(prompts), event.new_tokens)
    if not isinstance(answers, np.ndarray) or answers.shape != expected_shape or answers.dtype.kind not in "iu":
        raise Rejected("wrong answer", f"the entry does not answer each prompt with {event.new_tokens} tokens")
    left_out = 0
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        position, gap = worst_difference(prompt, answer, reference)
        if position is None:
            continue
        if gap >= _NEAR_TIE:
            raise Rejected(
                "wrong answer",
                f"token {position + 1} after prompt {number + 1} is not the shipped model's: its logit is {gap:.3g} "
                "below the best, and every token must be equal",
            )
        left_out += 1
    if left_out > _MOST_UNDECIDED * len(prompts):
        raise Rejected(
            "wrong answer", f"{left_out} of {len(prompts)} texts differ from the shipped model's at near ties"
        )
    return left_out


def worst_difference(prompt: Array, answer: Array, reference: Runner) -> tuple[int | None, float]:
    """Find the token of `answer` that deviates most from the reference's choices.

    Return (position, logit difference).
    """
    assert isinstance(reference.model, GPT)
    if answer.min(initial=0) < 0 or answer.max(initial=0) >= reference.model.vocab:
        return 0, float("inf")
    ids = np.concatenate([prompt, answer[:-1]])
    with reference.active():
        logits: Array = reference.model(ids[None]).data[0, len(prompt) - 1 :]  # (new tokens, vocabulary)
    gaps = logits.max(1) - logits[np.arange(len(answer)), answer]
    position = int(gaps.argmax())
    identical = bool((logits.argmax(1) == answer).all())
    return (None, 0.0) if identical else (position, float(gaps[position]))


# --- likeness to the shipped weights ---


LEAST_COSINE = 0.8  # of the weights that are left
LEAST_ENERGY = 0.5  # of the shipped squares that as many weights could keep


def check_likeness(weights: Mapping[str, Array], shipped: Mapping[str, Array]) -> None:
    """Reject weights that are too different from the shipped ones to be derived from them."""
    for name, own in shipped.items():
        if own.ndim > 1 and own.dtype.kind == "f":
            cosine, energy = likeness(weights[name], own)
            if cosine < LEAST_COSINE:
                raise Rejected(
                    "another model",
                    f"these weights belong to another model: the rest of {name} has a cosine of {cosine:.2f} to the "
                    f"shipped weights at the same places, and retraining leaves at least {LEAST_COSINE}",
                )
            if energy < LEAST_ENERGY:
                raise Rejected(
                    "another model",
                    f"these weights belong to another model: the rest of {name} is where the shipped weights are small "
                    f"({energy:.2f} of the energy of its largest weights; {LEAST_ENERGY} is required)",
                )


def likeness(weights: Array, shipped: Array) -> tuple[float, float]:
    """Return the cosine of nonzero weights and the shipped ones, and the share of the latter's squares there."""
    remaining = weights != 0
    if not remaining.any():
        return 1.0, 1.0
    x, y = weights[remaining].astype(np.float64), shipped[remaining].astype(np.float64)
    scale = float(np.linalg.norm(x) * np.linalg.norm(y))
    squares = np.sort(shipped.astype(np.float64).ravel() ** 2)[::-1]
    return float(x @ y) / scale if scale else 0.0, float(y @ y / squares[: remaining.sum()].sum())
