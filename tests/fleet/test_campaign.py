"""Campaigns on Ray: nodes, drivers and the database may die, a second driver joins; every kernel is measured once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.campaign import check_whole, disturbed_campaign, shapes, steadiness
from tests.fleet.rays import NEEDS_RAY, Driver, cluster_of
from tests.store.stores import new_database, shared_cluster
from tests.waiting import until
from tilewise._extension import native
from tilewise.errors import TilewiseError
from tilewise.store.store import Store

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not installed")
KERNELS = int(os.environ.get("TILEWISE_FLEET_KERNELS", "40"))  # `make test-fleet-campaign` takes 300
CONFIGS, STEADY = 12, 24


def test_without_ray_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tilewise_fleet.cli.campaign import on_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    options: dict[str, Any] = {"shapes": None, "minutes": 1.0, "out": tmp_path / "s.sqlite", "seed": 0, "configs": 2}
    with pytest.raises(TilewiseError, match=r"pip install 'tilewise-fleet\[ray\]'"):
        on_ray("cpu", "auto", False, **options, finals=False, plugins=())


@NEEDS_RAY
@needs_native
@pytest.mark.slow
def test_killed_nodes_drivers_and_databases_lose_and_double_nothing(tmp_path: Path) -> None:
    with shared_cluster() as database, cluster_of(3) as cluster:
        where = new_database(database, "campaign")
        shared = disturbed_campaign(tmp_path, cluster, database, where, KERNELS, CONFIGS)
        counts = check_whole(where, KERNELS)
        assert min(shared) > 0, f"both drivers had a part in it: {shared}"
    print(f"\n{counts}; after the kills {shared} kernels by two drivers")


@NEEDS_RAY
@needs_native
@pytest.mark.slow
def test_what_three_nodes_of_one_machine_measure_is_as_steady_as_what_one_process_does(tmp_path: Path) -> None:
    where = str(tmp_path / "fleet.sqlite")
    with cluster_of(3) as cluster:
        assert Driver(cluster.address, where, shapes(tmp_path, STEADY), CONFIGS).wait(300) == 0
    report = steadiness(tmp_path, where, STEADY, STEADY, CONFIGS)
    print(f"\n{report}")
    own = report["alone twice"]["median_kernel"]
    if own < 0.98:
        pytest.skip(f"something else keeps this machine busy: one process agrees with itself by {own:.3f} only")
    assert report["fleet and alone"]["median_kernel"] >= 0.97


@NEEDS_RAY
@needs_native
@pytest.mark.slow
def test_interrupted_it_ends_in_order_and_claims_nothing_any_longer(tmp_path: Path) -> None:
    with cluster_of(2) as cluster:
        where = str(tmp_path / "s.sqlite")
        driver = Driver(cluster.address, where, shapes(tmp_path, 100), CONFIGS)
        until(lambda: len(driver.measured_events()) >= 3, "the first kernels", 120)
        driver.process.send_signal(signal.SIGINT)
        assert driver.wait(60) == 130
        with Store(where) as store:
            assert store.database.read("SELECT count(*) FROM claim") == [(0,)]
            assert 3 <= store.counts()["kernels"] < 100
            assert store.queue_length() == 100 - store.counts()["kernels"]


@NEEDS_RAY
@pytest.mark.slow
def test_a_cluster_without_slots_or_none_at_all_is_a_sentence(tmp_path: Path) -> None:
    with cluster_of(0) as cluster:
        driver = Driver(cluster.address, str(tmp_path / "s.sqlite"), shapes(tmp_path, 2), 4)
        assert driver.wait(120) == 2
        assert "offers a slot for cpu" in driver.log.read_text()
    driver = Driver("127.0.0.1:1", str(tmp_path / "s.sqlite"), shapes(tmp_path, 2), 4)
    assert driver.wait(120) == 2
    assert "There is no Ray cluster at" in driver.log.read_text()
