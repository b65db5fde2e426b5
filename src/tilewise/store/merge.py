"""Merges one store into another: a file that was filled offline into a shared store, or a partition into a file.

Runs and batches have unique names (`uid`), so that merging the same ones twice changes nothing. Files of older versions
have no such names. There, a run's name is a digest of its machine, start time, seed and settings, and a batch's name is
that of its run and its number.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.store.database import Transaction
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import OPEN, Machine, Store

_BATCH = """INSERT INTO batch (run, kernel, round, taken, default_ns, disturbed, watch, uid)
    VALUES (:run, :kernel, :round, :taken, :default_ns, :disturbed, :watch, :uid) ON CONFLICT (uid)
    DO UPDATE SET default_ns = excluded.default_ns, disturbed = excluded.disturbed, watch = excluded.watch
    WHERE batch.disturbed = :open AND excluded.disturbed <> :open"""


def merge(source: Store, target: Store) -> dict[str, int]:
    """Copy every run, batch, timing, verdict and finished kernel of `source` to `target`; return how many were new.

    Each kernel is one transaction: an interrupted merge is completed by the next.
    """
    runs = _read_runs(source)
    identities = {(machine.kind, machine.identity) for machine, _ in runs.values()}
    if not target.shared:
        _check_machines(target, identities)
    before = _count_rows(target)
    for partition, kernels in _kernels_by_partition(source, identities).items():
        source.choose_partition(partition)
        target.choose_partition(partition)
        for kernel, number in kernels:
            _merge_kernel(source, target, kernel, number, runs)
    after = _count_rows(target)
    return {name: after[name] - before[name] for name in after}


def _check_machines(target: Store, identities: set[tuple[str, str]]) -> None:
    """Raise an error if a file would contain measurements of several kinds of machines."""
    rows = target.database.read("SELECT DISTINCT kind, identity FROM machine")
    machines = identities | {(str(kind), str(identity)) for kind, identity in rows}
    if len(machines) > 1:
        names = "; ".join(sorted(f"{kind} {identity}" for kind, identity in machines))
        raise ConfigurationError(
            f"{target.name} is a file, which can have one kind of machine only, not {names}; merge into a "
            f"postgresql:// store, or export one kind with --machine."
        )


def _count_rows(store: Store) -> dict[str, int]:
    queries = {
        "kernels": "count(DISTINCT kernel) FROM finished",
        "runs": "count(*) FROM run",
        "batches": "count(*) FROM batch",
        "timings": "count(*) FROM timing",
        "verdicts": "count(*) FROM verdict",
    }
    return {name: int(store.database.read(f"SELECT {query}")[0][0]) for name, query in queries.items()}


def _read_runs(source: Store) -> dict[int, tuple[Machine, dict[str, Any]]]:
    """Return the machine and the row of every run, by the run's number."""
    query = """SELECT run.id, kind, identity, details, started, seed, settings, uid FROM run
        JOIN machine ON machine.id = run.machine"""
    runs = {}
    for number, kind, identity, details, started, seed, settings, uid in source.database.read(query):
        machine = Machine(str(kind), str(identity), source.table_of(details))
        if source.shared and source._partition is not None and machine.partition != source._partition:
            continue
        name = uid or _digest(kind, identity, details, started, seed, settings)
        runs[int(number)] = machine, {"started": started, "seed": seed, "settings": settings, "uid": name}
    return runs


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _kernels_by_partition(source: Store, identities: set[tuple[str, str]]) -> Mapping[str, list[tuple[Kernel, int]]]:
    """Return kernels and their numbers by partition; a file's kernels belong to the partition of its machine."""
    partitions = {Machine(kind, identity, {}).partition for kind, identity in identities}
    kernels: dict[str, list[tuple[Kernel, int]]] = defaultdict(list)
    file_partition = next(iter(partitions), "") if not source.shared else None
    rows = source.database.read("SELECT id, program, problem, part FROM kernel ORDER BY id")
    for number, program, problem, part in rows:
        partition = file_partition if file_partition is not None else str(part)
        if partition in partitions:
            kernels[partition].append((source.kernel_of(program, problem), int(number)))
    return kernels


