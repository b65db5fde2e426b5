"""The file `tilewise.lock`: configurations that were chosen without measuring, one table per choice.

The file is TOML, sorted, with one value per line, so that it can be read, committed and compared. A choice is found by
device, kernel (its name and a digest of its source) and problem (the values of its key, the dtypes). Several processes
may add to the same file: each merges its choices with the file's under a system lock and replaces the file whole.

    [[choice]]
    kernel = "matmul_kernel:6f0c54e0a0f1d3b2"
    problem = { K = 4096, M = 512, N = 4096, dtype0 = "torch.bfloat16" }
    device = "NVIDIA H200"
    config = { BLOCK_K = 64, BLOCK_M = 128, BLOCK_N = 256, num_stages = 3, num_warps = 8 }
    predicted = 0.0
    model = "h200 1c29ab03"
    reason = "first of 16 by the cost model"
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import threading
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise._atomic import file_lock, write_atomic
from tilewise._files import read_text_input
from tilewise._system import cache_folder
from tilewise.errors import FileFormatError, MissingFileError, TilewiseError
from tilewise.store.problem import Config, Problem

FILE = "tilewise.lock"
_FORMAT = 1
_MAX_BYTES = 64 << 20  # about a hundred thousand choices; arbitrary
_HEADER = (
    "# GPU configurations that tilewise chose without measuring.\n"
    "# `tilewise lock check` compares them with the choices of the installed tilewise, `tilewise lock update` renews "
    "them.\n"
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
Identity = tuple[str, str, str]  # kernel, the problem's canonical text, device


class MissingChoiceError(TilewiseError, LookupError):
    """A frozen lock file has no choice for a problem."""


@dataclass(frozen=True)
class LockedChoice:
    """One configuration that was chosen for a problem, with the model and the reason."""

    kernel: str  # name and digest of the source, or the compiler's operation
    problem: Problem
    device: str
    config: Config
    predicted: float | None  # predicted cost: microseconds, or the ranking model's score; lower is faster
    model: str  # name and digest of the model that ranked the candidates; empty if none did
    reason: str
    candidates: tuple[Config, ...] = ()  # the alternatives considered; of long lists the best few

    @property
    def identity(self) -> Identity:
        return self.kernel, self.problem.key, self.device


class LockFile:
    """The choices of one lock file. `frozen` files are never written."""

    def __init__(self, path: str | os.PathLike[str], *, frozen: bool = False) -> None:
        """Read the file; one that does not exist yet has no choices."""
        self.path, self.frozen = Path(path).expanduser(), frozen
        self._choices: dict[Identity, LockedChoice] = {}
        self._mutex = threading.Lock()
        try:
            self._choices = read_lock(self.path)
        except MissingFileError:
            if frozen:
                raise

    def __iter__(self) -> Any:
        return iter(sorted(self._choices.values(), key=lambda choice: choice.identity))

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the file's choices."""
        return hashlib.sha256(format_lock(self).encode()).hexdigest()[:16]

    def find(self, kernel: str, problem: Problem, device: str) -> LockedChoice | None:
        """Return the choice for a problem; None if the file has none."""
        return self._choices.get((kernel, problem.key, device))

    def add(self, choice: LockedChoice) -> None:
        """Add a choice and write the file; raise MissingChoiceError if the file is frozen."""
        if self.frozen:
            raise MissingChoiceError(
                f"{self.path} has no choice for {choice.kernel} with {_inline(choice.problem)} on {choice.device}; run "
                "once without the frozen mode to add it."
            )
        guards = cache_folder() / "locks"  # the file itself is replaced, so its guard must be another file
        guards.mkdir(parents=True, exist_ok=True)
        guard = guards / hashlib.sha256(str(self.path.absolute()).encode()).hexdigest()[:16]
        with self._mutex, file_lock(guard):
            try:  # other processes may have added choices meanwhile
                others = read_lock(self.path)
            except MissingFileError:
                others = {}
            self._choices = {**others, **self._choices, choice.identity: choice}
            write_atomic(self.path, format_lock(self))

    def replace_all(self, choices: Iterable[LockedChoice]) -> None:
        """Replace all choices and write the file."""
        self._choices = {choice.identity: choice for choice in choices}
        write_atomic(self.path, format_lock(self))


