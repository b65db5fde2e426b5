"""Differential checks: an answer is compared with a reference on many inputs; its mistake is inferred from all results.

The feedback describes what is wrong (a sign, a factor, another order, some inputs only) and repeats the rule. Where
this says too little, an exercise lists mistakes with their hints; the one that agrees with most wrong results is named.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tilewise.learn.checking import AnswerFailed, Wrong, short

Function = Callable[..., Any]
Fault = Callable[..., str]
Mistakes = Sequence[tuple[str, Function]]  # a hint, and a function that makes the mistake


@dataclass(frozen=True)
class Example:
    """One call of an exercise: arguments, and what is special about them, as in "where magnitudes are equal"."""

    args: tuple[Any, ...]
    about: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Outcome:
    """Result of one call of the reader's function, with the reference's (`right`) and what is wrong.

    If a dict is wrong, it is about the value of one `key`.
    """

    case: Example
    call: str
    result: Any
    right: Any
    complaint: str  # empty if the result is right
    key: str | None = None


def differential(
    reference: Function,
    cases: Callable[[], Sequence[Example]],
    draw: Callable[[np.random.Generator], tuple[Any, ...]],
    hint: str | dict[str, str],
    *,
    mistakes: Mistakes = (),
    fault: Fault | None = None,
    tolerance: float = 1e-6,
) -> Callable[[Function], None]:
    """Return the check of an exercise, which compares the reader's function with `reference` on all `cases`.

    An answer that passes them is also called with random arguments from `draw`, and then with all arguments again, in
    another order. `fault(result, right, *args)` returns what is wrong with a result, or "", where several results are
    right; by default, it has to be close to the reference's. `hint` is the rule that the feedback repeats, or one rule
    for each key of the result.
    """

    def check(answer: Function) -> None:
        """Call the answer on every case; raise Wrong, with the hint for the most likely mistake, if any fails."""
        trials = [_run_case(answer, reference, case, fault, tolerance) for case in cases()]
        if not any(trial.complaint for trial in trials):
            rng = np.random.default_rng(0)
            examples = [Example(draw(rng)) for _ in range(24)]  # takes milliseconds
            trials += [_run_case(answer, reference, case, fault, tolerance) for case in examples]
        stopped = [trial for trial in trials if isinstance(trial.result, AnswerFailed)]
        wrong = [trial for trial in trials if trial.complaint and trial not in stopped]
        if stopped and (len(stopped) == len(trials) or not wrong):
            everywhere = len(stopped) == len(trials)
            raise AnswerFailed(str(stopped[0].result) if everywhere else stopped[0].complaint)
        if wrong:
            returned = [trial for trial in trials if trial not in stopped]
            rule = hint if isinstance(hint, str) else hint[wrong[0].key or ""]
            advice = _infer_mistake(returned, mistakes, rule, tolerance) or ("" if stopped else _where(trials)) + rule
            raise Wrong(f"{wrong[0].call} {wrong[0].complaint}{advice}")
        for trial in reversed(trials):
            again = answer(*copy.deepcopy(trial.case.args), **trial.case.options)
            if not close(again, trial.result, tolerance):
                raise Wrong(f"{trial.call} gave another result when it was called again: use nothing but the arguments")

    return check


def _run_case(answer: Function, reference: Function, case: Example, fault: Fault | None, tolerance: float) -> _Outcome:
    """Call the answer and the reference on one case; an answer that changes its arguments is wrong."""
    parameters = list(inspect.signature(reference).parameters)
    arguments = [*map(short, case.args), *(f"{name}={value!r}" for name, value in case.options.items())]
    call = f"{reference.__name__}({', '.join(arguments)})"
    args = copy.deepcopy(case.args)
    try:
        result = answer(*args, **case.options)
    except AnswerFailed as failure:
        advice = f": it must work {case.about}" if case.about else ""
        return _Outcome(case, "it stops with", failure, None, f"{failure}{advice}")
    for name, mine, theirs in zip(parameters, case.args, args, strict=False):
        if not close(mine, theirs, 0):
            raise Wrong(f"{call} changed the caller's {name}: work on a copy")
    right = reference(*case.args, **case.options)
    if isinstance(right, tuple) and isinstance(result, np.ndarray) and result.ndim:
        result = tuple(result)
    if complaint := _wrong_form(result, right):
        raise Wrong(f"{call} gave {complaint}")
    if fault is not None:
        return _Outcome(case, call, result, right, fault(result, right, *case.args))
    if close(result, right, tolerance):
        return _Outcome(case, call, result, right, "")
    if not isinstance(right, dict):
        return _Outcome(case, call, result, right, _difference(result, right))
    key = next(key for key, value in right.items() if not close(result[key], value, tolerance))
    mine, theirs = right[key], result[key]
    return _Outcome(case, f"{call}[{key!r}]", theirs, mine, _wrong_form(theirs, mine) or _difference(theirs, mine), key)


def _wrong_form(result: Any, right: Any) -> str:
    """Return a description of a result whose type, or number of parts, is not the reference's; "" otherwise."""
    if result is None:
        return "None: end it with return"
    if isinstance(right, dict):
        names = f"a dict with {sorted(right)}"
        return (
            "" if isinstance(result, dict) and set(result) == set(right) else f"{short(result)}: it must give {names}"
        )
    if isinstance(right, tuple):
        if isinstance(result, tuple | list) and len(result) == len(right):
            forms = (_wrong_form(mine, part) for mine, part in zip(result, right, strict=True))
            return next(filter(None, forms), "")
        return f"{short(result)}, which has not the form that its first lines ask for: a tuple of {len(right)}"
    if isinstance(right, np.ndarray):
        return "" if isinstance(result, np.ndarray) else f"{short(result)}, which is not an array"
    number = isinstance(result, int | float | np.number | np.bool_)
    return (
        ""
        if number or (np.shape(result) == () and isinstance(result, np.ndarray))
        else f"{short(result)}, which is not a number"
    )


