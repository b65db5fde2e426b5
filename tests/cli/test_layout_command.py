"""`tilewise tiles layout` and `tiles kaggle` as a user types them, from synthetic graphs to the file to upload."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from tilewise.cli.tiles.app import tiles
from tilewise.cli.tiles.layout import layout
from tilewise.costmodel.course.predictions import read_predictions, write_layout_predictions
from tilewise.costmodel.layout import open_layouts
from tilewise.errors import ConfigurationError, FileFormatError


def run(*arguments: object, app=layout) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    output = run("toy", "--out", tmp_path / "toy", "--graphs", 4, "--nodes", 24, "--configs", 9, "--json")
    assert json.loads(output)["graphs"] == {"train": 4, "valid": 1, "test": 1}
    return Path(json.loads(output)["folder"])


def test_from_synthetic_graphs_to_rows_of_the_competition(folder: Path, tmp_path: Path) -> None:
    assert folder == tmp_path / "toy/npz/layout/xla/random"
    quick = ("--epochs", 1, "--configs", 4, "--model-kwargs", '{"hidden": 8, "layers": 1}', "--segment-nodes", 10)
    for model in ("LayoutSAGE", "LayoutMPNN"):
        document = json.loads(run("train", folder, "--out", tmp_path / model, "--model", model, *quick, "--json"))
        assert -1 <= document["valid_tau"] <= 1
    models = (tmp_path / "LayoutSAGE", tmp_path / "LayoutMPNN")
    rows = json.loads(run("evaluate", folder, *models, "--json"))["rows"]
    assert set(rows) == {*map(str, models), "chance"}
    assert "Kendall tau" in run("evaluate", folder, models[0], "--configs", 5)
    run("predict", models[1], folder, "--out", tmp_path / "p.csv")
    (graph,) = open_layouts(folder, splits=("test",)).test
    ((identifier, order),) = read_predictions(tmp_path / "p.csv").items()
    assert identifier == f"layout:xla:random:{graph.name}" and sorted(order) == list(range(9))
    scored = json.loads(run("score", tmp_path / "p.csv", "--truth", folder / "test", "--json"))
    assert scored["tau"] == pytest.approx(next(iter(scored["graphs"].values())))


def test_the_true_order_scores_one_and_its_reverse_minus_one(folder: Path, tmp_path: Path) -> None:
    (graph,) = open_layouts(folder, splits=("valid",)).valid
    order = np.argsort(graph.runtime)
    for row, tau in ((order, 1.0), (order[::-1], -1.0)):
        write_layout_predictions(tmp_path / "p.csv", "xla:random", {graph.name: row})
        assert json.loads(run("score", tmp_path / "p.csv", "--truth", folder / "valid", "--json"))["tau"] == tau
    write_layout_predictions(tmp_path / "p.csv", "xla:random", {graph.name: order[:-1]})
    with pytest.raises(FileFormatError, match="must list each"):
        run("score", tmp_path / "p.csv", "--truth", folder / "valid")


def test_a_collection_whose_folders_do_not_tell_its_name_must_be_named(folder: Path, tmp_path: Path) -> None:
    other = folder.rename(tmp_path / "mine")
    with pytest.raises(ConfigurationError, match="--name"):
        run("score", tmp_path / "p.csv", "--truth", other / "valid")
    with pytest.raises(ConfigurationError, match="xla:default"):
        run("score", tmp_path / "p.csv", "--truth", other / "valid", "--name", "gpu:random")


def test_graphs_that_no_memory_holds_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="memory"):
        run("toy", "--out", tmp_path / "toy", "--nodes", 100_000, "--configs", 1_000_000)
    assert not (tmp_path / "toy").exists()


def test_one_kaggle_file_holds_all_five_collections_and_says_what_is_missing(tmp_path: Path) -> None:
    from tilewise.costmodel.course.predictions import competition_ids, write_predictions

    ids = competition_ids()
    write_predictions(tmp_path / "tiles.csv", {i.split(":")[2]: [4, 3, 2, 1, 0] for i in ids if i.startswith("tile")})
    files = [tmp_path / "tiles.csv"]
    for name in ("xla:random", "xla:default", "nlp:random", "nlp:default"):
        files.append(tmp_path / f"{name.replace(':', '_')}.csv")
        graphs = [i.rpartition(":")[2] for i in ids if i.startswith(f"layout:{name}:")]
        write_layout_predictions(files[-1], name, {graph: np.arange(1000)[::-1] for graph in graphs})
    out = tmp_path / "kaggle.csv"
    document = json.loads(run("kaggle", *files, "--out", out, "--json", app=tiles))
    assert (document["predicted"], document["filled"], document["layouts"], document["notes"]) == (844, 0, 50, [])
    rows = read_predictions(out)
    assert list(rows) == ids and {len(row) for row in rows.values()} == {5, 1000}
    assert all(row[0] == (4 if name.startswith("tile") else 999) for name, row in rows.items())
    document = json.loads(run("kaggle", *files[:2], "--out", out, "--json", app=tiles))
    assert document["layouts"] == 8
    (note,) = document["notes"]
    assert note.endswith("layout:xla:default (8 of 8), layout:nlp:default (17 of 17), layout:nlp:random (17 of 17).")
    with pytest.raises(FileFormatError, match="another of the files"):
        run("kaggle", files[1], files[1], "--out", out, app=tiles)
    (tmp_path / "bad.csv").write_text(f"ID,TopConfigs\n{ids[-1]},0;0;1\n")
    with pytest.raises(FileFormatError, match="once"):
        run("kaggle", tmp_path / "bad.csv", "--out", out, app=tiles)
