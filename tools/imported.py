"""Count the files and lines of tilewise that a job imports: what its user has to trust, and could read.

    python -m tools.imported                    every job; exit 1 if one passed its ceiling (`make lint`)
    python -m tools.imported score --list       one job, with its modules and their lines
    python -m tools.imported --lower            lower the ceilings in tools/ratchet.json (`make ratchet`)
    python -m tools.imported --lower --allow imported/score --reason "ranks with uncertainty"

A job is a file of `tools/jobs`. Its docstring names it, `run()` does it, and `prepare()`, if it has one, writes its
input files in another process. The job runs in a fresh interpreter and `sys.modules` is read afterwards, so imports
that happen late, at the first call, count as well.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.ratchet import CEILINGS_FILE, ROOT, Counts, compare, lower_ceilings, read_ceilings

JOBS_FOLDER = ROOT / "tools" / "jobs"
JOBS = {path.stem.replace("_", "-"): path for path in sorted(JOBS_FOLDER.glob("*.py"))}
SECTION = "imported"  # of the ceilings file
TIMEOUT_SECONDS = 300  # a job takes one to ten seconds on an idle machine

# Appended to a job: print the source file of each tilewise module that is imported by now.
_LIST_MODULES = """
import json, sys
files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
print(json.dumps({name: file for name, file in files.items() if name.startswith("tilewise") and file.endswith(".py")}))
"""


def imported_modules(job: Path) -> dict[str, int]:
    """Run a job in a fresh interpreter and return the tilewise modules it imported, with the lines of each."""
    source = job.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        if "\ndef prepare(" in source:
            _run(f"{source}\nprepare()", folder)
        output = _run(f"{source}\nrun()\n{_LIST_MODULES}", folder)
    files: dict[str, str] = json.loads(output.splitlines()[-1])
    return {name: len(Path(file).read_text(encoding="utf-8").splitlines()) for name, file in files.items()}


def _run(program: str, folder: str) -> str:
    """Run a program in a folder, with an empty cache, and return its output."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder,
        env=os.environ | {"TILEWISE_CACHE": folder},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if process.returncode:
        raise SystemExit(f"The job failed; update its file in tools/jobs.\n{process.stderr}")
    return process.stdout


def title(job: Path) -> str:
    """Return the first line of a job's docstring."""
    return (ast.get_docstring(ast.parse(job.read_text(encoding="utf-8"))) or "").splitlines()[0]


def measure(names: list[str], *, with_modules: bool = False) -> Counts:
    """Count and print the files and lines of each job; the result has the form of the ratchet's ceilings."""
    counts: Counts = {}
    for name in names:
        modules = imported_modules(JOBS[name])
        lines = sum(modules.values())
        counts[f"imported/{name}"] = {"files": len(modules), "imported_lines": lines}
        print(f"{name:12}{len(modules):>5} files{lines:>7} lines   {title(JOBS[name])}")
        if with_modules:
            print("\n".join(f"{count:>8}  {module}" for module, count in sorted(modules.items())))
    return counts


def main(arguments: list[str] | None = None, ceilings_file: Path = CEILINGS_FILE) -> int:
    """Run the command line that the module's docstring describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"one of {', '.join(JOBS)}; all of them by default")
    parser.add_argument("--list", action="store_true", help="also list the modules")
    parser.add_argument("--lower", action="store_true", help="lower each ceiling to the count")
    parser.add_argument(
        "--allow", nargs="*", default=[], metavar="NAME", help="ceilings that may rise, such as imported/score"
    )
    parser.add_argument("--reason", help="why those ceilings rise")
    options = parser.parse_args(arguments)
    if unknown := set(options.jobs) - set(JOBS):
        parser.error(f"there is no job {', '.join(unknown)}; use one of {', '.join(JOBS)}")
    if options.allow and not options.reason:
        parser.error("--allow needs --reason: say why the ceiling has to rise")

    names = list(JOBS) if options.lower or not options.jobs else options.jobs
    counts = measure(names, with_modules=options.list)
    if options.lower:
        lower_ceilings(ceilings_file, SECTION, counts, options.allow, options.reason)
    differences = compare(counts, read_ceilings(ceilings_file)[SECTION])
    rises = [difference for difference in differences if difference.is_rise]
    for rise in rises:
        print(f"{rise.name}: {rise.count}, the ceiling is {rise.ceiling}. Import late, or split the new module.")
    return 1 if rises else 0


if __name__ == "__main__":
    sys.exit(main())
