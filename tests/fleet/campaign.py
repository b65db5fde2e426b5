"""A whole campaign with everything that may go wrong, and whether its timings are those of one process alone.

    python -m tests.fleet.campaign [--kernels 300] [--configs 12] [--alone 60] [--out benchmarks/results/campaign.json]

Three nodes of a Ray cluster on this machine measure into PostgreSQL. A node is killed (SIGKILL to all its processes),
the database is ended without a word and started again, the driver is killed; two drivers then share the rest. Every
planned kernel must be there once, with every configuration, no timing twice. Then one process measures some of the
kernels twice, and the orders of their configurations are compared: the fleet's with the first, and the second with
the first. Runs unattended; a busy machine takes longer, and says so in the second comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import machine_class, today
from tests.fleet.rays import Driver, cluster_of
from tests.store.stores import new_database, shared_cluster
from tests.waiting import until
from tilewise._atomic import write_atomic
from tilewise.profile.timing.statistics import rank_correlation
from tilewise.store.aggregate import open_measurements, read_measured
from tilewise.store.problem import Problem
from tilewise.store.store import Store
from tilewise.tune.families.cpu.family import get_family

Runtimes = Mapping[str, Mapping[str, float]]  # nanoseconds by problem and configuration
_PATIENCE, _TRIES = 900.0, 20


def sizes(count: int) -> list[dict[str, Any]]:
    """Products that differ, each of which takes some microseconds."""
    return [{"family": "matmul", "m": 48 + 8 * (i % 25), "n": 64 + 16 * (i // 25), "k": 128} for i in range(count)]


def shapes(folder: Path, count: int, name: str = "shapes.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(sizes(count)))
    return path


def problems(count: int) -> list[Problem]:
    return [get_family("matmul").problem(of) for of in sizes(count)]


def finished(where: str) -> int:
    with contextlib.suppress(Exception), Store(where) as store:  # the database may be away
        return int(store.database.read("SELECT count(*) FROM finished")[0][0])
    return 0


def kill_node(cluster: Any, place: int) -> int:
    """SIGKILL to everything that belongs to a node; says how many processes that were."""
    node, lost_nodes = cluster.nodes[place], 0
    for process in node.all_processes.values():
        for info in process:
            if info.process.poll() is None:
                os.kill(info.process.pid, signal.SIGKILL)
                lost_nodes += 1
    cluster.remove_node(node, allow_graceful=False)
    return lost_nodes


def disturbed_campaign(folder: Path, cluster: Any, database: Any, where: str, count: int, configs: int) -> list[int]:
    """Everything is killed once; gives the kernels that each of the last two drivers measured."""
    Store(where).close()
    first = Driver(cluster.address, where, shapes(folder, count), configs)
    until(lambda: finished(where) >= count // 6, "a sixth", _PATIENCE)
    kill_node(cluster, 0)
    until(lambda: finished(where) >= 2 * count // 6, "two sixths", _PATIENCE)
    database.crash()
    until(lambda: finished(where) >= 3 * count // 6, "one half", _PATIENCE)
    first.kill()
    again = [Driver(cluster.address, where, shapes(folder, count), configs) for _ in range(2)]
    assert [driver.wait(_PATIENCE) for driver in again] == [0, 0]
    assert not set(again[0].measured_events()) & set(again[1].measured_events()), "no kernel is measured twice"
    return [len(driver.measured_events()) for driver in again]


def check_whole(where: str, count: int) -> dict[str, int]:
    """Every planned kernel is finished once, with every planned configuration, each timing there once."""
    with open_measurements(where) as store:
        done = store.database.read("SELECT kernel, count(*) FROM finished GROUP BY kernel")
        assert len(done) == count and {times for _, times in done} == {1}
        assert store.queue_length() == 0 and store.database.read("SELECT count(*) FROM claim") == [(0,)]
        assert store.finished() == {problem.key for problem in problems(count)}
        for kernel in store.kernels():
            planned = {config.key for config, status, _ in store.verdicts(kernel) if status == "ok"}
            keys = {key for batch in store.batches(kernel) for key in batch.runtime_ns}
            default = store.default_config(kernel)
            assert default is not None and keys | {default.key} == planned
            assert not any(batch.open for batch in store.batches(kernel))
        twice = """SELECT count(*) FROM (SELECT batch, config FROM timing GROUP BY batch, config HAVING count(*) > 1)
            AS twice"""
        assert store.database.read(twice) == [(0,)]
        return store.counts()


def runtimes(where: str) -> Runtimes:
    with open_measurements(where) as store:
        measured_problems = read_measured(store)
    return {of.kernel.problem.key: {t.config.key: t.runtime_ns for t in of.timings} for of in measured_problems}


def agreement(first: Runtimes, second: Runtimes) -> dict[str, float]:
    """Spearman's correlation of the configurations' runtimes: kernel by kernel, and over all of them relative to their
    kernel's mean (the plain runtimes of all kernels would agree whatever was measured: the kernels differ in size)."""
    each, ours, theirs, apart = [], [], [], []
    for key in first.keys() & second.keys():
        common = sorted(first[key].keys() & second[key].keys())
        pair = [np.log([of[key][config] for config in common]) for of in (first, second)]
        if len(common) < 4:
            continue
        each.append(rank_correlation(*pair))
        ours, theirs = [*ours, *(pair[0] - pair[0].mean())], [*theirs, *(pair[1] - pair[1].mean())]
        apart += list(np.abs(pair[0] - pair[0].mean() - pair[1] + pair[1].mean()))
    return {
        "kernels": len(each),
        "pairs": len(ours),
        "pooled": round(rank_correlation(np.array(ours), np.array(theirs)), 4),
        "median_kernel": round(statistics.median(each), 4),
        "mean_kernel": round(statistics.fmean(each), 4),
        "worst_kernel": round(min(each), 4),
        "median_deviation": round(float(np.median(apart)), 5),
    }