def _difference(result: Any, right: Any) -> str:
    """Describe where a result first differs from the right one."""
    if not isinstance(right, np.ndarray):
        return f"gave {float(result):.6g}, and {float(right):.6g} is right: "
    if result.shape != right.shape:
        return f"gave the shape {result.shape}, and {right.shape} is right: "
    error = np.abs(np.nan_to_num(result.astype(np.float64), nan=np.inf) - right)
    index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), right.shape))
    return f"gave {result[index]} at {index}, and {right[index]} is right: "


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Compare two results: arrays by shape and values, tuples and dicts part by part."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key], tolerance) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    try:
        if np.shape(a) != np.shape(b):
            return False
        if not tolerance:
            return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind in "fc"))
        return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * min(1.0, float(np.max(np.abs(b), initial=0.0)))))
    except (TypeError, ValueError):
        return bool(a == b)


# --- the mistake behind the wrong results ---


def _infer_mistake(trials: list[_Outcome], mistakes: Mistakes, rule: str, tolerance: float) -> str:
    """Return the hint of the mistake that explains all wrong results, or else of one that explains most of them.

    A description of the results, such as a constant factor, is followed by the exercise's `rule`.
    """
    wrong = [trial for trial in trials if trial.complaint]

    def agreement(candidate: Function) -> tuple[int, int]:
        """Count the wrong results that a candidate explains and, negated, the right ones it contradicts."""
        values = [_attempt(candidate, trial) for trial in trials]
        agrees = [close(value, trial.result, max(tolerance, 1e-9)) for value, trial in zip(values, trials, strict=True)]
        differs = [not close(value, trial.right, tolerance) for value, trial in zip(values, trials, strict=True)]
        explained = sum(s and d and bool(t.complaint) for s, d, t in zip(agrees, differs, trials, strict=True))
        return explained, -sum(not s and not t.complaint for s, t in zip(agrees, trials, strict=True))

    def on_trial(function: Function) -> Function:
        return lambda trial: function(*copy.deepcopy(trial.case.args), **trial.case.options)

    scores = [(agreement(on_trial(function)), text) for text, function in mistakes]
    (explained, contradicted), text = max(scores, key=lambda entry: sum(entry[0]), default=((0, 0), ""))
    if (explained, contradicted) == (len(wrong), 0):
        return f"{text}; {rule}"
    for symptom, candidate in _changed_results(wrong[0]):
        agrees = agreement(candidate)
        if agrees == (len(wrong), 0):
            return f"{symptom}; {rule}"
        if agrees[0] == len(wrong) > 1:
            return f"{_where(trials) or 'where it is wrong, '}{symptom}; {rule}"
    if isinstance(wrong[0].right, int) and float(wrong[0].result) % 1:
        return f"a whole number is asked for: round down; {rule}"
    dtype, right = (getattr(value, "dtype", None) for value in (wrong[0].result, wrong[0].right))
    if right == np.float64 and dtype is not None and (dtype.kind in "iu" or dtype == np.float16):
        return f"its dtype is {dtype}: {'16 bits are too few' if dtype == np.float16 else 'it has no fractions'}"
    if all(_is_near(trial) for trial in wrong):
        return f"it is near, but not exact: do not round or cut; {rule}"
    return f"{text}; {rule}" if 2 * explained > len(wrong) and explained + contradicted > 0 else ""


