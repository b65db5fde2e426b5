"""Calibration: what is fitted, what is promised, what is kept, and what happens when it is cut short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewise._extension import native
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError
from tilewise.tune.choose.calibration.correction import Correction, Promise, Rows, promise_of, squashed
from tilewise.tune.search.gaussian_process import Hyperparameters

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
if native is not None:
    from tilewise.tune.choose.calibration import run as run
    from tilewise.tune.choose.calibration.calibrated import (
        Calibrated,
        calibration_file,
        find_calibration,
        read_calibration,
        write_calibration,
    )
    from tilewise.tune.choose.calibration.features import joined, rows_of
    from tilewise.tune.choose.calibration.kernels import calibration_kernels
    from tilewise.tune.choose.near import default_product, near_products
    from tilewise.tune.families.cpu.family import get_family
    from tilewise.tune.families.cpu.tiles import product_config, product_tile
    from tilewise.tune.problem import Config, Problem


def product(m: int, n: int, k: int, threads: int = 1, layout: str = "nn") -> Problem:
    spec = {"family": "matmul", "m": m, "n": n, "k": k, "threads": threads, "layout": layout}
    return get_family("matmul").problem(spec)


def likes_small_blocks(problem: Problem, config: Config, default: Config) -> float:
    """A machine on which every halving of the rows a block gains a twentieth: log runtime over the default's."""
    rows = [np.log2(min(one.size("block_m"), problem.size("m"))) for one in (config, default)]
    return float(0.05 * (rows[0] - rows[1]))


def fitted(threads: int = 1, seed: int = 0) -> Correction:
    parts, ratios, group = [], [], []
    rng = np.random.default_rng(seed)
    for number, m in enumerate((40, 60, 90, 130, 200, 300)):
        problem = product(m, 3 * m, 2 * m, threads)
        default = product_config(default_product(native, problem)[1])
        tiles = near_products(native, problem)[1:]
        tiles = [tiles[i] for i in rng.permutation(len(tiles))[:30]]
        parts.append(rows_of(problem, tiles, default))
        ratios += [likes_small_blocks(problem, tile, default) + 0.003 * rng.standard_normal() for tile in tiles]
        group += [number] * len(tiles)
    log_ratio, groups = np.array(ratios), np.array(group)
    correction = Correction(joined(parts), squashed(log_ratio), groups)
    correction.promise = promise_of(*correction.left_out(), log_ratio, groups)
    return correction


def test_the_default_is_nought_for_certain():
    rows = Rows(np.zeros((3, 2)), np.arange(6.0).reshape(3, 2), np.zeros((3, 2)), np.zeros(3))
    correction = Correction(rows, np.array([0.1, -0.2, 0.3]), np.arange(3), Hyperparameters(coefficient=0.0))
    default = Rows(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 2)), np.zeros(1))
    mean, deviation = correction.predict(default)
    assert abs(mean[0]) < 1e-9 and deviation[0] < 1e-4


def test_what_is_left_out_is_predicted_as_if_it_had_never_been_measured():
    told = fitted()
    mean, deviation = told.left_out()
    mine = told.group == 2
    rows = Rows(*(getattr(told.rows, name)[~mine] for name in Rows.__slots__))
    without = Correction(rows, told.log_ratio[~mine], told.group[~mine], told.hyper)
    again = without.predict(Rows(*(getattr(told.rows, name)[mine] for name in Rows.__slots__)))
    np.testing.assert_allclose(mean[mine], again[0], atol=1e-6)
    np.testing.assert_allclose(deviation[mine], again[1], atol=1e-4)


def test_what_helps_on_kernels_left_out_is_promised_and_chosen_for_others():
    family = fitted()
    assert family.promise is not None and family.promise.worst >= -0.015
    problem = product(110, 90, 60)
    chosen = Calibrated(native, {"matmul": family}).choose(problem)
    assert chosen is not None and chosen.size("block_m") < default_product(native, problem)[1].mc


def test_nothing_is_promised_where_measurements_are_noise():
    rng = np.random.default_rng(0)
    family = fitted()
    noise = 0.05 * rng.standard_normal(len(family.rows))
    correction = Correction(family.rows, noise, family.group)
    found = promise_of(*correction.left_out(), noise, correction.group)
    assert found is None or found.worst >= -0.015


def test_a_family_without_a_promise_keeps_its_defaults():
    family = fitted()
    family.promise = None
    assert Calibrated(native, {"matmul": family}).choose(product(70, 30, 150)) is None


