"""Predictions files: what is written can be read, rows go by ID, and damaged files get one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.simulated import simulated_kernel
from tilewise.costmodel.course.predictions import (
    HEADER,
    competition_ids,
    find_predictions,
    padding_note,
    read_predictions,
    score_predictions,
    write_kaggle,
    write_predictions,
)
from tilewise.errors import ConfigurationError, FileFormatError

KERNELS = [simulated_kernel(np.random.default_rng(i), f"prog{i % 2}_{i}", n_configs=12) for i in range(4)]


def test_each_row_holds_exactly_five_and_short_kernels_are_padded_as_the_grader_does(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    assert write_predictions(path, {"a": [4, 2, 0, 1, 3, 5], "b": [1, 0], "c": np.array([7])}) == 2
    assert path.read_text() == f"{HEADER}\ntile:xla:a,4;2;0;1;3\ntile:xla:b,1;0;0;0;0\ntile:xla:c,7;0;0;0;0\n"
    assert "2 kernels have fewer than 5" in padding_note(2)
    assert padding_note(0) == ""


def test_the_package_knows_844_tile_and_50_layout_rows() -> None:
    ids = competition_ids()
    assert sum(name.startswith("tile:xla:") for name in ids) == 844
    assert sum(name.startswith("layout:") for name in ids) == 50
    assert len(set(ids)) == 894


def test_kaggle_rows_are_matched_by_id_whatever_their_order(tmp_path: Path) -> None:
    ids = [name.removeprefix("tile:xla:") for name in competition_ids() if name.startswith("tile")]
    write_predictions(tmp_path / "p.csv", {name: [i, 0, 1, 2, 3] for i, name in reversed(list(enumerate(ids)))})
    result = write_kaggle(tmp_path / "k.csv", tmp_path / "p.csv")
    rows = read_predictions(tmp_path / "k.csv")
    assert list(rows) == competition_ids()
    assert all(rows[f"tile:xla:{name}"][0] == i for i, name in enumerate(ids))
    assert rows[competition_ids()[-1]] == list(range(1000))
    assert (result.predicted, result.filled, result.unused, result.layouts) == (844, 0, 0, 0)
    (note,) = result.notes
    assert all(f"layout:{source}:{search} (" in note for source in ("xla", "nlp") for search in ("random", "default"))


def test_kaggle_says_which_rows_are_placeholders_and_what_was_left_out(tmp_path: Path) -> None:
    first = competition_ids()[0].removeprefix("tile:xla:")
    write_predictions(tmp_path / "p.csv", {"elsewhere": [0], first: list(range(9, -1, -1))}, per_kernel=10)
    result = write_kaggle(tmp_path / "k.csv", tmp_path / "p.csv")
    assert (result.predicted, result.filled, result.unused, len(result.notes)) == (1, 843, 1, 3)
    assert read_predictions(tmp_path / "k.csv")[competition_ids()[0]] == [9, 8, 7, 6, 5]
    with pytest.raises(ConfigurationError, match="1 of 844 tile rows"):
        write_kaggle(tmp_path / "refused.csv", tmp_path / "p.csv", force=False)
    assert not (tmp_path / "refused.csv").exists()


def test_a_sample_submission_decides_the_rows(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text(f"{HEADER}\nlayout:x:y,0;1\ntile:xla:q,0;1;2;3;4\n")
    write_predictions(tmp_path / "p.csv", {"q": [3, 1]})
    write_kaggle(tmp_path / "k.csv", tmp_path / "p.csv", tmp_path / "s.csv")
    assert list(read_predictions(tmp_path / "k.csv").items()) == [
        ("layout:x:y", list(range(1000))),
        ("tile:xla:q", [3, 1, 0, 0, 0]),
    ]


def test_a_ranking_of_layouts_goes_into_the_kaggle_file_whole(tmp_path: Path) -> None:
    layout = next(name for name in competition_ids() if name.startswith("layout:nlp:random"))
    (tmp_path / "p.csv").write_text(f"{HEADER}\n{layout},{';'.join(map(str, range(30, -1, -1)))}\n")
    write_kaggle(tmp_path / "k.csv", tmp_path / "p.csv")
    assert read_predictions(tmp_path / "k.csv")[layout] == list(range(30, -1, -1))


@pytest.mark.parametrize("name", ["predictions_model_output.csv", "predictions_output_model.csv"])
def test_either_name_of_the_predictions_file_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(HEADER)
    assert find_predictions(None, tmp_path).name == name
    assert find_predictions(str(tmp_path / "predictions_model_output.csv"), tmp_path).name == name


def test_no_predictions_file_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tiles_gen_predictions_csv\.py"):
        find_predictions(None, tmp_path)


def test_a_perfect_ranking_scores_one_and_the_worst_what_its_runtimes_say(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    write_predictions(path, {kernel.name: np.argsort(kernel.target) for kernel in KERNELS})
    best = score_predictions(path, KERNELS)
    assert (best.tile_score, best.error_at, best.kernels) == (1.0, {1: 0.0, 5: 0.0}, 4)
    write_predictions(path, {kernel.name: np.argsort(-kernel.target) for kernel in KERNELS})
    worst = score_predictions(path, KERNELS)
    errors = [np.sort(k.target)[-5] / k.target.min() - 1 for k in KERNELS]
    assert worst.error_at[5] == pytest.approx(np.mean(errors))
    assert worst.tile_score == pytest.approx(1 - np.mean(errors))
    assert set(worst.error_at_by_program) == {"prog0", "prog1"}


def test_scoring_needs_a_row_for_every_kernel_and_valid_numbers(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    write_predictions(path, {kernel.name: [0] for kernel in KERNELS[1:]})
    with pytest.raises(FileFormatError, match="no row for 1 kernels"):
        score_predictions(path, KERNELS)
    write_predictions(path, {kernel.name: [12] for kernel in KERNELS})
    with pytest.raises(FileFormatError, match="none numbered 12"):
        score_predictions(path, KERNELS)


@pytest.mark.parametrize(
    "content",
    ["", "ID\n", f"{HEADER}\n", f"{HEADER}\na\n", f"{HEADER}\na,1;x\n", f"{HEADER}\na,1;2,3\n", f"{HEADER}\na,1\na,2\n",
     f"{HEADER}\na,-1\n", f"{HEADER}\na,99999999999\n", f"{HEADER}\na,١\n", f"{HEADER}\n,1\n", "\ufeff\ufeffID"],
)  # fmt: skip
def test_files_that_are_no_predictions_get_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.csv").write_text(content, encoding="utf-8")
    with pytest.raises(FileFormatError) as caught:
        read_predictions(tmp_path / "p.csv")
    assert "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(position=st.integers(0, 80), value=st.binary(max_size=3), cut=st.integers(0, 90))
def test_mutated_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: bytes, cut: int
) -> None:
    content = f"{HEADER}\ntile:xla:a,4;2;0;1;3\ntile:xla:b,1;0;1;1;1\ntile:xla:c,7;7;7;7;7\n".encode()
    path = tmp_path_factory.getbasetemp() / "mutated.csv"
    path.write_bytes((content[:position] + value + content[position + 1 :])[:cut])
    try:
        rows = read_predictions(path)
    except FileFormatError as error:
        assert "\n" not in str(error)
    else:
        assert rows and all(row and min(row) >= 0 for row in rows.values())
