"""Flags, data and run files of the course's commands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from costmodel.simulated import write_collection
from hypothesis import given, settings
from hypothesis import strategies as st

from course import flags as course
from tilewise.errors import ConfigurationError, FileFormatError


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], False),
        (["--toy_data=True"], True),
        (["--toy_data", "True"], True),
        (["--toy_data"], True),
        (["--toy_data=false"], False),
        (["--notoy_data"], False),
    ],
)
def test_boolean_flags_take_every_spelling_of_the_course(typed: list[str], expected: bool) -> None:
    assert course.train_parser().parse_args(typed).toy_data is expected


def test_baselines_start_from_the_courses_defaults() -> None:
    args = course.train_args(course.train_parser().parse_args([]))
    assert (args.model, args.epochs, args.early_stop, args.batch_size, args.configs) == (
        "EarlyJoinSAGE",
        100,
        20,
        10,
        10,
    )
    assert (args.losses, args.learning_rate, args.clip_norm) == ("ListMLELoss:1,MSE:0.02", 1e-3, 1e-3)
    assert args.out_dir == "~/out/tpugraphs_tiles" and args.validate_batches == -1


def test_two_runs_never_share_a_name_and_equal_arguments_always_do() -> None:
    options = course.train_parser().parse_args(["--results_csv=/tmp/r.csv"])
    assert course.train_args(options).compute_hash() == course.train_args(options).compute_hash()
    options.run_id = "other"
    first = course.train_args(options).compute_hash()
    options.run_id = ""
    assert first != course.train_args(options).compute_hash()


def test_toy_data_takes_the_first_files_of_each_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "TOY_FILES", 2)
    write_collection(tmp_path / "d", train=4, valid=3, test=1)
    data = course.course_dataset(str(tmp_path / "d"), str(tmp_path / "c"), toy_data=True)
    assert (len(data.train), len(data.valid), len(data.test)) == (2, 2, 1)


def test_without_data_the_toy_is_synthetic(tmp_path: Path) -> None:
    data = course.course_dataset("/nowhere", str(tmp_path / "c"), toy_data=True)
    assert len(data.train) == course.TOY_FILES
    trained = course.course_dataset("/nowhere", str(tmp_path / "c"), toy_data=False, trained=True)
    assert trained.test[5].name == data.test[5].name
    with pytest.raises(ConfigurationError, match="echo_download_commands"):
        course.course_dataset("/nowhere", str(tmp_path / "c"), toy_data=False)


def test_an_empty_folder_is_no_dataset(tmp_path: Path) -> None:
    """An interrupted download leaves the folder behind."""
    (tmp_path / "xla").mkdir()
    assert len(course.course_dataset(str(tmp_path / "xla"), str(tmp_path / "c"), toy_data=True).train) > 0
    with pytest.raises(ConfigurationError, match="There is no dataset"):
        course.course_dataset(str(tmp_path / "xla"), str(tmp_path / "c"), toy_data=False)


ARGS = {"args": {"model": "MLP", "model_kwargs_json": "{}", "configs": 10}}


def test_run_files_come_back_as_written(tmp_path: Path) -> None:
    course.write_run(tmp_path / "run_1.jsonz", ARGS | {"final_error": {"val": {"1": 0.5}}})
    assert course.read_run(tmp_path / "run_1.jsonz")["final_error"]["val"]["1"] == 0.5
    assert course.run_file_of(tmp_path / "model_1") == tmp_path / "run_1.jsonz"


NO_RUNS = {
    "empty": b"",
    "text": b"text",
    "cut short": gzip.compress(b"{"),
    "a list": gzip.compress(b"[]"),
    "nothing in it": gzip.compress(b"{}"),
    "deep": gzip.compress(b"[" * 100_000),
    "wrong types": gzip.compress(json.dumps({"args": {"model": 1, "model_kwargs_json": "{}", "configs": 2}}).encode()),
    "not text": gzip.compress(b"\xff\xfe"),
}


@pytest.mark.parametrize("content", NO_RUNS.values(), ids=NO_RUNS)
def test_files_that_are_no_runs_get_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.jsonz").write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        course.read_run(tmp_path / "run.jsonz")
    assert "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(position=st.integers(0, 120), value=st.binary(max_size=2), cut=st.integers(0, 200))
def test_mutated_run_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: bytes, cut: int
) -> None:
    content = gzip.compress(json.dumps(ARGS).encode(), mtime=0)
    path = tmp_path_factory.getbasetemp() / "mutated.jsonz"
    path.write_bytes((content[:position] + value + content[position + 1 :])[:cut])
    try:
        run = course.read_run(path)
    except FileFormatError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(run["args"]["model"], str)
