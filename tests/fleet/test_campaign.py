"""Campaigns on Ray: nodes, drivers and the database may die, a second driver joins; every kernel is measured once."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.rays import NEEDS_RAY, Driver, cluster_of, until
from tests.tune.stores import new_database, shared_cluster
from tilewise._extension import native
from tilewise.errors import TilewiseError
from tilewise.tune.families.cpu.family import get_family
from tilewise.tune.measure.aggregate import open_measurements
from tilewise.tune.measure.store import Store

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not installed")
KERNELS = int(os.environ.get("TILEWISE_FLEET_KERNELS", "300"))
CONFIGS, STEADY = 16, 40


def shapes(folder: Path, count: int, name: str = "shapes.json") -> Path:
    """Products that differ, each of which takes some microseconds."""
    path = folder / name
    some = [{"family": "matmul", "m": 48 + 8 * (i % 25), "n": 64 + 16 * (i // 25), "k": 128} for i in range(count)]
    path.write_text(json.dumps(some))
    return path


def problems(count: int) -> list[Any]:
    spec = json.loads(json.dumps([{"m": 48 + 8 * (i % 25), "n": 64 + 16 * (i // 25), "k": 128} for i in range(count)]))
    return [get_family("matmul").problem({"family": "matmul", **sizes}) for sizes in spec]


def finished(where: str) -> int:
    with Store(where) as store:
        return int(store.home.read("SELECT count(*) FROM finished")[0][0])


def test_without_ray_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tilewise.cli.fleet.campaign import on_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    options: dict[str, Any] = {"shapes": None, "minutes": 1.0, "out": tmp_path / "s.sqlite", "seed": 0, "configs": 2}
    with pytest.raises(TilewiseError, match=r"pip install 'tilewise\[ray\]'"):
        on_ray("cpu", "auto", False, **options, finals=False, plugins=())


@NEEDS_RAY
@needs_native
@pytest.mark.slow
def test_killed_nodes_drivers_and_databases_lose_and_double_nothing(tmp_path: Path) -> None:
    with shared_cluster() as database, cluster_of(3) as cluster:
        where = new_database(database, "campaign")
        Store(where).close()
        first = Driver(cluster.address, where, shapes(tmp_path, KERNELS), CONFIGS)
        until(lambda: finished(where) >= KERNELS // 6, 300, "a sixth")
        cluster.remove_node(cluster.nodes[0], allow_graceful=False)
        until(lambda: finished(where) >= 2 * KERNELS // 6, 300, "two sixths")
        database.crash()
        until(lambda: finished(where) >= 3 * KERNELS // 6, 300, "one half")
        first.kill()
        again = [Driver(cluster.address, where, shapes(tmp_path, KERNELS), CONFIGS) for _ in range(2)]
        assert [driver.wait(600) for driver in again] == [0, 0]
        counts = check_whole(where, KERNELS)
        shared = [len(driver.measured()) for driver in again]
        assert not set(again[0].measured()) & set(again[1].measured()), "no kernel is measured twice"
        assert min(shared) > 0, f"both drivers had a part in it: {shared}"
    print(f"\n{counts}; after the kills {shared} kernels by two drivers")


def check_whole(where: str, count: int) -> dict[str, int]:
    """Every planned kernel is finished once, with every planned configuration, each timing there once."""
    with open_measurements(where) as store:
        done = store.home.read("SELECT kernel, count(*) FROM finished GROUP BY kernel")
        assert len(done) == count and {times for _, times in done} == {1}
        assert store.waiting() == 0 and store.home.read("SELECT count(*) FROM claim") == [(0,)]
        assert store.finished() == {problem.key for problem in problems(count)}
        for kernel in store.kernels():
            planned = {config.key for config, status, _ in store.verdicts(kernel) if status == "ok"}
            timed = {key for batch in store.batches(kernel) for key in batch.runtime_ns}
            default = store.default_config(kernel)
            assert default is not None and timed | {default.key} == planned
            rounds: dict[tuple[int, int, str], int] = {}
            for batch in store.batches(kernel):
                for key in batch.runtime_ns:
                    assert not batch.open
                    rounds[batch.number, batch.round, key] = rounds.get((batch.number, batch.round, key), 0) + 1
            assert set(rounds.values()) == {1}
        return store.counts()


@NEEDS_RAY
@needs_native
@pytest.mark.slow
def test_what_three_nodes_of_one_machine_measure_is_as_steady_as_what_one_process_does(tmp_path: Path) -> None:
    from tilewise.tune import collect
    from tilewise.tune.measure.compare import compare, open_collection

    path = tmp_path / "steady.json"
    sizes = [{"family": "matmul", "m": m, "n": n, "k": 192} for m in (96, 160, 224) for n in (128, 256, 320, 384)]
    path.write_text(json.dumps(sizes))
    stores = {name: str(tmp_path / f"{name}.sqlite") for name in ("fleet", "alone", "again")}
    with cluster_of(3) as cluster:
        assert Driver(cluster.address, stores["fleet"], path, STEADY).wait(300) == 0
    for name in ("alone", "again"):
        collect("cpu", shapes=path, out=stores[name], configs=STEADY, say=lambda line: None)
    fleet, alone, again = (open_collection(stores[name]) for name in stores)
    own, found = compare(again, alone).median_correlation, compare(fleet, alone).median_correlation
    print(f"\nrank correlation: fleet and alone {found:.4f}, alone twice {own:.4f}, medians of {len(sizes)} kernels")
    if own < 0.98:
        pytest.skip(f"something else keeps this machine busy: one process agrees with itself by {own:.3f} only")
    assert found >= 0.97


@NEEDS_RAY
@needs_native
@pytest.mark.slow
def test_interrupted_it_ends_in_order_and_claims_nothing_any_longer(tmp_path: Path) -> None:
    with cluster_of(2) as cluster:
        where = str(tmp_path / "s.sqlite")
        driver = Driver(cluster.address, where, shapes(tmp_path, 100), CONFIGS)
        until(lambda: len(driver.measured()) >= 3, 120, "the first kernels")
        driver.process.send_signal(signal.SIGINT)
        assert driver.wait(60) == 130
        with Store(where) as store:
            assert store.home.read("SELECT count(*) FROM claim") == [(0,)]
            assert 3 <= store.counts()["kernels"] < 100
            assert store.waiting() == 100 - store.counts()["kernels"]


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