def _is_near(trial: _Outcome) -> bool:
    """Tell whether a wrong result has only small errors; if it has none, something else than its values is wrong."""
    try:
        mine, right = np.asarray(trial.result), np.asarray(trial.right)
        return mine.shape == right.shape and np.allclose(mine, right, rtol=0.01, atol=0) and bool((mine != right).any())
    except (TypeError, ValueError):
        return False


def _attempt(candidate: Function, trial: _Outcome) -> Any:
    """Apply a candidate mistake to a trial; None if it raises."""
    try:
        with np.errstate(all="ignore"):
            value = candidate(trial)
            return value[trial.key] if isinstance(value, dict) and trial.key else value
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # impossible for these arguments
        return None


def _where(trials: list[_Outcome]) -> str:
    """Return which cases are wrong as part of a sentence, if others are right; else ""."""
    wrong = [trial for trial in trials if trial.complaint]
    places = list(dict.fromkeys(trial.case.about for trial in wrong))
    if len(wrong) == len(trials) or "" in places or len(places) > 4:  # a longer list helps nobody
        return ""
    return f"it is wrong only {' and '.join(places)}; "


def _changed_results(first: _Outcome) -> Iterator[tuple[str, Function]]:
    """Yield descriptions of a wrong result, with functions that change the right one accordingly."""

    def each(transform: Callable[[Any], Any]) -> Function:
        """Return a function that applies `transform` to every part of a trial's right result."""

        def changed(trial: _Outcome) -> Any:
            """Apply the transformation to the right result of a trial."""
            right = trial.right
            if isinstance(right, dict):
                return {key: transform(value) for key, value in right.items()}
            return tuple(map(transform, right)) if isinstance(right, tuple) else transform(right)

        return changed

    yield "the sign is the wrong way round", each(lambda value: -value)
    yield "it is the reciprocal: divide the other way", each(lambda value: 1 / value)
    yield "it is 1 minus the right value", each(lambda value: 1 - value)
    yield "it is transposed", each(lambda value: value.T if np.ndim(value) > 1 else None)
    yield "the order is reversed", each(lambda value: value[::-1])
    yield "the sign of each number is lost: only magnitudes are compared", each(np.abs)
    for digits in range(4):
        yield "it is rounded: give the exact value", each(partial(np.round, decimals=digits))
    yield "it is truncated to a whole number, so the fractions are lost", each(np.trunc)
    for size in (np.float16, np.float32):
        yield (
            f"it is rounded to {np.dtype(size).itemsize * 8} bits",
            each(partial(np.asarray, dtype=size)),
        )
    yield "the numbers are right: reshape them", lambda trial: _rearranged(trial, np.ravel)
    yield (
        "these are the right numbers in the wrong order or place",
        lambda trial: _rearranged(trial, lambda values: np.sort(values, axis=None)),
    )
    try:
        value, right = (float(np.ravel(part)[0]) for part in (first.result, first.right))
    except (TypeError, ValueError, IndexError):
        return
    yield f"it is {value:g} for every input", lambda trial: np.full(np.shape(trial.right), value)
    if right:
        factor = value / right**2
        yield f"it is {factor:.4g} times the square of the right value", each(lambda value: value**2 * factor)
    ratio, offset = value / right if right else np.nan, value - right
    if not (np.isfinite(ratio) and np.isfinite(offset)):
        return
    power_of_ten = abs(np.log10(ratio) - round(np.log10(ratio))) < 1e-9 if ratio > 0 else False
    look = "look at the units" if power_of_ten else "look for a constant factor"
    yield f"it is {ratio:.4g} times the right value: {look}", each(lambda value: value * ratio)
    yield f"it is always {abs(offset):g} too {'large' if offset > 0 else 'small'}", each(lambda value: value + offset)


def _rearranged(trial: _Outcome, arrange: Function) -> Any:
    """Return a trial's result if `arrange` makes it equal the right one, such as sorted; else None."""
    if (
        not isinstance(trial.right, np.ndarray)
        or trial.right.dtype == bool
        or not np.allclose(arrange(trial.result), arrange(trial.right), rtol=1e-5)
    ):
        return None
    return trial.result
