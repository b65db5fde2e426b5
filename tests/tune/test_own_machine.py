"""The loop on one's own machine, as documented: shapes become splits, and nothing is written into the package."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise._extension import native
from tilewise.cli.collect import collect
from tilewise.costmodel import load_dataset
from tilewise.costmodel.models.files import shipped_file
from tilewise.errors import ConfigurationError
from tilewise.store.problem import Kernel, Problem
from tilewise.tune.search.confidence import load_calibration, save_calibration
from tilewise.tune.workloads import built_in_kernels, splits_of
from tools.workloads.cpu import cpu_kernels
from tools.workloads.gpu import gpu_kernels


def kernels(count: int, program: str = "own") -> list[Kernel]:
    return [Kernel(program, Problem.of("matmul", m=16 + i, n=16, k=16, layout="nn")) for i in range(count)]


def test_three_shapes_of_ones_own_fill_all_splits():
    assert set(splits_of(kernels(3)).values()) == {"train", "valid", "test"}


def test_most_shapes_are_for_training_and_the_same_list_is_split_the_same_way():
    splits = splits_of(kernels(60))
    assert list(splits.values()).count("train") > 30 and splits == splits_of(reversed(kernels(60)))


def test_a_shape_is_in_one_split_whatever_its_layout_and_program():
    pair = [Kernel("own", Problem.of("matmul", m=64, n=64, k=64, layout=layout)) for layout in ("nn", "nt")]
    test_kernel = Kernel("bert_large_x", Problem.of("matmul", m=64, n=64, k=64, layout="tn"))
    assert {*splits_of([*pair, *kernels(9)]).values()} >= {"train"}
    assert len({splits_of([*pair, *kernels(9)])[kernel.name] for kernel in pair}) == 1
    splits = splits_of([*pair, test_kernel, *kernels(9)], kind="triton")
    assert {splits[kernel.name] for kernel in (*pair, test_kernel)} == {"valid"}


def test_splits_can_be_said_otherwise():
    assert set(splits_of(kernels(9), "train").values()) == {"train"}
    assert set(splits_of(kernels(9), "program").values()) == {"train"}
    assert set(splits_of(kernels(9, "bert_large"), "shape").values()) == {"train", "valid", "test"}
    with pytest.raises(ConfigurationError, match="split"):
        splits_of(kernels(1), "half")


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
def test_collected_shapes_are_exported_as_a_collection_that_can_be_trained_on(tmp_path: Path):
    shapes = [{"family": "matmul", "m": m, "n": 24, "k": 16} for m in (8, 12, 16, 20)]
    (tmp_path / "mine.json").write_text(json.dumps(shapes))
    store, out = str(tmp_path / "mine.sqlite"), str(tmp_path / "mine")
    command_words = ["cpu", "--shapes", str(tmp_path / "mine.json"), "--out", store, "--configs", "3"]
    assert CliRunner().invoke(collect, command_words, catch_exceptions=False).exit_code == 0
    exported = CliRunner().invoke(collect, ["export", store, "--out", out], catch_exceptions=False)
    assert "2 train, 1 valid, 1 test" in exported.stdout
    dataset = load_dataset(out)
    assert dataset.train.labelled and dataset.valid.labelled


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
def test_a_collection_that_was_cut_off_says_what_is_missing(tmp_path: Path):
    (tmp_path / "mine.json").write_text(json.dumps([{"family": "matmul", "m": m, "n": 64, "k": 64} for m in (8, 9)]))
    command = ["cpu", "--shapes", str(tmp_path / "mine.json"), "--out", str(tmp_path / "mine.sqlite")]
    output = CliRunner().invoke(collect, [*command, "--minutes", "0.00001"], catch_exceptions=False)
    assert "2 kernels are still to be measured" in output.stdout and "the same command continues" in output.stdout


def test_a_calibration_of_a_shipped_model_goes_to_the_cache_folder_and_is_used(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    model = shipped_file("h200")
    shipped = load_calibration(model)
    assert shipped is not None
    path = save_calibration(model, dataclasses.replace(shipped, coefficient=0.77))
    assert path.is_relative_to(tmp_path)
    calibration = load_calibration(model)
    assert calibration is not None and calibration.coefficient == 0.77
    path.write_text("{")
    assert load_calibration(model) == shipped


@pytest.mark.parametrize(("kind", "kernels"), [("cpu", cpu_kernels()), ("triton", gpu_kernels())])
def test_the_built_in_programs_are_those_of_the_tables(kind: str, kernels: list[Kernel]) -> None:
    assert built_in_kernels(kind, cores=64) == kernels
