"""Check a commit message: an area, an imperative title of at most 72 characters, and a body for larger changes.

    python -m tools.commit_message FILE             the message in a file (pre-commit's commit-msg hook)
    python -m tools.commit_message --range A..B     every commit of a range

A good message reads:

    quantize: fold equalization into calibration

    Scales were applied after the ranges were measured, so ranges were too wide.
    MobileNetV2's top-1 agreement with float32 rises from 96.1 % to 98.4 %.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_TITLE_CHARACTERS = 72
MAX_LINES_WITHOUT_BODY = 50

TITLE = re.compile(r"(?P<area>[a-z0-9_./-]+(?:, [a-z0-9_./-]+)*): (?P<summary>\S.*)")
# Git writes these itself, or removes them again when it squashes.
GENERATED = re.compile(r"Merge |Revert \"|fixup! |squash! ")
TRAILER = re.compile(r"[A-Z][\w-]+-by: |Co-authored-by: ")
# Imperatives that look like another form of a verb.
IMPERATIVES = frozenset(
    ("alias", "bias", "bring", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed")
)


def problems(message: str, changed_lines: int) -> Iterator[str]:
    """Yield one sentence for each fault of a message that describes a change of so many lines."""
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    title, *remaining = lines or [""]
    if GENERATED.match(title):
        return
    if len(title) > MAX_TITLE_CHARACTERS:
        yield f"The title has {len(title)} characters; write at most {MAX_TITLE_CHARACTERS}."
    if match := TITLE.fullmatch(title):
        yield from summary_problems(match["summary"])
    else:
        yield "The title has no area; write it as `area: what the change does`."
    if remaining and remaining[0]:
        yield "The second line is not empty; leave it so, between title and body."
    body = [line for line in remaining if line and not TRAILER.match(line)]
    if changed_lines > MAX_LINES_WITHOUT_BODY and not body:
        yield f"The change has {changed_lines} lines and no body; say why it is made and what was measured."


def summary_problems(summary: str) -> Iterator[str]:
    """Yield the faults of what follows the area, as far as they can be told without a dictionary."""
    first_word = summary.split()[0].lower()
    if summary[0].isupper() and summary[1:2].islower():
        yield f"The summary starts with {summary.split()[0]!r}; write it in lower case."
    if summary.endswith("."):
        yield "The title ends with a period; leave it out."
    if len(summary.split()) < 2:
        yield f"The summary is one word ({summary!r}); say what the change does."
    looks_inflected = re.fullmatch(r"\w{2,}(?:ed|ing|[^su]s)", first_word) is not None
    if looks_inflected and first_word not in IMPERATIVES:
        yield f"The summary starts with {first_word!r}; use the imperative, such as `add`, `fix` or `remove`."


def git(*arguments: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def count_changed_lines(numstat: str) -> int:
    """Add up the added and removed lines of `git diff --numstat`; binary files, shown as `-`, count as none.

    >>> count_changed_lines("3\\t2\\ta.py\\n-\\t-\\tpicture.png\\n")
    5
    """
    counts = (field for line in numstat.splitlines() for field in line.split("\t")[:2])
    return sum(int(count) for count in counts if count.isdigit())


def main(arguments: list[str] | None = None) -> int:
    """Print the faults of the given messages, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", type=Path, help="the file that holds the message of the commit being made")
    source.add_argument("--range", help="commits to check, such as main..HEAD")
    options = parser.parse_args(arguments)
    if options.file:
        staged = count_changed_lines(git("diff", "--cached", "--numstat"))
        changes = [("", options.file.read_text(encoding="utf-8"), staged)]
    else:
        commits = git("rev-list", "--reverse", "--no-merges", options.range).split()
        changes = [
            (
                f"{commit[:9]}: ",
                git("show", "-s", "--format=%B", commit),
                count_changed_lines(git("show", "--numstat", "--format=", commit)),
            )
            for commit in commits
        ]
    faults = [f"{prefix}{problem}" for prefix, message, lines in changes for problem in problems(message, lines)]
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
