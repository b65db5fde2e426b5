"""Reads, writes and scores prediction files: the course's CSV of best configurations, and the Kaggle file.

A row is ``tile:xla:<kernel>,i;j;k;…``, best configuration first. Rows are matched by ID, never by position. A kernel
with fewer configurations than a row needs is padded with configuration 0, as the course's grading script pads it. A row
of a layout collection, ``layout:xla:random:<graph>,…``, lists all configurations of its graph in the predicted order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._atomic import write_atomic
from tilewise._files import read_text_input
from tilewise.costmodel.data.kernel import Kernel
from tilewise.errors import ConfigurationError, FileFormatError

HEADER = "ID,TopConfigs"
PREFIX = "tile:xla:"
PER_KERNEL = 5
# The course's text and its scripts use different names for the file; both are accepted.
INPUT_NAMES = ("predictions_model_output.csv", "predictions_output_model.csv")
_LAYOUT_ROW = ";".join(str(i) for i in range(1000))
_MAX_FILE_BYTES = 256 << 20
_MAX_INDEX = 1 << 31

Rankings = Mapping[str, Sequence[int] | npt.NDArray[Any]]


@dataclass(frozen=True)
class PredictionScore:
    """Score of predicted configurations on kernels with known runtimes; errors are relative to the best."""

    tile_score: float
    error_at: dict[int, float]
    error_at_by_program: dict[str, dict[int, float]]
    kernels: int
    ignored_rows: int


@dataclass(frozen=True)
class KaggleFile:
    """Counts of a Kaggle file's rows, and sentences about them.

    `predicted` tile rows have a prediction, `filled` ones a placeholder; `unused` predictions have no row; `layouts`
    layout rows have a prediction.
    """

    predicted: int
    filled: int
    unused: int
    layouts: int = 0
    notes: list[str] = field(default_factory=list)


def write_layout_predictions(path: Path, collection: str, rankings: Rankings) -> None:
    """Write the ranking of all configurations of each graph, for a collection such as ``xla:random``."""
    lines = [f"layout:{collection}:{name},{';'.join(map(str, order))}" for name, order in rankings.items()]
    write_atomic(path, "\n".join([HEADER, *lines]) + "\n")


def write_predictions(path: Path, rankings: Rankings, per_kernel: int = PER_KERNEL) -> int:
    """Write exactly `per_kernel` configuration numbers per kernel; return how many kernels have fewer."""
    lines, n_short = [HEADER], 0
    for name, ranking in rankings.items():
        if not len(ranking):
            raise ConfigurationError(f"Kernel {name} has no configuration to predict.")
        n_short += len(ranking) < per_kernel
        lines.append(f"{PREFIX}{name},{';'.join(map(str, _pad_ranking(ranking, per_kernel)))}")
    write_atomic(path, "\n".join(lines) + "\n")
    return n_short


def padding_note(n_short: int, per_kernel: int = PER_KERNEL) -> str:
    """Return a sentence about kernels with fewer configurations than a row has; "" if there are none."""
    if not n_short:
        return ""
    kernels = "1 kernel has" if n_short == 1 else f"{n_short} kernels have"
    return f"{kernels} fewer than {per_kernel} configurations; configuration 0 fills their rows, as the grader does."


def read_predictions(path: Path) -> dict[str, list[int]]:
    """Read a predictions file: each row's ID and configuration numbers, best first."""
    rows: dict[str, list[int]] = {}
    for number, line in _data_lines(path):
        identifier, _, configs = line.partition(",")
        if not identifier or "," in configs:
            raise FileFormatError(f"{path}, line {number} does not have the form ID,i;j;k.")
        if identifier in rows:
            raise FileFormatError(f"{path}, line {number}: {identifier[:100]} has two rows.")
        rows[identifier] = _parse_indices(configs, f"{path}, line {number}")
    if not rows:
        raise FileFormatError(f"{path} contains no predictions.")
    return rows


def find_predictions(name: str | None, folder: Path) -> Path:
    """Return the predictions file that the user named, or else the newest one in `folder` under either name."""
    if name:
        path = Path(name).expanduser()
        other_name = {INPUT_NAMES[0]: INPUT_NAMES[1], INPUT_NAMES[1]: INPUT_NAMES[0]}.get(path.name)
        if not path.is_file() and other_name is not None and path.with_name(other_name).is_file():
            return path.with_name(other_name)
        return path
    candidates = [folder / name for name in INPUT_NAMES if (folder / name).is_file()]
    if not candidates:
        raise ConfigurationError(
            f"There is no {INPUT_NAMES[0]} in {folder}; run tiles_gen_predictions_csv.py first, or name a file."
        )
    # If both exist, the newer one is the one that was just written.
    return max(candidates, key=lambda path: path.stat().st_mtime_ns)


