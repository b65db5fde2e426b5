"""Promises of the benchmark of foreign collections, and of the large logs that are made to import."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.devices import expected_by_chance, score
from benchmarks.foreign import COLLECTIONS, folder
from benchmarks.imports import LOGS, written
from benchmarks.tile_peers import tabulate
from costmodel.simulated import simulated_kernels
from tilewise.costmodel.data.importers import import_logs
from tilewise.costmodel.data.writing import kernel_npz
from tilewise.costmodel.metrics import random_top_k_error


@pytest.mark.parametrize("picks", [1, 3, 5, 9])
def test_random_picks_are_expected_to_find_what_they_find_on_average(picks):
    target = np.array([3.0, 1.0, 2.0, 2.0, 7.0, 5.0, 1.5])
    minima = [min(picks_of_k) for picks_of_k in itertools.combinations(target, min(picks, len(target)))]
    assert random_top_k_error(target, picks) == pytest.approx(np.mean(minima) - 1.0)


def test_a_spoiled_collection_is_judged_by_undisturbed_times():
    data = COLLECTIONS["ties"](0)
    ties = [len(np.unique(kernel.runtime)) / kernel.n_configs for kernel in data.train]
    clean = [len(np.unique(kernel.runtime)) / kernel.n_configs for kernel in data.test]
    assert np.mean(ties) < 0.9 < np.mean(clean)


def test_every_kernel_of_a_folder_is_tested_by_one_of_three_seeds(tmp_path):
    for number, kernel in enumerate(simulated_kernels(12, seed=3, n_configs=8)):
        path = tmp_path / ("train", "valid", "test")[number % 3] / f"{kernel.name}.npz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(kernel_npz(kernel))
    splits = [folder(tmp_path, seed) for seed in (60, 61, 62)]
    assert sorted(name for data in splits for name in data.test.names) == sorted(
        [*splits[0].train.names, *splits[0].valid.names, *splits[0].test.names]
    )
    assert all([len(data.train), len(data.valid), len(data.test)] == [6, 2, 4] for data in splits)


def test_differences_of_peers_are_paired_by_kernel():
    def run(peer, seed, errors):
        facts = {"seed": seed, "programs": ["a", "b"], "chance": {"top1": 9.0, "top5": 8.0}, "date": "", "kernels": {}}
        errors_of = {"top1": 1.0, "top5": float(np.mean(errors)), "seconds": 1.0, "processor_seconds": 1.0}
        return facts | errors_of | {"peer": peer, "limit": 15, "each": {"top1": errors, "top5": errors}}

    runs = [run("TileRanker", 0, [1.0, 5.0]), run("auto", 0, [2.0, 6.0]), run("TileRanker", 1, [3.0, 3.0])]
    table = tabulate(runs)
    assert table["peers"]["auto"]["above_ours"] == [1.0, 0.0] and table["peers"]["TileRanker"]["seeds"] == 2
    assert table["chance"] == {"top1": 9.0, "top5": 8.0}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_any_length_is_one_that_the_importer_reads(name, tmp_path):
    count = written(tmp_path / "log.json", name, 1)
    report = import_logs(LOGS[name].format_name, [tmp_path / "log.json"], tmp_path / "out")
    assert report.kernels > 0 and not report.skipped
    assert count >= report.kernels


def test_a_search_is_scored_between_chance_and_the_optimum():
    target = np.random.default_rng(0).lognormal(size=1000)
    chance = expected_by_chance(target, 20)
    assert (np.diff(chance) <= 0).all() and chance[0] == np.sort(target)[::-1][round(1001 / 2)]
    assert score(target.min() / chance[None], target) == pytest.approx(0.0)
    assert score(np.ones((3, 20)), target) == 1.0
    minima = [[np.random.default_rng(run).permutation(target)[: k + 1].min() for k in range(20)] for run in range(300)]
    assert 0 < score(target.min() / np.array(minima), target) < 0.3  # a median is compared with an expected rank
