"""Small helpers for the checks: compare an answer with the right one, and say in a sentence how it differs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.learn.checking import Wrong


def require(holds: bool, feedback: str) -> None:
    if not holds:
        raise Wrong(feedback)


def same_number(answer: Any, right: float, asked: str, hint: str, tolerance: float = 1e-6) -> None:
    """A number within a relative tolerance."""
    require(isinstance(answer, int | float | np.number), f"{asked} gave {_short(answer)}, which is not a number")
    close = bool(np.isclose(float(answer), right, rtol=tolerance, atol=tolerance))
    require(close, f"{asked} gave {float(answer):.6g}, and {right:.6g} is right: {hint}")


def same_array(answer: Any, right: Any, asked: str, hint: str, tolerance: float = 1e-5) -> None:
    """An array of the same shape with close numbers."""
    require(isinstance(answer, np.ndarray), f"{asked} gave {_short(answer)}, which is not an array")
    want = np.asarray(right)
    require(answer.shape == want.shape, f"{asked} gave the shape {answer.shape}, and {want.shape} is right: {hint}")
    if not np.allclose(answer, want, rtol=tolerance, atol=tolerance):
        place = tuple(int(i) for i in np.unravel_index(int(np.abs(answer - want).argmax()), want.shape))
        raise Wrong(f"{asked} gave {answer[place]} at {place}, and {want[place]} is right: {hint}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
