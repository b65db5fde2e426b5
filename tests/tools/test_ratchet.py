"""The ratchet fails when a violation is added, forgives when one goes, and says where and what to do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools import ratchet, ratchet_rules

CLEAN = '''"""Round values."""


def rounded_value(value):
    """Round one value."""
    return round(value)
'''

# One violation of each rule: the count that rises, and the code to append to a clean file.
VIOLATIONS = {
    "fit.participles": "found = rounded_value(0.5)",
    "fit.dialect": "def magnify():\n    pass",
    "fit.long_calls": "print('', '', '', '', '', '', '')",
    "fit.kind_branches": "if __file__ == 'conv':\n    pass",
    "fit.broad_excepts": "try:\n    pass\nexcept Exception:\n    pass",
    "fit.numeric_constants": "SIZE = 64 * 1024",
    "fit.docstring_openers": "def outer():\n    '''Of a layer: its sums.'''",
    "fit.missing_docstrings": "def outer():\n" + "    print('')\n" * 9,
    "fit.lines": "print('')\n" * 60,
    "graph.missing_comments": "print('')\n" * 34,
    "native/ops.numeric_constants": "constexpr int kA = kLanes / 2;\nconstexpr int kLine = 64;  // hardware: bytes\n"
    "constexpr int64_t kFirst = 3, kSecond = 4;",
    "native/ops.long_cpp_lines": "// " + "x" * 118,
    "tree.repeated_class_names": "class Result: pass\nclass Result: pass",
    "tests.participles": "found = rounded_value(0.5)",
}
# The clean file of each package.
FILES = {
    "fit": "src/tilewise/fit/rounding.py",
    "tree": "src/tilewise/fit/rounding.py",
    "graph": "src/tilewise/graph/rounding.py",
    "native/ops": "native/ops/round.cpp",
    "tests": "tests/fit/test_rounding.py",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a repository of clean packages and the ceilings that belong to it."""
    for name in set(FILES.values()):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(CLEAN if name.endswith(".py") else "// Rounds one value.\n")
    (tmp_path / "src/tilewise/graph/rounding.py").write_text("# Halves are rounded to even.\n" + CLEAN)
    (tmp_path / "tools").mkdir()
    assert ratchet.main(["--lower", "--allow", *FILES, "--reason", "new packages"], root=tmp_path) == 0
    return tmp_path


def append(tree: Path, code: str, name: str = "src/tilewise/fit/rounding.py") -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n\n" + code + "\n")


def ceilings(tree: Path) -> dict[str, dict[str, int]]:
    return json.loads((tree / "tools" / "ratchet.json").read_text())["ceilings"]


@pytest.mark.parametrize("name", VIOLATIONS)
def test_an_added_violation_fails_and_removing_it_passes(name, tree, capsys):
    path = tree / FILES[name.rpartition(".")[0]]
    clean = path.read_text()
    append(tree, VIOLATIONS[name], str(path.relative_to(tree)))
    assert ratchet.main([], root=tree) == 1
    assert f"{name}: " in capsys.readouterr().out
    path.write_text(clean)
    assert ratchet.main([], root=tree) == 0


def test_every_rule_has_a_violation_in_this_file():
    rules = {rule.name for rule in (*ratchet_rules.RULES, *ratchet_rules.TREE_RULES)}
    assert {name.rpartition(".")[2] for name in VIOLATIONS} == rules | {"lines"}


def test_a_failure_names_the_place_and_the_remedy(tree, capsys):
    append(tree, "found = 'x'")
    ratchet.main([], root=tree)
    printed = capsys.readouterr().out
    assert "src/tilewise/fit/rounding.py:9: `found` is a bare participle" in printed
    assert "Name the value by what it is" in printed


def test_a_failure_shows_changed_lines_only_where_it_can(tree, capsys):
    append(tree, "found = 'x'")
    ratchet.main(["--lower", "--allow", "fit.participles", "--reason", "test"], root=tree)
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=tree, check=True)
    append(tree, "told = 'x'")
    capsys.readouterr()
    assert ratchet.main([], root=tree) == 1
    printed = capsys.readouterr().out
    assert "rounding.py:12: `told`" in printed and "`found`" not in printed