def measured_alone(folder: Path, name: str, count: int, total: int, configs: int) -> Runtimes:
    """Every so manieth kernel by one process, as `tilewise collect cpu` measures."""
    from tilewise.tune import collect

    place = str(folder / f"{name}.sqlite")
    some = sizes(total)[:: max(1, total // count)]
    for _ in range(_TRIES):  # what was disturbed is left for the next time
        result = collect("cpu", shapes=some, out=place, configs=configs, minutes=15.0, say=lambda line: None)
        if not result.left:
            return runtimes(place)
    raise AssertionError(f"{result.left} kernels are left: {result.failures[:3]}")


def steadiness(folder: Path, where: str, count: int, total: int, configs: int) -> dict[str, Any]:
    once, again = (measured_alone(folder, name, count, total, configs) for name in ("alone", "again"))
    return {"fleet and alone": agreement(runtimes(where), once), "alone twice": agreement(again, once)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=300)
    parser.add_argument("--configs", type=int, default=12)
    parser.add_argument("--alone", type=int, default=60, help="kernels that one process measures to compare; 0: none")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tilewise-campaign-") as name, shared_cluster() as database:
        folder, where = Path(name), new_database(database, "campaign")
        with cluster_of(3) as cluster:
            shared = disturbed_campaign(folder, cluster, database, where, options.kernels, options.configs)
        facts: dict[str, Any] = {"date": today(), "machine": machine_class(), **check_whole(where, options.kernels)}
        facts |= {"seconds": round(time.monotonic() - start), "by_two_drivers": shared}
        print(json.dumps(facts), flush=True)
        compared = steadiness(folder, where, options.alone, options.kernels, options.configs) if options.alone else {}
    for what, numbers in compared.items():
        print(what, json.dumps(numbers), flush=True)
    if options.out is not None:
        write_atomic(options.out, json.dumps(facts | compared, indent=1) + "\n")


if __name__ == "__main__":
    main()