def competition_ids() -> list[str]:
    """Return the IDs of the competition's 844 tile rows and 50 layout rows, in its order."""
    sections: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("kaggle_ids.txt").read_text(encoding="ascii").splitlines():
        if line.startswith("["):
            sections[line[1:-1]] = []
        elif line and not line.startswith("#"):
            list(sections.values())[-1].append(line)
    # The layout collections of default and random search have the same graphs.
    ids = [f"{PREFIX}{name}" for name in sections["tile:xla"]]
    for source in ("xla", "nlp"):
        for search in ("default", "random"):
            ids += [f"layout:{source}:{search}:{name}" for name in sections[f"layout:{source}"]]
    return ids


def write_kaggle(
    out: Path, predictions: Path | Sequence[Path], sample: Path | None = None, *, force: bool = True
) -> KaggleFile:
    """Write the file to upload: a row for every ID of `sample` or of the competition.

    A row without a prediction gets a placeholder. Predictions of several collections may be in several files. Without
    `force`, tile predictions that do not cover all tile rows are refused.
    """
    # The sample file decides which rows the upload has and in which order; predictions only fill them.
    rankings = _read_all([predictions] if isinstance(predictions, Path) else predictions)
    ids = list(read_predictions(sample)) if sample is not None else competition_ids()
    if not force:
        _check_coverage(rankings, ids)
    lines = [HEADER, *(f"{identifier},{_kaggle_row(identifier, rankings.get(identifier))}" for identifier in ids)]
    write_atomic(out, "\n".join(lines) + "\n")
    tile_ids = [identifier for identifier in ids if identifier.startswith("tile:")]
    layout_ids = [identifier for identifier in ids if not identifier.startswith("tile:")]
    n_tiles, n_layouts = (sum(identifier in rankings for identifier in kind) for kind in (tile_ids, layout_ids))
    n_placeholders, n_unused = len(tile_ids) - n_tiles, len(rankings) - n_tiles - n_layouts
    notes = _tile_notes(n_tiles, n_placeholders, n_unused) + _layout_notes(layout_ids, rankings)
    return KaggleFile(n_tiles, n_placeholders, n_unused, n_layouts, notes)


def _check_coverage(rankings: Mapping[str, Any], ids: Sequence[str]) -> None:
    """Raise `ConfigurationError` if some, but not all, of the tile rows in `ids` have predictions."""
    rows = [identifier for identifier in ids if identifier.startswith(PREFIX)]
    covered = sum(identifier in rankings for identifier in rows)
    if covered < len(rows) and any(identifier.startswith(PREFIX) for identifier in rankings):
        raise ConfigurationError(
            f"Only {covered} of {len(rows)} tile rows have a prediction, as after --toy_data: the others would be "
            "placeholders. Predict the test split of the whole dataset, or write the file anyway with --force."
        )


def _read_all(paths: Sequence[Path]) -> dict[str, list[int]]:
    """Read several predictions files into one dict by row ID; raise `FileFormatError` if an ID occurs in two."""
    rankings: dict[str, list[int]] = {}
    for path in paths:
        rows = read_predictions(path)
        duplicate = next((identifier for identifier in rows if identifier in rankings), None)
        if duplicate is not None:
            raise FileFormatError(f"{path}: {duplicate[:100]} has a row in another of the files too.")
        rankings |= rows
    return rankings


def _kaggle_row(identifier: str, ranking: list[int] | None) -> str:
    """Format one row of the Kaggle file: five configurations of a tile row, all of a layout row.

    A row without a ranking (None) gets a placeholder.
    """
    if identifier.startswith("tile:"):
        return ";".join(map(str, _pad_ranking(ranking, PER_KERNEL) if ranking else range(PER_KERNEL)))
    # A layout row is scored by its whole order (Kendall's tau), so it must be a permutation.
    if ranking and sorted(ranking) != list(range(len(ranking))):
        raise FileFormatError(f"The row of {identifier[:100]} must list each configuration of its graph once.")
    return ";".join(map(str, ranking)) if ranking else _LAYOUT_ROW


