"""A class by CSV: tokens for its teams, grades for its students, and a student's look at a served board."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from click.testing import CliRunner

from tests.bench.test_board import filled, made_up_score, recipe
from tilewise.cli.app import command_line
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError
from tilewise_arena.board import Board, open_board
from tilewise_arena.board.grades import class_grades_csv, make_tokens, read_roster, safe
from tilewise_arena.board.tokens import holder_of

CLASS = "number,name,team\n7,Ada,owls\n8,Grace,owls\n9,Edsger,\n"


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    with open_board(tmp_path / "board.sqlite") as class_board:
        yield class_board


def roster(tmp_path: Path, text: str = CLASS) -> Path:
    path = tmp_path / "class.csv"
    path.write_text(text)
    return path


def test_every_team_gets_one_token_and_keeps_it(board: Board, tmp_path: Path) -> None:
    students = read_roster(roster(tmp_path))
    tokens = make_tokens(board, students)
    assert set(tokens) == {"owls", "Edsger"}
    holder = holder_of(board, tokens["owls"])
    assert holder is not None and holder.team == "owls"
    assert make_tokens(board, students) == {}


def test_students_have_the_grades_of_their_teams(board: Board, tmp_path: Path) -> None:
    with board.write() as transaction:
        for team, speedup in (("owls", 3.0), ("owls", 5.0), ("Edsger", 4.0)):
            number = transaction.submit(team, recipe(f"{team} {speedup}"))["entry"]
            transaction.result(number, "scored", made_up_score(speedup).as_dict())
    rows = list(csv.DictReader(io.StringIO(class_grades_csv(board, read_roster(roster(tmp_path))))))
    assert [(r["number"], r["name"], r["MLP_SPRINT closed rank"]) for r in rows] == [
        ("7", "Ada", "1"),
        ("8", "Grace", "1"),
        ("9", "Edsger", "2"),
    ]
    assert rows[0]["MLP_SPRINT closed score"] == f"{made_up_score(5.0).score:.4f}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "team\nowls\n",
        "name\n",
        "name,team\n,owls\n",
        f"name\n{'x' * 50}\n",
        'name\n"open\n',
        "name\n\x00\n",
        "\xff",
    ],
)
def test_a_file_that_is_no_class_gets_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "class.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TilewiseError) as error:
        read_roster(path)
    assert isinstance(error.value, FileFormatError)


@pytest.mark.parametrize("text", ["=1+1", " =1+1", "\t@x", "-2", "＝1"])
def test_no_cell_is_a_formula(text: str) -> None:
    assert safe(text).startswith("'")


def test_the_command_line_makes_tokens_and_grades(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "board.sqlite")
    modes: list[int] = []  # of each file when it gets its name: before, nobody knows it
    real = Path.replace

    def replace(source: Path, target: Path) -> Path:
        modes.append(source.stat().st_mode & 0o777)
        return real(source, target)

    monkeypatch.setattr(Path, "replace", replace)

    def run(*words: str) -> str:
        result = CliRunner().invoke(command_line(), ["compete", *words, "--board", path])
        assert result.exit_code == 0, result.output
        return result.output

    out = tmp_path / "tokens.csv"
    assert "2 new tokens for 3 students" in run("roster", str(roster(tmp_path)), "--out", str(out))
    assert set(modes) == {0o600} and out.read_text().count("tw_") == 3
    assert run("grades", "--roster", str(roster(tmp_path))).startswith("number,name,team")
    assert "had a token before" in run("token", "create", "owls")
    again = CliRunner().invoke(
        command_line(), ["compete", "roster", str(roster(tmp_path)), "--out", str(out), "--board", path]
    )
    assert isinstance(again.exception, ConfigurationError) and out.read_text().count("tw_") == 3


@pytest.mark.parametrize("content", [b"", b"\n", b"a note of my own"])
def test_a_scrap_of_a_file_is_not_taken_for_a_board_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(UnavailableError, match="is not a board"):
        open_board(path, create=False)
    assert path.read_bytes() == content


def test_what_a_team_writes_is_text_on_the_teachers_screen(board: Board, tmp_path: Path) -> None:
    with board.write() as transaction:
        transaction.submit("[/] [red]", recipe("[/nothing] [link=x]"))
    output = CliRunner().invoke(
        command_line(), ["compete", "board", "--board", str(tmp_path / "board.sqlite"), "--event", "MLP_SPRINT"]
    )
    assert output.exit_code == 0 and "[/]" in output.output


def test_a_student_looks_at_a_served_board(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from tests.bench.site import Served

    key = tmp_path / "board.key"
    with open_board(tmp_path / "board.sqlite", key=key) as board:
        numbers = filled(board, 3)
    served = Served(str(tmp_path / "board.sqlite"), key)
    try:
        output = CliRunner().invoke(
            command_line(), ["compete", "board", "--board", served.url, "--event", "MLP_SPRINT"]
        )
        assert output.exit_code == 0 and f"{numbers[-1]} r2" in output.output
    finally:
        served.stop()