def test_each_word_of_the_table_counts_where_it_is_not_precise():
    file = ratchet_rules.SourceFile("tune/families", "a.py", "families = factors = surety = 'x'\n")
    assert [violation.text for violation in ratchet_rules.dialect(file)] == ["`surety`: say confidence"]
    file = ratchet_rules.SourceFile("quantize", "a.py", "families = Line = 'x'\nclass Line: pass\n")
    assert [violation.line for violation in ratchet_rules.dialect(file)] == [2, 1]


def test_ordinary_uses_of_left_and_read_pass():
    text = "def read(path):\n    left, right = path\n    return left + right\n"
    assert not [*ratchet_rules.participles(ratchet_rules.SourceFile("fit", "a.py", text))]


def test_strings_of_the_interpreter_are_not_kinds():
    text = "if __name__ == '__main__' or sys.platform == 'linux' or name == '':\n    pass\n"
    assert not [*ratchet_rules.kind_branches(ratchet_rules.SourceFile("fit", "a.py", text))]


def test_class_names_count_over_the_whole_tree(tree, capsys):
    append(tree, "class Result: pass")
    append(tree, "class Result: pass", "src/tilewise/nn/result.py")
    ratchet.main([], root=tree)
    assert "class `Result` is also defined at src/tilewise/fit/rounding.py:9" in capsys.readouterr().out


def test_cpp_names_and_lines_count(tree, capsys):
    append(tree, "int found = 3;  // kept in a comment\nreturn told;\n// " + "x" * 120, "native/kernels/gemm.cpp")
    ratchet.main(["--show", "native"], root=tree)
    printed = capsys.readouterr().out
    assert "native/kernels/gemm.cpp:3: `found`" in printed
    assert "kept" not in printed and "told" not in printed
    assert "gemm.cpp:5: 123 columns" in printed


def test_tests_count_by_their_names_only(tree):
    append(tree, VIOLATIONS["fit.lines"] + VIOLATIONS["fit.numeric_constants"], FILES["tests"])
    append(tree, VIOLATIONS["tree.repeated_class_names"], FILES["tests"])
    assert ratchet.main([], root=tree) == 0


def test_missing_comments_count_in_algorithmic_packages_only():
    text = "value = 'x'\n" * 100
    assert len([*ratchet_rules.missing_comments([ratchet_rules.SourceFile("tune/search", "a.py", text)])]) == 3
    assert not [*ratchet_rules.missing_comments([ratchet_rules.SourceFile("tune/choose", "a.py", text)])]
    commented = "# Start from the prior mean.\n" * 4 + text
    assert not [*ratchet_rules.missing_comments([ratchet_rules.SourceFile("tune/search", "a.py", commented)])]


def test_a_fall_passes_and_lowers_the_ceiling(tree, capsys):
    append(tree, "found = told = 'x'")
    ratchet.main(["--lower", "--allow", "fit.participles", "--reason", "test"], root=tree)
    assert ceilings(tree)["fit"]["participles"] == 2
    (tree / "src/tilewise/fit/rounding.py").write_text(CLEAN)
    capsys.readouterr()
    assert ratchet.main([], root=tree) == 0
    assert "1 ceilings can be lowered: make ratchet" in capsys.readouterr().out
    assert ratchet.main(["--lower"], root=tree) == 0
    assert "participles" not in ceilings(tree)["fit"]


def test_lowering_never_raises_and_raising_needs_a_reason(tree):
    append(tree, "found = 'x'")
    assert ratchet.main(["--lower"], root=tree) == 1
    with pytest.raises(SystemExit):
        ratchet.main(["--lower", "--allow", "fit.participles"], root=tree)
    assert ratchet.main(["--lower", "--allow", "fit.participles", "--reason", "quoted name"], root=tree) == 0
    raises = json.loads((tree / "tools" / "ratchet.json").read_text())["raises"]
    assert raises[-1] == {"names": ["fit.participles"], "reason": "quoted name"}


def test_a_small_fix_needs_no_new_ceiling_for_lines(tree):
    append(tree, "print('fixed')")
    assert ratchet.main([], root=tree) == 0
