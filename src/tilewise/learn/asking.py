"""Helpers for the checks: compare an answer with the right one, and describe the difference in a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.learn.checking import Wrong


def require(holds: bool, feedback: str) -> None:
    if not holds:
        raise Wrong(feedback)


def same_number(answer: Any, right: float, call: str, hint: str, tolerance: float = 1e-6) -> None:
    """Require a number within a tolerance; `call` describes how the answer was called."""
    require(isinstance(answer, int | float | np.number), f"{call} gave {_short(answer)}, which is not a number")
    close = bool(np.isclose(float(answer), right, rtol=tolerance, atol=tolerance))
    require(close, f"{call} gave {float(answer):.6g}, and {right:.6g} is right: {hint}")


def same_array(answer: Any, right: Any, call: str, hint: str, tolerance: float = 1e-5) -> None:
    """Require an array of the same shape with close values; `call` describes how the answer was called."""
    require(isinstance(answer, np.ndarray), f"{call} gave {_short(answer)}, which is not an array")
    expected = np.asarray(right)
    require(
        answer.shape == expected.shape, f"{call} gave the shape {answer.shape}, and {expected.shape} is right: {hint}"
    )
    if not np.allclose(answer, expected, rtol=tolerance, atol=tolerance):
        index = tuple(int(i) for i in np.unravel_index(int(np.abs(answer - expected).argmax()), expected.shape))
        raise Wrong(f"{call} gave {answer[index]} at {index}, and {expected[index]} is right: {hint}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
