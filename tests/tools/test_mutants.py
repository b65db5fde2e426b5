"""The mutation tester: what it changes, and that a change leaves valid code."""

from __future__ import annotations

import ast

from tools.mutants import mutants_of

SOURCE = '''
def f(x: int | None, y) -> int | str:
    """A docstring with 1 < 2."""
    if x < 3 and not y:
        print("é", x + 1)
    return x == y or True
'''


def test_every_mutant_is_valid_code_and_differs_from_the_source() -> None:
    mutants = list(mutants_of("f.py", SOURCE))
    changed = {SOURCE[: m.start] + m.text + SOURCE[m.end :] for m in mutants}
    assert len(changed) == len(mutants) and SOURCE not in changed
    for text in changed:
        ast.parse(text)


def test_operators_constants_conditions_and_statements_are_changed() -> None:
    changes = {(m.line, SOURCE[m.start : m.end].strip(), m.text.strip()) for m in mutants_of("f.py", SOURCE)}
    expected = {(4, "<", "<="), (4, "and", "or"), (4, "not y", "y"), (4, "3", "4"), (5, "+", "-"), (5, "1", "2")}
    expected |= {(5, 'print("é", x + 1)', "pass"), (6, "==", "!="), (6, "or", "and"), (6, "True", "False")}
    assert expected <= changes
    assert not any(line in (2, 3) for line, _, _ in changes), "annotations and docstrings stay"