def score_predictions(path: Path, truth: Iterable[Kernel], ks: Sequence[int] = (1, PER_KERNEL)) -> PredictionScore:
    """Return the top-K errors of the predictions in file `path` on kernels with known runtimes (`truth`)."""
    rows = read_predictions(path)
    errors: dict[str, list[list[float]]] = {}
    # Kernels without a row are collected first, so that the error can say how many there are.
    without_row: list[str] = []
    n_scored = 0
    for kernel in truth:
        row = rows.get(f"{PREFIX}{kernel.name}")
        if row is None:
            without_row.append(kernel.name)
            continue
        n_scored += 1
        errors.setdefault(kernel.program, []).append(_top_k_errors(kernel, row, ks, path))
    if without_row:
        raise FileFormatError(
            f"{path} has no row for {len(without_row)} kernels of the split, among them {without_row[0]}."
        )
    if not errors:
        raise ConfigurationError("The split to score against has no kernels.")
    # (kernels, len(ks)): kernels have equal weights across programs.
    all_errors = np.array([error for program in errors.values() for error in program])
    by_program = {
        program: dict(zip(ks, np.mean(values, axis=0).tolist(), strict=True)) for program, values in errors.items()
    }
    overall = dict(zip(ks, all_errors.mean(axis=0).tolist(), strict=True))
    return PredictionScore(1.0 - overall[ks[-1]], overall, by_program, n_scored, len(rows) - n_scored)


def _pad_ranking(ranking: Sequence[int] | npt.NDArray[Any], per_kernel: int) -> list[int]:
    """Return exactly `per_kernel` configurations: the first ones of a ranking, padded with configuration 0."""
    first = [int(index) for index in ranking[:per_kernel]]
    return first + [0] * (per_kernel - len(first))


def _top_k_errors(kernel: Kernel, row: list[int], ks: Sequence[int], path: Path) -> list[float]:
    """Return, for each k, the slowdown of the best of the row's first k configurations against the best of all."""
    if max(row) >= kernel.n_configs:
        raise FileFormatError(f"{path}: {kernel.name} has {kernel.n_configs} configurations, none numbered {max(row)}.")
    # Relative runtimes: every configuration is divided by the default of the same run.
    target = kernel.target
    best = float(target.min())
    return [float(target[row[:k]].min()) / best - 1.0 for k in ks]


def _tile_notes(n_predicted: int, n_placeholders: int, n_unused: int) -> list[str]:
    """Return up to two sentences about placeholders and unused predictions in a Kaggle file."""
    notes = []
    if n_placeholders:
        total = n_predicted + n_placeholders
        notes.append(f"{n_placeholders} of {total} tile rows have no prediction and get the placeholder 0;1;2;3;4.")
    if n_unused:
        notes.append(f"{n_unused} predictions are for kernels outside the competition and were left out.")
    return notes


def _layout_notes(ids: Sequence[str], rankings: Mapping[str, Any]) -> list[str]:
    """Return a sentence about layout collections that have rows without a prediction, in a list; or nothing."""
    has_ranking: dict[str, list[bool]] = {}
    for identifier in ids:
        has_ranking.setdefault(identifier.rpartition(":")[0], []).append(identifier in rankings)
    incomplete = [f"{name} ({rows.count(False)} of {len(rows)})" for name, rows in has_ranking.items() if not all(rows)]
    if not incomplete:
        return []
    return [f"Rows without a prediction get the placeholder 0;1;…;999: {', '.join(incomplete)}."]


def _data_lines(path: Path) -> Iterable[tuple[int, str]]:
    """Yield (line number, line) for the non-empty lines after the header of a predictions file."""
    lines = read_text_input(path, _MAX_FILE_BYTES).splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise FileFormatError(f"{path} does not start with the line {HEADER}.")
    return [(number, line.strip()) for number, line in enumerate(lines[1:], start=2) if line.strip()]


def _parse_indices(text: str, where: str) -> list[int]:
    """Parse configuration numbers separated by semicolons; `where` opens the error messages."""
    words = text.split(";")
    # `isdigit` accepts digits of other scripts, and `int` accepts any length.
    if not all(word.isascii() and word.isdigit() and len(word) <= 10 for word in words):
        raise FileFormatError(f"{where}: {text[:60]!r} is not a list of configuration numbers such as 3;1;4.")
    indices = [int(word) for word in words]
    if max(indices) >= _MAX_INDEX:
        raise FileFormatError(f"{where}: {max(indices)} is not a configuration number.")
    return indices