@pytest.mark.parametrize("shape", [(300, 300, 700, "nn"), (300, 300, 700, "nt"), (120, 700, 300, "nn")])
def test_calibrated_choices_sum_alike_at_every_thread_count(shape, monkeypatch):
    monkeypatch.setattr("tilewise.tune.choose.calibration.calibrated.real_cores", lambda: 2)
    keen = Promise(0.5, -1.0, 0.1, 0.0)  # takes anything
    families = {"matmul": fitted(1), "matmul+": fitted(2)}
    for family in families.values():
        family.promise = keen
    calibrated = Calibrated(native, families)
    depths = set()
    for threads in (1, 2):
        problem = product(*shape[:3], threads, shape[3])
        chosen = calibrated.choose(problem)
        tile = default_product(native, problem)[1] if chosen is None else product_tile(chosen)
        depths.add(min(tile.kc, shape[2]))
    assert len(depths) == 1


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path):
    family = fitted()
    path = calibration_file(native, tmp_path)
    write_calibration(path, {"matmul": family}, {"machine": "mine"})
    found = read_calibration(native, path)
    problem, configs = product(70, 30, 150), near_products(native, product(70, 30, 150))
    before = Calibrated(native, {"matmul": family}).expected(problem, configs, configs[0])[0]
    np.testing.assert_allclose(found.expected(problem, configs, configs[0])[0], before, atol=1e-6)


@pytest.mark.parametrize("content", [b"", b"null", b"{}", b"\x00" * 100])
def test_a_damaged_calibration_is_left_alone_with_a_sentence(tmp_path: Path, content: bytes):
    path = calibration_file(native, tmp_path)
    path.write_bytes(content)
    found, notes = find_calibration(native, tmp_path)
    assert found is None and len(notes) == 1 and "tilewise calibrate" in notes[0]
    with pytest.raises((FileFormatError, UnavailableError)):
        read_calibration(native, path)


def test_the_kernels_are_a_few_dozen_of_all_families_and_thread_counts():
    kernels = calibration_kernels(2)
    assert 40 <= len(kernels) <= 100 and len(set(kernels)) == len(kernels)
    assert {(p.family, p["threads"]) for p in kernels[:20]} >= {("matmul", 1), ("matmul", 2), ("conv2d", 1)}


@pytest.fixture
def few(monkeypatch):
    """A calibration of six small products whose measuring is pretended."""
    problems = [product(m, 64, 64) for m in (20, 30, 40, 50, 60, 70)]
    monkeypatch.setattr(run, "calibration_kernels", lambda threads: problems)
    monkeypatch.setattr(run, "model_scores", lambda: None)
    measured = []

    def beside_default(problem, default, tiles, seconds, rounds):
        measured.append(problem)
        return {tile: [np.exp(likes_small_blocks(problem, tile, default))] * 3 for tile in tiles}

    monkeypatch.setattr(run, "beside_default", beside_default)

    def against_default(self, problem, tile):
        return -likes_small_blocks(problem, tile, self.device.default(problem))

    monkeypatch.setattr(run.Calibration, "_against_default", against_default)
    return measured


def test_a_run_leaves_one_whole_file_and_says_what_it_found(tmp_path: Path, few):
    report = run.Calibration(folder=tmp_path, minutes=0.05).run()
    assert report.kernels == 6 and report.tiles > 60 and report.path.is_file()
    assert [path.name for path in tmp_path.iterdir()] == [report.path.name]
    assert json.dumps(report.as_dict())


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, few, monkeypatch):
    def stop(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.Calibration, "_fit", stop)
        with pytest.raises(KeyboardInterrupt):
            run.Calibration(folder=tmp_path, minutes=0.05).run()
    assert len(few) == 6 and not calibration_file(native, tmp_path).exists()
    few.clear()
    part = next(tmp_path.glob("*.part.jsonl"))
    part.write_bytes(b"null\n[]\nhalf a line\n" + part.read_bytes()[:-20])  # the last kernel's line is torn
    run.Calibration(folder=tmp_path, minutes=0.05).run()
    assert few[0].size("m") == 70 and calibration_file(native, tmp_path).is_file()


