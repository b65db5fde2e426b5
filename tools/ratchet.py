"""Keep the code from getting worse: count violations per package and refuse every rise.

A large tree cannot meet a new rule at once. A ratchet lets it move in one direction only. Each rule of
`tools/ratchet_rules.py` is counted for each package and compared with a ceiling in `tools/ratchet.json`:

    python -m tools.ratchet                     compare with the ceilings; exit 1 if a count rose (`make lint`)
    python -m tools.ratchet --show quantize     list the violations of a package, or of the files under a path
    python -m tools.ratchet --table             print every count
    python -m tools.ratchet --lower             lower each ceiling to the count (`make ratchet`)
    python -m tools.ratchet --lower --allow quantize.lines --reason "adds ternary weights"

The last form raises a ceiling. It asks for a reason, which the file records, so that a reviewer sees both. A package
that is not in the file yet has ceilings of 0 and enters it the same way: `--allow PACKAGE --reason "moved from ..."`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.ratchet_rules import RULES, TREE_RULES, SourceFile, Violation

ROOT = Path(__file__).resolve().parents[1]
CEILINGS_FILE = ROOT / "tools" / "ratchet.json"

WHOLE_TREE = "tree"
# Packages large enough that each of their folders is counted by itself.
SPLIT_PACKAGES = ("bench", "costmodel", "gpu", "graph", "native", "quantize", "tune")
# Files that students complete, and their solutions: they are not the project's code.
EXCLUDED = ("src/tilewise/learn/start/", "tests/learn/solutions/")
# Tests are counted by the rules about names only: each states its promise in its name, and data needs constants.
TESTS = "tests"
TEST_RULES = ("participles",)
# Ceilings for lines are rounded up to a multiple of this, so that a bug fix or a comment does not need a new ceiling.
STEPS = {"lines": 50, "imported_lines": 500}

Counts = dict[str, dict[str, int]]


def source_files(root: Path = ROOT) -> list[SourceFile]:
    """Read every Python and C++ file that the ratchet counts, in a stable order."""
    folders = (root / "src" / "tilewise", root / "native", root / "tools", *sorted(root.glob("packages/*/src")))
    folders += (root / TESTS,)
    paths = (path for folder in folders for suffix in (".py", ".cpp", ".h") for path in folder.rglob(f"*{suffix}"))
    names = sorted(str(path.relative_to(root)) for path in paths)
    return [
        SourceFile(package_of(name), name, (root / name).read_text(encoding="utf-8"))
        for name in names
        if not name.startswith(EXCLUDED)
    ]


def package_of(path: str) -> str:
    """Name the package that a file counts towards.

    >>> package_of("src/tilewise/tune/search/space.py")
    'tune/search'
    >>> package_of("src/tilewise/tensor.py")
    'tilewise'
    >>> package_of("packages/tilewise-arena/src/tilewise_arena/app.py")
    'packages/tilewise-arena'
    """
    top, *folders = Path(path).parts[:-1]
    if top == "packages":
        return f"{top}/{folders[0]}"
    folders = folders[1:] if top == "src" else [top, *folders]
    if not folders:
        return "tilewise"
    return "/".join(folders[: 2 if folders[0] in SPLIT_PACKAGES else 1])


@dataclass
class Report:
    """The violations of a tree per package and rule, and the totals that rates are computed from."""

    lines: Counter[str] = field(default_factory=Counter)
    identifiers: Counter[str] = field(default_factory=Counter)
    docstrings: Counter[str] = field(default_factory=Counter)
    comments: Counter[str] = field(default_factory=Counter)
    violations: dict[str, dict[str, list[Violation]]] = field(default_factory=dict)

    @property
    def counts(self) -> Counts:
        """Violations and lines as numbers, the form that the ceilings have; rules without violations are left out."""
        counts = {package: {"lines": lines} for package, lines in self.lines.items()}
        for package, rules in self.violations.items():
            counts.setdefault(package, {}).update((rule, len(places)) for rule, places in rules.items() if places)
        return counts


def measure(files: list[SourceFile]) -> Report:
    """Apply every rule to every package, and the rules about the whole tree to all files."""
    report = Report()
    by_package: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        by_package[file.package].append(file)
        if file.package != TESTS:  # a test that is added needs no new ceiling
            report.lines[file.package] += len(file.lines)
        report.identifiers[file.package] += len(file.identifiers)
        report.docstrings[file.package] += len(file.docstrings)
        report.comments[file.package] += file.own_line_comments
    for package, members in by_package.items():
        rules = (rule for rule in RULES if package != TESTS or rule.name in TEST_RULES)
        report.violations[package] = {rule.name: sorted(rule.find(members)) for rule in rules}
    code = [file for file in files if file.package != TESTS]
    report.violations[WHOLE_TREE] = {rule.name: sorted(rule.find(code)) for rule in TREE_RULES}
    return report


@dataclass(frozen=True)
class Difference:
    """A count that differs from its ceiling."""

    package: str
    rule: str
    ceiling: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.package}.{self.rule}"

    @property
    def is_rise(self) -> bool:
        return self.count > self.ceiling


def compare(counts: Counts, ceilings: Counts) -> list[Difference]:
    """List the counts above their ceiling and those that allow a lower one."""
    names = {(package, rule) for table in (counts, ceilings) for package, rules in table.items() for rule in rules}
    differences = []
    for package, rule in sorted(names):
        count, ceiling = counts.get(package, {}).get(rule, 0), ceilings.get(package, {}).get(rule, 0)
        if count > ceiling or ceiling_for(rule, count) < ceiling:
            differences.append(Difference(package, rule, ceiling, count))
    return differences


def ceiling_for(rule: str, count: int) -> int:
    """Round a count up to the ceiling that is stored for it: lines get a little slack, violations none.

    >>> ceiling_for("lines", 1234), ceiling_for("participles", 7)
    (1250, 7)
    """
    step = STEPS.get(rule, 1)
    return math.ceil(count / step) * step


def new_ceilings(counts: Counts, ceilings: Counts, allowed: Iterable[str] = ()) -> Counts:
    """Lower every ceiling to its count, and raise those that are allowed by name (`package` or `package.rule`)."""
    result: Counts = {}
    for package, rules in sorted(counts.items()):
        for rule, count in sorted(rules.items()):
            ceiling = ceilings.get(package, {}).get(rule, 0)
            value = ceiling_for(rule, count)
            may_rise = is_allowed(package, rule, allowed)
            result.setdefault(package, {})[rule] = value if may_rise else min(value, ceiling)
    return result


def is_allowed(package: str, rule: str, allowed: Iterable[str]) -> bool:
    """Tell whether a ceiling may rise: its package or its full name is in the list."""
    return package in allowed or f"{package}.{rule}" in allowed


def explain(rise: Difference, report: Report, changed: set[tuple[str, int]]) -> Iterator[str]:
    """Say which ceiling was passed, what to do, and where: on changed lines if possible, else in the whole package."""
    rules = {rule.name: rule for rule in (*RULES, *TREE_RULES)}
    yield f"{rise.name}: {rise.count}, the ceiling is {rise.ceiling}"
    if rise.rule not in rules:
        yield f'  Remove code, or explain the growth: make ratchet ALLOW={rise.name} REASON="..."'
        return
    yield f"  {rules[rise.rule].advice}"
    places = report.violations[rise.package][rise.rule]
    on_changed_lines = [violation for violation in places if (violation.path, violation.line) in changed]
    yield from (f"  {violation}" for violation in on_changed_lines or places)


def changed_lines(root: Path) -> set[tuple[str, int]]:
    """Return path and number of each line that differs from where the branch left main; empty without git."""
    base = _git(root, "merge-base", "main", "HEAD").strip() or "HEAD"
    lines: set[tuple[str, int]] = set()
    path = ""
    for line in _git(root, "diff", "--unified=0", base).splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.update((path, number) for number in range(first, first + count))
    return lines


def _git(root: Path, *arguments: str) -> str:
    """Return the output of a git command, or nothing if it fails."""
    process = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return process.stdout if process.returncode == 0 else ""


def check(report: Report, ceilings: Counts, root: Path) -> int:
    """Print every rise with its violations, and return the exit status."""
    differences = compare(report.counts, ceilings)
    rises = [difference for difference in differences if difference.is_rise]
    changed = changed_lines(root) if rises else set()
    for rise in rises:
        print("\n".join(explain(rise, report, changed)))
    if len(differences) > len(rises):
        print(f"ratchet: {len(differences) - len(rises)} ceilings can be lowered: make ratchet")
    print(f"ratchet: {len(rises)} counts rose" if rises else "ratchet: no count rose")
    return 1 if rises else 0


def show(report: Report, target: str) -> None:
    """Print the violations of a package, of its sub-packages, or of the files under a path."""

    def is_shown(package: str, violation: Violation) -> bool:
        in_package = f"{package}/".startswith(f"{target}/")
        return in_package or violation.path.startswith(target) or f"src/tilewise/{target}/" in str(violation)

    for rule in (*RULES, *TREE_RULES):
        places = [
            violation
            for package, rules in report.violations.items()
            for violation in rules.get(rule.name, ())
            if is_shown(package, violation)
        ]
        if places:
            print(f"\n{rule.name}: {len(places)}. {rule.advice}")
            print("\n".join(f"  {violation}" for violation in places))


def table(report: Report) -> None:
    """Print one row per package, starting with the rates that the project's goals are stated in.

    ‰ are participles per thousand identifiers, the percentages are docstrings with a bad first word and lines that
    are comments.
    """
    columns = [rule.name for rule in RULES]
    counts_by_package = report.counts
    print(f"{'package':24}{'lines':>8}  participles ‰  openers %  comments %  " + "  ".join(columns))
    for package, lines in sorted(report.lines.items()):
        counts = counts_by_package[package]
        participles = 1000 * counts.get("participles", 0) / max(1, report.identifiers[package])
        openers = 100 * counts.get("docstring_openers", 0) / max(1, report.docstrings[package])
        comments = 100 * report.comments[package] / max(1, lines)
        cells = "  ".join(f"{counts.get(name, 0):>{len(name)}}" for name in columns)
        print(f"{package:24}{lines:>8}  {participles:>13.1f}  {openers:>9.1f}  {comments:>10.1f}  {cells}")
    for rule, places in report.violations[WHOLE_TREE].items():
        print(f"{WHOLE_TREE}: {report.lines.total()} lines, {rule} {len(places)}")


def read_ceilings(path: Path) -> dict[str, Any]:
    """Read the ceilings file; a tree without one starts with no ceilings."""
    if not path.exists():
        return {"ceilings": {}, "imported": {}, "raises": []}
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stored


def lower_ceilings(path: Path, section: str, counts: Counts, allowed: list[str], reason: str | None) -> None:
    """Store the new ceilings of a section, with a record of those that rose and why."""
    stored = read_ceilings(path)
    rises = [difference for difference in compare(counts, stored[section]) if difference.is_rise]
    names = sorted({rise.name for rise in rises if is_allowed(rise.package, rise.rule, allowed)})
    if names:
        stored["raises"].append({"names": names, "reason": reason})
    stored[section] = new_ceilings(counts, stored[section], allowed)
    path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line that the module's docstring describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="TARGET", help="list the violations of a package or a path")
    parser.add_argument("--table", action="store_true", help="print every count")
    parser.add_argument("--lower", action="store_true", help="lower each ceiling to the count")
    parser.add_argument(
        "--allow", nargs="*", default=[], metavar="NAME", help="ceilings to raise: PACKAGE or PACKAGE.RULE"
    )
    parser.add_argument("--reason", help="why those ceilings rise")
    options = parser.parse_args(arguments)
    if options.allow and not options.reason:
        parser.error("--allow needs --reason: say why the ceiling has to rise")

    report = measure(source_files(root))
    ceilings_file = root / CEILINGS_FILE.relative_to(ROOT)
    if options.show:
        show(report, options.show)
    elif options.table:
        table(report)
    elif options.lower:
        lower_ceilings(ceilings_file, "ceilings", report.counts, options.allow, options.reason)
    if options.show or options.table:
        return 0
    return check(report, read_ceilings(ceilings_file)["ceilings"], root)


if __name__ == "__main__":
    sys.exit(main())
