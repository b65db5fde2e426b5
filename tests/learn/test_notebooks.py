"""The notebooks are the pages: made from the same text, run top to bottom, with a check, hints and kept progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.learn.test_lessons import code_of
from tilewise import learn
from tilewise.cli.lessons import check
from tilewise.errors import ConfigurationError, MissingFileError
from tilewise.learn.checking import exercises
from tools import notebooks

app = typer.Typer()
app.command()(check)
SOLUTIONS = Path(__file__).parent / "solutions"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_a_notebook_is_what_its_page_gives(lesson):
    """`python -m tools.notebooks` writes them."""
    assert (notebooks.FOLDER / f"{lesson}.ipynb").read_text(encoding="utf-8") == notebooks.notebook_text(lesson)


@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_a_notebook_has_the_code_of_its_page_and_shows_its_figures(lesson):
    cells = notebooks.notebook(lesson)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    page = code_of(lesson).replace('import matplotlib\n\nmatplotlib.use("Agg")\n', "")
    assert "\n\n".join(code[1:-3]).split() == page.split()
    assert not any("Agg" in cell for cell in code)
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    assert len({cell["id"] for cell in cells}) == len(cells)


@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_a_notebook_is_valid(lesson):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; `make test-notebooks` installs it")
    nbformat.validate(nbformat.read(notebooks.FOLDER / f"{lesson}.ipynb", as_version=4))


@pytest.mark.slow
@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_a_notebook_runs_from_top_to_bottom_and_draws(lesson, home):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; `make test-notebooks` installs it")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    document = nbformat.read(notebooks.FOLDER / f"{lesson}.ipynb", as_version=4)
    nbclient.NotebookClient(document, timeout=600, resources={"metadata": {"path": str(home)}}).execute()
    outputs = [output for cell in document.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "0 of 3 solved" in json.dumps(document)


def test_the_check_in_a_notebook_says_what_is_wrong_and_keeps_what_is_solved(home, capsys):
    (home / "pruning.py").write_text(
        (SOLUTIONS / "pruning.py").read_text().replace("def two_of_four", "def three_of_four")
    )
    learn.report("pruning")
    output = capsys.readouterr().out
    assert "2 of 3 solved" in output and "no function two_of_four" in output
    assert set(learn.progress()["pruning"]) == {"magnitude_mask", "remove_units"}
    (home / "pruning.py").write_text("x = 1\n")
    learn.report("pruning")
    assert len(learn.progress()["pruning"]) == 2  # what was solved once stays solved


def test_progress_is_shown_and_survives_a_damaged_file(home):
    (home / "caching.py").write_text((SOLUTIONS / "caching.py").read_text())
    assert CliRunner().invoke(app, ["caching"]).exit_code == 0
    output = CliRunner().invoke(app, ["--progress"]).output
    assert "caching        3/3  ✓ attend" in output and "pruning        0/3  · magnitude_mask" in output
    assert json.loads(CliRunner().invoke(app, ["--progress", "--json"]).output)["caching"]["store"]
    (home / "cache" / "learn" / "progress.json").write_text("[1, 2")
    assert learn.progress() == {lesson: {} for lesson in learn.LESSONS}


def test_verdicts_are_given_where_progress_cannot_be_kept(home, capsys):
    (home / "caching.py").write_text((SOLUTIONS / "caching.py").read_text())
    (home / "cache").write_text("a file where the folder would be\n")
    done = CliRunner().invoke(app, ["caching"])
    assert done.exit_code == 0
    assert "3 of 3 solved" in done.output and "Your progress is not stored" in done.output
    learn.report("caching")
    assert "Your progress is not stored" in capsys.readouterr().out


def test_what_to_do_next_is_said(home):
    assert "tilewise check profiling --start" in CliRunner().invoke(app, []).output
    with pytest.raises(MissingFileError, match="tilewise check caching --start"):
        CliRunner().invoke(app, ["caching"], catch_exceptions=False)
    with pytest.raises(ConfigurationError, match="Name the lesson"):
        CliRunner().invoke(app, ["--only", "affine"], catch_exceptions=False)


@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_every_exercise_has_a_hint_and_one_that_says_more(lesson, capsys):
    for exercise in exercises(lesson):
        assert len(learn.hints(lesson, exercise.name)) == 2
        learn.hint(lesson, exercise.name, 2)
        assert f"{exercise.name}, hint 2 of 2" in capsys.readouterr().out


def test_a_hint_for_nothing_is_a_sentence(home):
    with pytest.raises(ConfigurationError, match="known are percentile"):
        learn.hint("profiling", "nothing")
    assert "hint 1 of 2" in CliRunner().invoke(app, ["profiling", "--hint", "percentile"]).output
    assert "hint 2 of 2" in CliRunner().invoke(app, ["profiling", "--hint", "percentile", "--more"]).output
