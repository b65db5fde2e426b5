"""Products that were measured on an H200 and that the model was not trained on: what it chooses there, replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled import CompiledProblem, compare_ways, merge_files, read_compiled
from benchmarks.gpu_check import main
from benchmarks.recorded import as_json, compare, compare_methods, lines, method_lines, read_recorded, table
from tilewise.errors import FileFormatError
from tilewise.gpu.products.runtime_model import shipped_runtime_model

RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "products_h200.json"


def test_choices_on_unseen_products_are_not_slower_than_the_library() -> None:
    model = shipped_runtime_model()
    assert model is not None
    (whole,) = [row for row in table(model, read_recorded(RECORDED)) if row["kind"] == "all"]
    assert whole["products"] >= 40
    assert (
        whole["first"] >= 1.1
        and whole["first_least"] >= 0.97
        and whole["five"] >= whole["first"]
        and whole["five_least"] >= 0.98
    )
    assert whole["five"] >= whole["peer_five"]


def test_a_recorded_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    products, model = read_recorded(RECORDED)[:3], shipped_runtime_model()
    assert model is not None
    (tmp_path / "again.json").write_text(json.dumps(as_json(products, {})))
    again = read_recorded(tmp_path / "again.json")
    assert again == products and [compare(model, one) for one in again] == [compare(model, one) for one in products]


def test_the_check_prints_recorded_products_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    model = shipped_runtime_model()
    assert model is not None and main(["--recorded", str(RECORDED)]) == 0
    products = read_recorded(RECORDED)
    expected = [*lines(table(model, products)), *method_lines(compare_methods(products))]
    assert capsys.readouterr().out.splitlines() == expected


def test_every_product_has_one_fastest_way_and_the_others_are_slower_there() -> None:
    products = read_recorded(RECORDED)
    rows = compare_methods(products)
    assert sum(row["products"] for row in rows) == len(products)
    assert all(row["most"] >= row["mean"] >= 1.0 for row in rows)


@pytest.mark.parametrize("content", ["[]", '{"fields": [], "products": [{}]}', '{"products": 3}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(FileFormatError, match="no recorded products"):
        read_recorded(tmp_path / "other.json")


def test_ways_of_compiling_are_compared_over_the_problems_that_both_ran() -> None:
    rows = [
        CompiledProblem(
            "a", "mm", {"aten": 8.0, "max-autotune": 10.0, "tilewise": 10.0}, {"max-autotune": 8.0, "tilewise": 1.0}
        ),
        CompiledProblem("b", "mm", {"max-autotune": 40.0, "tilewise": 10.0}, {"max-autotune": 2.0, "tilewise": 1.0}),
    ]
    aten, autotuned = compare_ways(rows)
    assert (aten.problems, aten.runs, aten.first_call) == (1, pytest.approx(0.8), None)
    assert (autotuned.runs, autotuned.least, autotuned.first_call) == (pytest.approx(2.0), 1.0, pytest.approx(4.0))
    assert autotuned.all_calls == 5.0


def test_files_of_compiled_problems_make_one(tmp_path: Path) -> None:
    def row(name: str, us: float) -> dict[str, Any]:
        return {"name": name, "kind": "mm", "us": {"tilewise": us}, "seconds": {}}

    files = {"one": [row("a", 1.0), row("b", 2.0)], "two": [row("b", 3.0), row("c", 4.0)]}
    for name, rows in files.items():
        (tmp_path / name).write_text(json.dumps({"device": "a GPU", "problems": rows}))
    merged = merge_files([tmp_path / name for name in files])
    assert merged == {"device": "a GPU", "problems": [row("a", 1.0), row("b", 3.0), row("c", 4.0)]}


@pytest.mark.parametrize("content", ["[]", '{"problems": [{"name": "a"}]}', '{"problems": [{"name": "a", "kind": "mm", '
                                     '"us": {"aten": -1}, "seconds": {}}]}'])  # fmt: skip
def test_a_file_of_no_compiled_problems_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(FileFormatError, match="no compiled problems"):
        read_compiled(tmp_path / "other.json")