def format_lock(choices: Iterable[LockedChoice]) -> str:
    """Format choices as the text of a lock file, sorted by kernel, problem and device."""
    tables = [_HEADER + f"format = {_FORMAT}\n"]
    for choice in sorted(choices, key=lambda choice: choice.identity):
        lines = ["[[choice]]", f"kernel = {_quote(choice.kernel)}", f"problem = {_inline(choice.problem)}",
                 f"device = {_quote(choice.device)}", f"config = {_inline(choice.config)}"]  # fmt: skip
        if choice.predicted is not None:
            lines.append(f"predicted = {choice.predicted:.6g}" + ("" if choice.predicted % 1 else ".0"))
        lines += [f"model = {_quote(choice.model)}", f"reason = {_quote(choice.reason)}"]
        if choice.candidates:
            lines += ["candidates = [", *(f"  {_inline(config)}," for config in choice.candidates), "]"]
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def read_lock(path: Path) -> dict[Identity, LockedChoice]:
    """Read the choices of a lock file, at most 64 MiB; FileFormatError if it is damaged."""
    text = read_text_input(path, _MAX_BYTES)
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise FileFormatError(f"{path} is not a lock file: it is not TOML ({str(error)[:120]}).") from None
    if content.get("format") != _FORMAT:
        raise FileFormatError(f"{path} is not a lock file of format {_FORMAT}; write it again with this version.")
    choices = content.get("choice", [])
    if not isinstance(choices, list):
        raise FileFormatError(f"{path} is not a lock file: `choice` is not a list of tables.")
    parsed = [_parse_choice(path, number, table) for number, table in enumerate(choices, start=1)]
    return {choice.identity: choice for choice in parsed}


def _parse_choice(path: Path, number: int, table: Any) -> LockedChoice:
    """Convert table `number` of a lock file to a choice; FileFormatError if it is invalid."""
    try:
        predicted = table.get("predicted")
        if predicted is not None and not math.isfinite(float(predicted)):
            raise ValueError("predicted is not finite")
        texts = {name: table[name] for name in ("kernel", "device", "model", "reason")}
        if not all(isinstance(value, str) for value in texts.values()):
            raise ValueError("a text is not a text")
        return LockedChoice(
            **texts,
            problem=Problem(_check_types(table["problem"], (int, str))),
            config=Config(_check_types(table["config"], (int,))),
            predicted=None if predicted is None else float(predicted),
            candidates=tuple(Config(_check_types(config, (int,))) for config in table.get("candidates", [])),
        )
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"{path}: choice {number} is damaged ({error}); remove it or write it again.") from None


def _check_types(values: Any, types: tuple[type, ...]) -> Mapping[str, Any]:
    """Return a table if each of its values has one of the types; raise `ValueError` otherwise."""
    if not isinstance(values, dict) or not all(type(value) in types for value in values.values()):
        raise ValueError("a table has a value of another type")
    return values


def _inline(table: Mapping[str, Any]) -> str:
    """Format a flat table as an inline TOML table."""
    keys = [name if _BARE_KEY.fullmatch(name) else _quote(name) for name in table]
    values = [value if isinstance(value, int) else _quote(value) for value in table.values()]
    pairs = [f"{key} = {value}" for key, value in zip(keys, values, strict=True)]
    return "{ " + ", ".join(pairs) + " }" if pairs else "{}"


def _quote(value: str) -> str:
    """Quote a string for TOML, whose syntax differs from JSON's only in the delete character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def describe(choice: LockedChoice) -> dict[str, Any]:
    """Convert a choice to a JSON object."""
    return {**dataclasses.asdict(choice), "problem": dict(choice.problem), "config": dict(choice.config),
            "candidates": [dict(config) for config in choice.candidates]}  # fmt: skip
