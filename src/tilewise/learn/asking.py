"""Helpers for the checks: compare an answer with the right one, and describe the difference in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.learn.checking import Wrong


def require(holds: bool, feedback: str) -> None:
    if not holds:
        raise Wrong(feedback)


Mistakes = Sequence[tuple[Any, str]]  # what a known mistake would give, and the hint for it


def same_number(
    answer: Any, right: float, call: str, hint: str, tolerance: float = 1e-6, *, mistakes: Mistakes = ()
) -> None:
    """Require a number within a tolerance; `call` describes how the answer was called.

    An answer that equals the result of a known mistake gets the hint for that mistake.
    """
    require(isinstance(answer, int | float | np.number), f"{call} gave {_short(answer)}, which is not a number")
    if not np.isclose(float(answer), right, rtol=tolerance, atol=tolerance):
        hint = next((text for value, text in mistakes if np.isclose(float(answer), value, rtol=tolerance)), hint)
        raise Wrong(f"{call} gave {float(answer):.6g}, and {right:.6g} is right: {hint}")


def same_array(
    answer: Any, right: Any, call: str, hint: str, tolerance: float = 1e-5, *, mistakes: Mistakes = ()
) -> None:
    """Require an array of the same shape with close values; `call` describes how the answer was called.

    An answer that equals the result of a known mistake gets the hint for that mistake.
    """
    require(isinstance(answer, np.ndarray), f"{call} gave {_short(answer)}, which is not an array")
    expected = np.asarray(right)
    for value, text in mistakes:
        same_mistake = answer.shape == np.shape(value) and np.allclose(answer, value, rtol=tolerance, atol=tolerance)
        if same_mistake and not np.allclose(value, right, rtol=tolerance, atol=tolerance):
            hint = text
            break
    require(
        answer.shape == expected.shape, f"{call} gave the shape {answer.shape}, and {expected.shape} is right: {hint}"
    )
    if not np.allclose(answer, expected, rtol=tolerance, atol=tolerance):
        index = tuple(int(i) for i in np.unravel_index(int(np.abs(answer - expected).argmax()), expected.shape))
        raise Wrong(f"{call} gave {answer[index]} at {index}, and {expected[index]} is right: {hint}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