def test_tiles_that_do_not_win_when_remeasured_are_not_kept(tmp_path: Path, few, monkeypatch):
    monkeypatch.setattr(run.Calibration, "_against_default", lambda self, one, tile: -0.01)
    report = run.Calibration(folder=tmp_path, minutes=0.05).run()
    assert set(report.promises.values()) == {None} and all(line["speedup"] == 1.0 for line in report.lines)


def test_a_machine_too_busy_to_measure_keeps_nothing_and_says_so(tmp_path: Path, few, monkeypatch):
    def scattered(problem, default, tiles, seconds, rounds):
        return {tile: [0.5, 1.0, 2.0] for tile in tiles}

    monkeypatch.setattr(run, "beside_default", scattered)
    with pytest.raises(UnavailableError, match="less busy"):
        run.Calibration(folder=tmp_path, minutes=0.05).run()
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, few, monkeypatch):
    measured = []

    def full(self, known, found):
        if len(measured) == 3:
            raise UnavailableError("the disk is full.")
        measured.append(known)
        append(self, known, found)

    append = run.Calibration._append
    with monkeypatch.context() as patch:
        patch.setattr(run.Calibration, "_append", full)
        with pytest.raises(UnavailableError, match="full"):
            run.Calibration(folder=tmp_path, minutes=0.05).run()
    few.clear()
    run.Calibration(folder=tmp_path, minutes=0.05).run()
    assert [problem.size("m") for problem in few[:3]] == [50, 60, 70]


def test_the_best_tiles_of_ones_own_shapes_are_kept_as_choices(tmp_path: Path, few, monkeypatch):
    from tilewise.tune.choose.kept import read_kept

    monkeypatch.setattr(run.Calibration, "_holds_elsewhere", lambda self, one, tile: True)
    problems = [product(m, 64, 64) for m in (20, 30, 40, 50, 60, 70)]
    with pytest.raises(ConfigurationError, match="5 or more shapes of one family, not from 2"):
        run.Calibration(problems[:2], folder=tmp_path / "few", minutes=0.05).run()
    assert not (tmp_path / "few").exists()  # said before anything is measured
    report = run.Calibration(problems, folder=tmp_path, minutes=0.05).run()
    assert report.choices >= 3 and read_kept(native, tmp_path)[0].tiles


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tilewise", "calibrate", *arguments]
    return subprocess.run(line, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_a_folder_that_cannot_be_written_is_one_sentence_before_anything_is_measured(tmp_path: Path):
    (tmp_path / "file").write_text("")
    said = command("--cache", str(tmp_path / "file" / "below"))
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and "cannot be written" in said.stderr


def calibrate(*arguments: str) -> str:
    from tilewise.cli.app import app, command_line

    command_line()
    return CliRunner().invoke(app, ["calibrate", *arguments], catch_exceptions=False).stdout


def test_show_and_reset(tmp_path: Path):
    assert "not calibrated" in calibrate("--show", "--cache", str(tmp_path))
    write_calibration(calibration_file(native, tmp_path), {"matmul": fitted()}, {})
    assert json.loads(calibrate("--show", "--json", "--cache", str(tmp_path)))["families"] == ["matmul"]
    assert "Removed" in calibrate("--reset", "--cache", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_calibrated_machine_chooses_in_the_next_process(tmp_path: Path):
    problem = product(60, 80, 150)
    family = fitted()
    chosen = Calibrated(native, {"matmul": family}).choose(problem)
    write_calibration(calibration_file(native, tmp_path / "tune"), {"matmul": family}, {})
    code = """
import json, numpy as np
from tilewise.backend import current_backend
tile = current_backend().explain("matmul", np.ones((60, 150), np.float32), np.ones((150, 80), np.float32)).tile
print(json.dumps(tile.as_dict()))
"""
    variables = {**os.environ, "TILEWISE_CACHE": str(tmp_path), "TILEWISE_TUNED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    expected = default_product(native, problem)[1] if chosen is None else product_tile(chosen)
    assert json.loads(done.stdout) == expected.as_dict()


def test_it_is_offered_once_and_not_where_it_was_done(tmp_path: Path, monkeypatch):
    from tilewise._tuned import calibration_offer

    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEWISE_TUNED", "1")
    assert "tilewise calibrate" in (calibration_offer() or "") and calibration_offer() is None
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "other"))
    write_calibration(calibration_file(native, tmp_path / "other" / "tune"), {"matmul": fitted()}, {})
    assert calibration_offer() is None


def test_the_command_offers_help_with_an_example():
    assert "Example" in calibrate("--help")
