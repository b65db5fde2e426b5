"""Measurements as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tune.test_export import fill, matmul
from tilewise.errors import ConfigurationError
from tilewise.store.store import Store
from tilewise.tune import frame


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Store(tmp_path / "s.sqlite") as store:
        batches = [(100.0, {1: 200.0, 2: 50.0}, False)] * 3
        fill(store, matmul(), [{"batches": batches, "finish": True}])
    return tmp_path / "s.sqlite"


def test_a_row_for_each_configuration_with_problem_tile_and_times(path: Path):
    columns = frame(path, "dict")
    assert sorted(columns["runtime_ns"]) == [50.0, 100.0, 200.0] and set(columns["m"]) == {64}
    assert max(columns["speedup"]) == 2.0 and sum(columns["is_default"]) == 1
    assert "config_block_m" in columns and {len(values) for values in columns.values()} == {3}


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_of_the_libraries_have_the_same_columns(path: Path, library: str):
    pytest.importorskip(library)
    assert list(frame(path, library).columns) == list(frame(path, "dict"))


def test_an_unknown_library_is_one_sentence(path: Path):
    with pytest.raises(ConfigurationError, match="dict, pandas, polars"):
        frame(path, "arrow")
