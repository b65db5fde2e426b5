"""`tilewise lock`: the file of GPU configurations that were chosen without measuring; `tilewise run-pinned`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, answer, argument, option

lock = typer.Typer(
    help="GPU configurations chosen without measuring: run a script so, and keep, compare and renew the choices.",
    no_args_is_help=True,
)
# Everything behind the script's name belongs to the script.
_SCRIPT_ARGUMENTS = {"allow_interspersed_args": False}
_File = Annotated[Path, argument("The lock file.")]


@lock.command()
def show(file: _File = Path("tilewise.lock"), as_json: AsJson = False) -> None:
    """Show every choice of a lock file: kernel, problem, configuration and reason.

    Example: tilewise lock show tilewise.lock
    """
    from tilewise.gpu.pinning.lock import LockFile, describe

    choices = list(LockFile(file, frozen=True))
    lines = [
        f"{choice.kernel} ({_pairs(choice.problem)}) on {choice.device}\n    {_pairs(choice.config)}; {choice.reason}"
        for choice in choices
    ]
    answer(as_json, [describe(choice) for choice in choices], *lines, f"{len(choices)} choices in {file}.")


@lock.command()
def check(file: _File = Path("tilewise.lock"), as_json: AsJson = False) -> None:
    """Compare a lock file with the choices of this tilewise; the exit code is 1 if one would change, else 0.

    Example: tilewise lock check tilewise.lock
    """
    from tilewise.gpu.pinning.lock import LockFile
    from tilewise.gpu.pinning.recompute import LockVerdict, compare_lock

    comparisons = compare_lock(LockFile(file, frozen=True))
    differing = [one for one in comparisons if one.verdict is not LockVerdict.SAME]
    rows = [{"kernel": one.locked.kernel, "problem": dict(one.locked.problem), "verdict": str(one.verdict)}
            for one in comparisons]  # fmt: skip
    lines = []
    for one in differing:
        today = "the model is another one; only a run can tell" if one.today is None else _pairs(one.today.config)
        lines.append(f"{one.locked.kernel} ({_pairs(one.locked.problem)}): {_pairs(one.locked.config)} -> {today}")
    unchanged = f"{len(comparisons) - len(differing)} of {len(comparisons)} choices are those of this tilewise."
    answer(as_json, rows, *lines, unchanged)
    if differing:
        raise typer.Exit(1)


@lock.command()
def update(file: _File = Path("tilewise.lock"), as_json: AsJson = False) -> None:
    """Replace the choices that would change; those that need a run are removed, and the next run adds them.

    Example: tilewise lock update tilewise.lock
    """
    from tilewise.gpu.pinning.lock import LockFile
    from tilewise.gpu.pinning.recompute import LockVerdict, compare_lock

    LockFile(file, frozen=True)  # a file that does not exist is an error here
    lock_file = LockFile(file)
    comparisons = compare_lock(lock_file)
    today = [one.today for one in comparisons if one.today is not None]
    removed = len(comparisons) - len(today)
    changed = sum(one.verdict is LockVerdict.CHANGED for one in comparisons)
    lock_file.replace_all(today)
    counts = {"choices": len(today), "changed": changed, "removed": removed}
    answer(as_json, counts, f"{pluralize(changed, 'choice')} changed, {removed} removed, {len(today)} in {file}.")


@lock.command(context_settings=_SCRIPT_ARGUMENTS)
def run(
    script: Annotated[Path, argument("The Python script.")],
    arguments: Annotated[list[str] | None, argument("The script's own arguments.")] = None,
    file: Annotated[Path | None, option("A lock file to use and to add new choices to.", "--lock")] = None,
    frozen: Annotated[bool, option("Fail if the lock file lacks a choice.")] = False,
) -> None:
    """Run a Python script in which no GPU configuration is chosen by measuring; also `tilewise run-pinned`.

    Example: tilewise lock run --lock tilewise.lock train.py --steps 100
    """
    from tilewise.errors import MissingFileError
    from tilewise.gpu.pinning import pin, startup_folder

    if not script.is_file():
        raise MissingFileError(f"{script} does not exist.")
    # Processes that the script starts, such as the ranks of torchrun, are pinned when their Python starts.
    path = os.pathsep.join(filter(None, (startup_folder(), os.environ.get("PYTHONPATH"))))
    os.environ.update({"TILEWISE_PIN": "1", "PYTHONPATH": path})
    if file is not None:
        os.environ["TILEWISE_LOCK"] = str(file.absolute())
    pin(file, frozen=frozen)
    sys.argv = [str(script), *(arguments or ())]
    sys.path.insert(0, str(script.parent.absolute()))
    runpy.run_path(str(script), run_name="__main__")


def _pairs(table: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in table.items())
