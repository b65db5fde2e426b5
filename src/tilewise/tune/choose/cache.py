"""The tuner's persistent memory of its choices: one line of JSON each, appended, never rewritten.

A line says for which machine, version and problem which configuration was best. It is written by a single call on a
file opened for appending, so two processes do not mix their lines; the last line about a problem counts. A line that
cannot be read costs one choice, not the file. Configurations are kept by their values, not by their place in a list, so
editing the list of configurations loses nothing but the choices that are no longer in it.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise import __version__
from tilewise._files import convert_read_errors, open_input
from tilewise._system import cache_folder as system_cache
from tilewise.errors import MissingFileError, TilewiseError, UnavailableError
from tilewise.store.problem import Config, Problem

if TYPE_CHECKING:
    from tilewise.tune.search.loop import Step

FORMAT = 1
FILE = "choices.jsonl"
ELSEWHERE = "TILEWISE_CACHE names another folder"  # what to do where this one cannot be written
_MOST_BYTES = 256 << 20


def cache_folder() -> Path:
    """Where the tuner keeps what it learned: ``$TILEWISE_CACHE``, else the user's cache folder."""
    return system_cache() / "tune"


@dataclass(frozen=True)
class Decision:
    """A choice and where it came from: "cache", "measured", "service" (another machine's), "model" (not
    measured), or "default"."""

    problem: Problem
    config: Config
    source: str
    runtime_ns: float | None = None
    default_ns: float | None = None
    measurements: int = 0
    sure: bool = False  # every configuration was measured
    within5: bool | None = None  # "sure within five per cent" of the fastest; None where nothing is known of that
    seconds: float = 0.0
    reason: str = ""
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        """Over the default configuration, where both were measured."""
        return self.default_ns / self.runtime_ns if self.runtime_ns and self.default_ns else None


class Choices:
    """The choices of one machine and version; `notes` says what was left alone and why."""

    def __init__(self, folder: str | os.PathLike[str] | None, machine: str, version: str = __version__) -> None:
        self.path = (Path(folder).expanduser() if folder is not None else cache_folder()) / FILE
        self.machine, self.version = machine, version
        self.notes: list[str] = []
        self._known: dict[str, Decision] = {}
        self._read_bytes = 0
        self.refresh()

    def refresh(self) -> None:
        """Take in what was appended since, by this process or another."""
        try:
            with open_input(self.path, _MOST_BYTES) as stream, convert_read_errors(self.path):
                stream.seek(self._read_bytes)
                content = stream.read(_MOST_BYTES)
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
                    reason = self._take(json.loads(line))
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

    def _take(self, line: Any) -> str | None:
        """Keep one line; a reason if it is another's."""
        if not isinstance(line, dict):
            raise ValueError("the line is no object")
        if zlib.crc32(_body(line)) != line["check"]:
            raise ValueError("the line was changed")
        if line["format"] != FORMAT or line["version"] != self.version:
            return "another version"
        if line["machine"] != self.machine:
            return "another machine"
        runtime_ns = float(line["runtime_ns"])
        if not 0 < runtime_ns < math.inf or not all(isinstance(v, int) for v in line["config"].values()):
            raise ValueError("the numbers mean nothing")
        problem = Problem(line["problem"])
        if not isinstance(problem["family"], str) or not all(type(v) in (int, str) for v in problem.values()):
            raise ValueError("the problem is none")
        self._known.pop(problem.key, None)  # the last line comes last in `all`
        measurements, sure = int(line["measurements"]), bool(line["sure"])
        self._known[problem.key] = _kept(problem, Config(line["config"]), runtime_ns, measurements, sure)
        return None

    def get(self, problem: Problem, allowed: Callable[[Config], bool] = lambda config: True) -> Decision | None:
        """The choice for a problem, unless its configuration is no longer `allowed`."""
        found = self._known.get(problem.key)
        if found is not None and not allowed(found.config):
            self.notes.append(f"the choice kept for {problem.key} is no longer in the list of configurations")
            return None
        return found

    def put(self, choice: Decision) -> None:
        """Append a choice; it is in the file, whole, when this returns."""
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
        self._known.pop(choice.problem.key, None)
        kept = _kept(choice.problem, choice.config, choice.runtime_ns, choice.measurements, choice.sure)
        self._known[choice.problem.key] = kept
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                content = self._after_half_a_line() + content
                if os.write(descriptor, content) < len(content):  # half a line costs that line alone
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnavailableError(
                f"{self.path} cannot be written ({error.strerror or error}); {ELSEWHERE}."
            ) from error

    def _after_half_a_line(self) -> bytes:
        """A line break, where a process died in the middle of its line."""
        with contextlib.suppress(OSError), self.path.open("rb") as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                return b"" if stream.read(1) == b"\n" else b"\n"
        return b""

    def all(self) -> list[Decision]:
        return list(self._known.values())


def _body(line: Mapping[str, Any]) -> bytes:
    return json.dumps({k: v for k, v in line.items() if k != "check"}, sort_keys=True).encode()


def _kept(problem: Problem, config: Config, runtime_ns: float | None, measurements: int, sure: bool) -> Decision:
    """A choice as it comes out of the file."""
    return Decision(problem, config, "cache", runtime_ns, None, measurements, sure, reason="it was tuned before")
