"""Makes a failing program small: fewer operations, plainer settings, a smaller input, as long as it fails alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.programs.draw import is_well_conditioned
from tests.programs.network import Network
from tests.programs.oracles import failure_of
from tests.programs.program import Program

Fails = Callable[[Program], bool]


def minimise(program: Program, fails: Fails | None = None, seconds: float = 20.0) -> Program:
    """The smallest program that greedy steps reach in this time. `fails` says whether a smaller one still counts; by
    default, whether it fails the same oracle."""
    fails = fails or _fails_like(program)
    deadline = time.monotonic() + seconds
    while True:
        smaller = next((p for p in candidates(program) if time.monotonic() < deadline and _counts(p, fails)), None)
        if smaller is None:
            return program
        program = smaller


def _fails_like(program: Program) -> Fails:
    first = failure_of(program)
    assert first is not None, "a program that passes cannot be minimised"
    oracle = first.oracle

    def fails(candidate: Program) -> bool:
        failure = failure_of(candidate)
        return failure is not None and failure.oracle == oracle

    return fails


def _counts(program: Program, fails: Fails) -> bool:
    try:
        fit = is_well_conditioned(program, Network(program))
    except Exception:  # what was dropped was needed
        return False
    return fit and fails(program)


def candidates(program: Program) -> Iterator[Program]:
    """Programs that are a step smaller, the largest steps first."""
    ops = program.ops
    for count in range(1, len(ops)):
        yield _without_unread(replace(program, ops=ops[:count]))
    for index in reversed(range(len(ops))):
        for source in dict.fromkeys(ops[index].inputs):
            yield _without_unread(_without(program, index, source))
    for shape in _smaller_shapes(program.shape):
        yield replace(program, shape=shape)
    for index, op in enumerate(ops):
        for settings in _plainer_settings(op.settings):
            yield replace(program, ops=(*ops[:index], replace(op, settings=settings), *ops[index + 1 :]))


def _without(program: Program, index: int, source: int) -> Program:
    """The program without an operation, whose readers read `source` instead."""
    end = index + 1

    def renumber(value: int) -> int:
        value = source if value == end else value
        return value - 1 if value > end else value

    other_ops = [op for i, op in enumerate(program.ops) if i != index]
    return replace(program, ops=tuple(replace(op, inputs=tuple(map(renumber, op.inputs))) for op in other_ops))


def _without_unread(program: Program) -> Program:
    """The program without operations whose values nobody reads."""
    for index in reversed(range(len(program.ops) - 1)):
        if not any(index + 1 in op.inputs for op in program.ops):
            return _without_unread(_without(program, index, 0))
    return program


def _smaller_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for axis, size in enumerate(shape):
        for smaller in _smaller_numbers(size):
            yield (*shape[:axis], smaller, *shape[axis + 1 :])


def _plainer_settings(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each setting left to its default, or a smaller number; the seed of weights stays."""
    for name, value in settings.items():
        if name == "seed":
            continue
        yield {key: other for key, other in settings.items() if key != name}
        if isinstance(value, int) and not isinstance(value, bool):
            for smaller in _smaller_numbers(value):
                yield {**settings, name: smaller}


def _smaller_numbers(number: int) -> list[int]:
    return sorted({n for n in (1, number // 2, number - 1) if 0 < n < number})
