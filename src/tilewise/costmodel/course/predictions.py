"""Predictions on disk: the course's CSV of best configurations, the Kaggle file made of it, and a score for either.

A row is ``tile:xla:<kernel>,i;j;k;…``, best first. Rows are always matched by ID, never by position. A kernel with
fewer configurations than a row must hold repeats its best one, which is a valid index and cannot change a score. A row
of a layout collection, ``layout:xla:random:<graph>,…``, holds all configurations of its graph in the predicted order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import read_text_input, write_whole
from tilewise.costmodel.data.kernel import Kernel
from tilewise.errors import ConfigurationError, FileFormatError

HEADER = "ID,TopConfigs"
PREFIX = "tile:xla:"
PER_KERNEL = 5
# The course's text and its scripts disagree on the name of the file; both are looked for.
INPUT_NAMES = ("predictions_model_output.csv", "predictions_output_model.csv")
_LAYOUT_ROW = ";".join(str(i) for i in range(1000))
_MAX_BYTES = 256 << 20
_MAX_INDEX = 1 << 31

Rankings = Mapping[str, Sequence[int] | npt.NDArray[Any]]


@dataclass(frozen=True)
class PredictionScore:
    """How good predicted top configurations are, measured on kernels whose runtimes are known."""

    tile_score: float
    error_at: dict[int, float]
    error_at_by_program: dict[str, dict[int, float]]
    kernels: int
    ignored_rows: int


@dataclass(frozen=True)
class KaggleFile:
    """What went into a Kaggle file: tile rows with a prediction of ours, those without, predictions with no row, and
    layout rows with a prediction."""

    predicted: int
    filled: int
    unused: int
    layouts: int = 0
    notes: list[str] = field(default_factory=list)


def write_layout_predictions(path: Path, collection: str, rankings: Rankings) -> None:
    """Write all configurations of each graph in order, for a collection such as ``xla:random``."""
    lines = [f"layout:{collection}:{name},{';'.join(map(str, order))}" for name, order in rankings.items()]
    write_whole(path, "\n".join([HEADER, *lines]) + "\n")


def write_predictions(path: Path, rankings: Rankings, per_kernel: int = PER_KERNEL) -> int:
    """Write exactly `per_kernel` configurations a kernel; the number of kernels that had too few is returned."""
    lines, short = [HEADER], 0
    for name, ranking in rankings.items():
        if not len(ranking):
            raise ConfigurationError(f"Kernel {name} has no configuration to predict.")
        short += len(ranking) < per_kernel
        lines.append(f"{PREFIX}{name},{';'.join(map(str, _filled(ranking, per_kernel)))}")
    write_whole(path, "\n".join(lines) + "\n")
    return short


def padding_note(short: int, per_kernel: int = PER_KERNEL) -> str:
    """The sentence about kernels with fewer configurations than a row holds; empty when there are none."""
    if not short:
        return ""
    kernels = "1 kernel has" if short == 1 else f"{short} kernels have"
    return f"{kernels} fewer than {per_kernel} configurations; their best one is repeated to fill the row."


def read_predictions(path: Path) -> dict[str, list[int]]:
    """The rows of a predictions file by ID."""
    rows: dict[str, list[int]] = {}
    for number, line in _lines(path):
        identifier, _, configs = line.partition(",")
        if not identifier or "," in configs:
            raise FileFormatError(f"{path}, line {number}: not of the form ID,i;j;k.")
        if identifier in rows:
            raise FileFormatError(f"{path}, line {number}: {identifier[:100]} stands there twice.")
        rows[identifier] = _indices(configs, f"{path}, line {number}")
    if not rows:
        raise FileFormatError(f"{path} holds no predictions.")
    return rows


def find_predictions(chosen: str | None, folder: Path) -> Path:
    """The predictions file a user named or, unnamed, the one in `folder` under either of its two names."""
    if chosen:
        path = Path(chosen).expanduser()
        twin = {INPUT_NAMES[0]: INPUT_NAMES[1], INPUT_NAMES[1]: INPUT_NAMES[0]}.get(path.name)
        if not path.is_file() and twin is not None and path.with_name(twin).is_file():
            return path.with_name(twin)
        return path
    found = [folder / name for name in INPUT_NAMES if (folder / name).is_file()]
    if not found:
        raise ConfigurationError(
            f"There is no {INPUT_NAMES[0]} in {folder}; run tiles_gen_predictions_csv.py first, or name a file."
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def known_ids() -> list[str]:
    """The 844 tile and 50 layout rows of the competition, in its order."""
    sections: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("kaggle_ids.txt").read_text(encoding="ascii").splitlines():
        if line.startswith("["):
            sections[line[1:-1]] = []
        elif line and not line.startswith("#"):
            list(sections.values())[-1].append(line)
    ids = [f"{PREFIX}{name}" for name in sections["tile:xla"]]
    for source in ("xla", "nlp"):
        for search in ("default", "random"):
            ids += [f"layout:{source}:{search}:{name}" for name in sections[f"layout:{source}"]]
    return ids


def write_kaggle(out: Path, predictions: Path | Sequence[Path], sample: Path | None = None) -> KaggleFile:
    """Write the file to upload: every row of `sample` (or of the ids the package knows), ours where there is one.

    Predictions of several collections may come in as many files.
    """
    ours = _read_together([predictions] if isinstance(predictions, Path) else predictions)
    ids = list(read_predictions(sample)) if sample is not None else known_ids()
    lines = [HEADER, *(f"{identifier},{_kaggle_row(identifier, ours.get(identifier))}" for identifier in ids)]
    write_whole(out, "\n".join(lines) + "\n")
    rows = {kind: [i for i in ids if i.startswith("tile:") == (kind == "tile")] for kind in ("tile", "layout")}
    used, layouts = (sum(i in ours for i in rows[kind]) for kind in ("tile", "layout"))
    filled, unused = len(rows["tile"]) - used, len(ours) - used - layouts
    notes = _kaggle_notes(used, filled, unused) + _layout_notes(rows["layout"], ours)
    return KaggleFile(used, filled, unused, layouts, notes)


def _read_together(paths: Sequence[Path]) -> dict[str, list[int]]:
    ours: dict[str, list[int]] = {}
    for path in paths:
        found = read_predictions(path)
        twice = next((identifier for identifier in found if identifier in ours), None)
        if twice is not None:
            raise FileFormatError(f"{path}: {twice[:100]} stands in another of the files too.")
        ours |= found
    return ours


def _kaggle_row(identifier: str, order: list[int] | None) -> str:
    """The first five of a tile's row, all of a layout's; what the competition takes as a placeholder without any."""
    if identifier.startswith("tile:"):
        return ";".join(map(str, _filled(order, PER_KERNEL) if order else range(PER_KERNEL)))
    if order and sorted(order) != list(range(len(order))):
        raise FileFormatError(f"The row of {identifier[:100]} must hold each configuration of its graph once.")
    return ";".join(map(str, order)) if order else _LAYOUT_ROW


def score_predictions(path: Path, truth: Iterable[Kernel], ks: Sequence[int] = (1, PER_KERNEL)) -> PredictionScore:
    """Top-K errors of the rows in `path` on the kernels of `truth`, which must all have a row."""
    rows = read_predictions(path)
    errors: dict[str, list[list[float]]] = {}
    missing: list[str] = []
    used = 0
    for kernel in truth:
        row = rows.get(f"{PREFIX}{kernel.name}")
        if row is None:
            missing.append(kernel.name)
            continue
        used += 1
        errors.setdefault(kernel.program, []).append(_errors(kernel, row, ks, path))
    if missing:
        raise FileFormatError(f"{path} has no row for {len(missing)} kernels of the split, among them {missing[0]}.")
    if not errors:
        raise ConfigurationError("The split to score against holds no kernels.")
    everything = np.array([error for program in errors.values() for error in program])
    by_program = {
        program: dict(zip(ks, np.mean(values, axis=0).tolist(), strict=True)) for program, values in errors.items()
    }
    overall = dict(zip(ks, everything.mean(axis=0).tolist(), strict=True))
    return PredictionScore(1.0 - overall[ks[-1]], overall, by_program, used, len(rows) - used)


def _filled(ranking: Sequence[int] | npt.NDArray[Any], per_kernel: int) -> list[int]:
    first = [int(index) for index in ranking[:per_kernel]]
    return first + [first[0]] * (per_kernel - len(first))


def _errors(kernel: Kernel, row: list[int], ks: Sequence[int], path: Path) -> list[float]:
    if max(row) >= kernel.n_configs:
        raise FileFormatError(f"{path}: {kernel.name} has {kernel.n_configs} configurations, none numbered {max(row)}.")
    target = kernel.target
    best = float(target.min())
    return [float(target[row[:k]].min()) / best - 1.0 for k in ks]


def _kaggle_notes(used: int, filled: int, unused: int) -> list[str]:
    notes = []
    if filled:
        notes.append(f"{filled} of {used + filled} tile rows have no prediction and hold the placeholder 0;1;2;3;4.")
    if unused:
        notes.append(f"{unused} predictions are for kernels outside the competition and were left out.")
    return notes


def _layout_notes(ids: Sequence[str], ours: Mapping[str, Any]) -> list[str]:
    """A sentence that names the layout collections of which rows are missing; none where none are."""
    there: dict[str, list[bool]] = {}
    for identifier in ids:
        there.setdefault(identifier.rpartition(":")[0], []).append(identifier in ours)
    missing = [f"{name} ({rows.count(False)} of {len(rows)})" for name, rows in there.items() if not all(rows)]
    return [f"No prediction, so the placeholder 0;1;…;999, in rows of {', '.join(missing)}."] if missing else []


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    lines = read_text_input(path, _MAX_BYTES).splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise FileFormatError(f"{path} does not start with the line {HEADER}.")
    return [(number, line.strip()) for number, line in enumerate(lines[1:], start=2) if line.strip()]


def _indices(text: str, where: str) -> list[int]:
    parts = text.split(";")
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
        raise FileFormatError(f"{where}: {text[:60]!r} is not a list of configuration numbers such as 3;1;4.")
    indices = [int(part) for part in parts]
    if max(indices) >= _MAX_INDEX:
        raise FileFormatError(f"{where}: {max(indices)} is no configuration number.")
    return indices
