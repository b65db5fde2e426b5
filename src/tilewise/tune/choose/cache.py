"""The tuner's persistent cache of choices: an append-only file with one line of JSON per choice.

A line names a machine, a version, a problem and the configuration that was fastest. Each line is written by a single
call on a file opened for appending, so two processes never interleave their lines. If a problem has several lines, the
last one counts. A damaged line loses one choice, not the file. Configurations are stored by their values, not by their
index in a list, so editing the list of configurations only invalidates the choices that are no longer in it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise import __version__
from tilewise._files import convert_read_errors, open_input
from tilewise._system import cache_folder as system_cache
from tilewise.errors import MissingFileError, TilewiseError, UnavailableError
from tilewise.store.problem import Config, Problem

if TYPE_CHECKING:
    from tilewise.tune.choose.decide import SearchStep
    from tilewise.tune.measure.confirm import ConfirmedGain

FORMAT = 1
FILE = "choices.jsonl"
ELSEWHERE = "TILEWISE_CACHE names another folder"  # the advice in errors about a folder that cannot be written
_MAX_BYTES = 256 << 20  # of the file; arbitrary, about a million choices


def cache_folder() -> Path:
    """Folder of choices and measurements, in ``$TILEWISE_CACHE`` or else in the user's cache folder."""
    return system_cache() / "tune"


@dataclass(frozen=True)
class Decision:
    """The configuration chosen for a problem and the source of that choice.

    `source` is "cache", "measured", "service" (measured by another machine), "model" (ranked, not measured) or
    "default".
    """

    problem: Problem
    config: Config
    source: str
    runtime_ns: float | None = None
    default_ns: float | None = None
    measurements: int = 0
    sure: bool = False  # every configuration was measured
    within5: bool | None = None  # within 5 % of the fastest (calibrated); None without a calibration
    seconds: float = 0.0
    reason: str = ""
    steps: list[SearchStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Comparison of the fastest measured configuration with the default, independent of the search; kept if it won.
    gain: ConfirmedGain | None = None

    @property
    def speedup(self) -> float | None:
        """Runtime of the default divided by that of the choice; None unless both were measured."""
        return self.default_ns / self.runtime_ns if self.runtime_ns and self.default_ns else None


class ChoiceFile:
    """The cached choices of one machine and version, in a file; `notes` lists ignored lines and why."""

    def __init__(self, folder: str | os.PathLike[str] | None, machine: str, version: str = __version__) -> None:
        """Read the choices of `machine` from a folder (None: the user's cache folder)."""
        self.path = (Path(folder).expanduser() if folder is not None else cache_folder()) / FILE
        self.machine, self.version = machine, version
        self.notes: list[str] = []
        self._choices: dict[str, Decision] = {}
        self._read_bytes = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that other processes have appended since the last call."""
        try:
            with open_input(self.path, _MAX_BYTES) as stream, convert_read_errors(self.path):
                stream.seek(self._read_bytes)
                content = stream.read(_MAX_BYTES)
        except MissingFileError:
            return
        except TilewiseError as error:
            self.notes.append(f"{str(error).rstrip('.')}; starting without it")
            return
        whole = content[: content.rfind(b"\n") + 1]  # another process may be in the middle of a line
        self._read_bytes += len(whole)
        foreign: dict[str, int] = {}
        damaged = 0
        for line in whole.split(b"\n"):
            if line.strip():
                try:
                    reason = self._add_line(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                    damaged += 1
                    continue
                if reason:
                    foreign[reason] = foreign.get(reason, 0) + 1
        self.notes += [
            f"{count} choices in {self.path} are of {reason} and are left alone" for reason, count in foreign.items()
        ]
        if damaged:
            self.notes.append(f"{damaged} damaged lines in {self.path} are skipped; those shapes are tuned again")

    def _add_line(self, line: Any) -> str | None:
        """Add the choice in a parsed line; return why not if it is of another machine or version, else None."""
        if not isinstance(line, dict):
            raise ValueError("the line is not an object")
        if zlib.crc32(_body(line)) != line["check"]:
            raise ValueError("the line was changed")
        if line["format"] != FORMAT or line["version"] != self.version:
            return "another version"
        if line["machine"] != self.machine:
            return "another machine"
        runtime_ns = float(line["runtime_ns"])
        if not 0 < runtime_ns < math.inf or not all(isinstance(v, int) for v in line["config"].values()):
            raise ValueError("a number is out of range")
        problem = Problem(line["problem"])
        if not isinstance(problem["family"], str) or not all(type(v) in (int, str) for v in problem.values()):
            raise ValueError("the problem is malformed")
        decision = Decision(problem, Config(line["config"]), "cache", runtime_ns, reason="it was tuned before")
        self._choices.pop(problem.key, None)  # the last line comes last in `all`
        self._choices[problem.key] = replace(decision, measurements=int(line["measurements"]), sure=bool(line["sure"]))
        return None

    def get(self, problem: Problem, allowed: Callable[[Config], bool] = lambda config: True) -> Decision | None:
        """Return the cached choice for a problem; None without one, or if `allowed` rejects its configuration."""
        choice = self._choices.get(problem.key)
        if choice is not None and not allowed(choice.config):
            self.notes.append(f"the cached choice for {problem.key} is no longer in the list of configurations")
            return None
        return choice

    def put(self, choice: Decision) -> None:
        """Append a choice to the file. The whole line is on disk when this returns."""
        line: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "machine": self.machine,
            "problem": dict(choice.problem),
            "config": dict(choice.config),
            "runtime_ns": choice.runtime_ns,
            "measurements": choice.measurements,
            "sure": choice.sure,
            "taken": round(time.time(), 3),
        }
        line["check"] = zlib.crc32(_body(line))
        content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._add_line(line)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as stream:
                content = self._missing_line_break() + content
                if stream.write(content) < len(content):  # a partial line only damages itself
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(stream.fileno())
        except OSError as error:
            raise UnavailableError(
                f"{self.path} cannot be written ({error.strerror or error}); {ELSEWHERE}."
            ) from error

    def _missing_line_break(self) -> bytes:
        """Return a line break if the file ends in the middle of a line (of a killed process), else b""."""
        with contextlib.suppress(OSError), self.path.open("rb") as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                return b"" if stream.read(1) == b"\n" else b"\n"
        return b""

    def all(self) -> list[Decision]:
        """Return every choice of this machine and version, oldest first."""
        return list(self._choices.values())


def _body(line: Mapping[str, Any]) -> bytes:
    """Serialize the part of a line that its checksum is computed from."""
    return json.dumps({k: v for k, v in line.items() if k != "check"}, sort_keys=True).encode()
