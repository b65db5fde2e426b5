"""Runs one target: damaged files, one after another, and what came of each."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import tempfile
import time
import traceback
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fuzz.kept_files
import fuzz.more_files
import fuzz.onnx_files
import fuzz.spoken  # noqa: F401 - each adds its targets to the table
from fuzz.damage import in_bytes
from fuzz.strangers import Mutation
from fuzz.targets import TARGETS, Target
from tilewise.errors import TilewiseError

CORPUS = Path(__file__).with_name("corpus")
MOST_SECONDS = 10.0
MOST_CHARACTERS = 400  # of a sentence
MOST_GROWTH_MIB = 512.0


@dataclass
class Outcome:
    """How many files were read or refused, and by place what escaped: how often, and one such file in hexadecimal."""

    accepted: int = 0
    rejected_count: int = 0
    slowest_s: float = 0.0
    grown_mib: float = 0.0
    failures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def run_target(
    name: str, count: int, seed: int, progress: Path | None = None, mutate: Mutation | None = None
) -> Outcome:
    """Try `count` damaged files on the reader called `name`, the same ones for the same seed.

    `mutate` replaces the target's own damage.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, contextlib.ExitStack() as stack:
        target = TARGETS[name](Path(folder))
        stack.callback(target.close)
        good = target.place.read_bytes()
        target.use(target.place)  # what is not damaged must be read
        before = _peak_mib()
        for _ in range(count):
            content = damaged(target, good, rng) if mutate is None else mutate(good, rng)
            if progress is not None:
                progress.write_bytes(content)
            try_one(target, content, outcome)
        outcome.grown_mib = _peak_mib() - before
    if outcome.grown_mib > MOST_GROWTH_MIB:
        outcome.failures.setdefault(f"memory grew by {outcome.grown_mib:.0f} MiB", [1, ""])
    return outcome


def damaged(target: Target, good: bytes, rng: np.random.Generator) -> bytes:
    content = good
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        within = bool(target.inside) and rng.random() < 0.7
        inside = target.inside[int(rng.integers(len(target.inside)))] if within else in_bytes
        try:
            content = inside(content, rng)
        except Exception:  # what was damaged before may not be taken apart again
            content = in_bytes(content, rng)
    return content


def try_one(target: Target, content: bytes, outcome: Outcome) -> None:
    target.place.write_bytes(content)
    started, before = time.process_time(), _peak_mib()
    try:
        with np.errstate(all="ignore"):
            target.use(target.place)
        outcome.accepted += 1
    except TilewiseError as error:
        outcome.rejected_count += 1
        sentence = str(error)
        if not 0 < len(sentence) <= MOST_CHARACTERS or not sentence.isprintable():
            _failed(outcome, f"not one printable sentence: {sentence!r}"[:200], content)
    except Exception as error:
        _failed(outcome, _place(error), content)
    seconds = time.process_time() - started
    outcome.slowest_s = max(outcome.slowest_s, seconds)
    if seconds > MOST_SECONDS:
        _failed(outcome, f"{seconds:.0f} s", content)
    if _peak_mib() - before > MOST_GROWTH_MIB:
        _failed(outcome, f"{_peak_mib() - before:.0f} MiB", content)


def _failed(outcome: Outcome, where: str, content: bytes) -> None:
    times, content_hex = outcome.failures.get(where, (0, content.hex()))
    outcome.failures[where] = [times + 1, content_hex]


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "tilewise" in frame.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:100]}"


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