def _merge_kernel(
    source: Store, target: Store, kernel: Kernel, number: int, runs: Mapping[int, tuple[Machine, dict[str, Any]]]
) -> None:
    """Copy everything about one kernel as one transaction."""
    reader = _KernelRows(source, number)
    batches, timings, verdicts, finished = reader.batches(), reader.timings(), reader.verdicts(), reader.finished()
    used_runs = {row["run"] for row in (*batches, *verdicts, *finished)}
    if not used_runs:
        return
    if not used_runs <= runs.keys():
        raise FileFormatError(f"{source.name} is damaged: it has measurements of a run that it does not list.")

    def work(transaction: Transaction) -> None:
        """Insert the rows with the numbers that kernels, runs and batches have in the target."""
        kernel_number = target.add_kernel(transaction, kernel)
        run_numbers = {run: target.add_run(transaction, *runs[run]) for run in used_runs}
        for batch in batches:
            uid = batch["uid"] or f"{runs[batch['run']][1]['uid']}/{batch['id']}"
            values = {**batch, "run": run_numbers[batch["run"]], "kernel": kernel_number, "uid": uid, "open": OPEN}
            values.pop("id")
            transaction.execute(_BATCH, values)
            batch_number = transaction.fetch("SELECT id FROM batch WHERE uid = :uid", {"uid": uid})[0][0]
            target.add_timings(transaction, int(batch_number), timings.get(batch["id"], []))
        for row in verdicts:
            values = {**row, "run": run_numbers[row["run"]], "kernel": kernel_number}
            target.add_verdict(transaction, values, source.config_of(row["key"]))
        for row in finished:
            default = source.config_of(row["key"])
            target.add_finished(transaction, run_numbers[row["run"]], kernel_number, default, row["seconds"])

    target.database.write(work)


class _KernelRows:
    """Reads the rows about one kernel as dictionaries."""

    def __init__(self, store: Store, kernel: int) -> None:
        self._store, self._kernel = store, {"kernel": kernel}

    def _read(self, columns: str, clauses: str) -> list[dict[str, Any]]:
        names = [column.split(".")[-1] for column in columns.split(", ")]
        rows = self._store.database.read(f"SELECT {columns} {clauses}", self._kernel)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def batches(self) -> list[dict[str, Any]]:
        columns = "id, run, round, taken, default_ns, disturbed, watch, uid"
        return self._read(columns, "FROM batch WHERE kernel = :kernel ORDER BY id")

    def timings(self) -> dict[int, list[tuple[Config, int]]]:
        """Return configurations and picoseconds by the batch's number."""
        rows = self._read(
            "timing.batch, config.key, timing.runtime_ps",
            "FROM timing JOIN batch ON batch.id = timing.batch JOIN config ON config.id = timing.config "
            "WHERE batch.kernel = :kernel",
        )
        timings: dict[int, list[tuple[Config, int]]] = defaultdict(list)
        for row in rows:
            timings[row["batch"]].append((self._store.config_of(row["key"]), row["runtime_ps"]))
        return timings

    def verdicts(self) -> list[dict[str, Any]]:
        clauses = f"""FROM verdict JOIN config ON config.id = verdict.config WHERE verdict.kernel = :kernel
            ORDER BY verdict.{self._store.database.row_order_sql}"""
        return self._read("verdict.run, config.key, verdict.status, verdict.reason, verdict.details", clauses)

    def finished(self) -> list[dict[str, Any]]:
        clauses = "FROM finished JOIN config ON config.id = finished.default_config WHERE finished.kernel = :kernel"
        return self._read("finished.run, config.key, finished.seconds", clauses)
