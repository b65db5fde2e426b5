"""Merges one store into another: a file that was filled offline into a shared store, or a partition into a file.

Runs and batches have unique names (`uid`), so that merging the same ones twice changes nothing. Files of older versions
have no such names. There, a run's name is a digest of its machine, start time, seed and settings, and a batch's name is
that of its run and its number.

The rows of a kernel are compared with those of the target before anything is written: reading is far faster than
inserting rows that exist. A batch that has the name of one in the target but other contents is a conflict; it is
counted and not copied.
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
    WHERE batch.disturbed = :open AND excluded.disturbed <> :open AND batch.kernel = excluded.kernel"""
Runs = Mapping[int, tuple[Machine, dict[str, Any]]]  # machine and row of a run, by its number


def merge(source: Store, target: Store) -> dict[str, int]:
    """Copy every run, batch, timing, verdict and finished kernel of `source` to `target`.

    Each kernel is one transaction: an interrupted merge is completed by the next. The result has the number of new rows
    of each kind, and the number of batches that were not copied because they conflict with the target's.
    """
    runs = _read_runs(source)
    identities = {(machine.kind, machine.identity) for machine, _ in runs.values()}
    if not target.shared:
        rows = target.database.read("SELECT DISTINCT kind, identity FROM machine")
        machines = identities | {(str(kind), str(identity)) for kind, identity in rows}
        if len(machines) > 1:
            names = "; ".join(sorted(f"{kind} {identity}" for kind, identity in machines))
            raise ConfigurationError(
                f"{target.name} is a file, which can have one kind of machine only, not {names}; merge into a "
                f"postgresql:// store, or export one kind with --machine."
            )
    before = _count_rows(target)
    conflicts = 0
    for partition, kernels in _kernels_by_partition(source, identities).items():
        source.choose_partition(partition)
        target.choose_partition(partition)
        for kernel, number in kernels:
            conflicts += _merge_kernel(source, target, kernel, number, runs)
    after = _count_rows(target)
    return {**{name: after[name] - before[name] for name in after}, "conflicts": conflicts}


def _count_rows(store: Store) -> dict[str, int]:
    """Return the number of rows of each table by name."""
    queries = {
        "kernels": "count(DISTINCT kernel) FROM finished",
        "runs": "count(*) FROM run",
        "batches": "count(*) FROM batch",
        "timings": "count(*) FROM timing",
        "verdicts": "count(*) FROM verdict",
    }
    return {name: int(store.database.read(f"SELECT {query}")[0][0]) for name, query in queries.items()}


def _read_runs(source: Store) -> dict[int, tuple[Machine, dict[str, Any]]]:
    """Return (machine, row) of each run by its number."""
    query = """SELECT run.id, kind, identity, details, started, seed, settings, uid FROM run
        JOIN machine ON machine.id = run.machine"""
    runs = {}
    for number, kind, identity, details, started, seed, settings, uid in source.database.read(query):
        machine = Machine(str(kind), str(identity), source.table_of(details))
        if source.shared and source._partition is not None and machine.partition != source._partition:
            continue
        # Equal rows of two stores have equal names.
        row = json.dumps((kind, identity, details, started, seed, settings))
        name = uid or hashlib.sha256(row.encode()).hexdigest()[:32]
        runs[int(number)] = machine, {"started": started, "seed": seed, "settings": settings, "uid": name}
    return runs


def _kernels_by_partition(source: Store, identities: set[tuple[str, str]]) -> Mapping[str, list[tuple[Kernel, int]]]:
    """Return (kernel, number) by partition, for all kernels of `source`; those of a file belong to its machine's."""
    partitions = {Machine(kind, identity, {}).partition for kind, identity in identities}
    kernels: dict[str, list[tuple[Kernel, int]]] = defaultdict(list)
    file_partition = next(iter(partitions), "") if not source.shared else None
    rows = source.database.read("SELECT id, program, problem, part FROM kernel ORDER BY id")
    for number, program, problem, part in rows:
        partition = file_partition if file_partition is not None else str(part)
        if partition in partitions:
            kernels[partition].append((source.kernel_of(program, problem), int(number)))
    return kernels


def _merge_kernel(source: Store, target: Store, kernel: Kernel, number: int, runs: Runs) -> int:
    """Copy all rows of one kernel in a transaction; return the number of batches that conflict and were not copied."""
    rows = _KernelRows(source, number)
    all_rows = (*rows.batches, *rows.verdicts, *rows.finished)
    if not {row["run"] for row in all_rows} <= runs.keys():
        raise FileFormatError(f"{source.name} is damaged: it has measurements of a run that it does not list.")
    for row in all_rows:
        row["run_uid"] = runs[row["run"]][1]["uid"]
    for batch in rows.batches:
        batch["uid"] = batch["uid"] or f"{batch['run_uid']}/{batch['id']}"
    query = "SELECT id FROM kernel WHERE problem = :problem AND part = :part"
    numbers = target.database.read(query, {"problem": kernel.problem.key, "part": target.partition})
    target_rows = _KernelRows(target, int(numbers[0][0]) if numbers else -1)
    batches, conflicts = _new_batches(rows, target_rows)
    verdicts = _new_rows(rows.verdicts, target_rows.verdicts, ("run_uid", "key", "status", "reason"))
    finished = _new_rows(rows.finished, target_rows.finished, ("run_uid", "key", "seconds"))
    new_rows = (*(batch for batch, _ in batches), *verdicts, *finished)
    if not new_rows:
        return conflicts

    def work(transaction: Transaction) -> int:
        """Insert the rows, with the target's numbers of kernels, runs and batches."""
        name_conflicts = 0
        kernel_number = target.add_kernel(transaction, kernel)
        run_numbers = {run: target.add_run(transaction, *runs[run]) for run in {row["run"] for row in new_rows}}
        for batch, timings in batches:
            values = {name: value for name, value in batch.items() if name not in ("id", "run_uid")}
            values |= {"run": run_numbers[batch["run"]], "kernel": kernel_number, "open": OPEN}
            transaction.execute(_BATCH, values)
            query = "SELECT id, kernel FROM batch WHERE uid = :uid"
            batch_number, batch_kernel = transaction.fetch(query, {"uid": batch["uid"]})[0]
            if batch_kernel != kernel_number:  # the name belongs to a batch of another kernel
                name_conflicts += 1
                continue
            target.add_timings(transaction, int(batch_number), timings)
        for row in verdicts:
            values = {**row, "run": run_numbers[row["run"]], "kernel": kernel_number}
            target.add_verdict(transaction, values, source.config_of(row["key"]))
        for row in finished:
            default = source.config_of(row["key"])
            target.add_finished(transaction, run_numbers[row["run"]], kernel_number, default, row["seconds"])
        return name_conflicts

    return conflicts + target.database.write(work)


def _new_batches(
    source: _KernelRows, target: _KernelRows
) -> tuple[list[tuple[dict[str, Any], list[tuple[Config, int]]]], int]:
    """Return `source`'s batches that are new or have new timings, with these, and the number of conflicts."""
    by_uid = {batch["uid"]: batch for batch in target.batches if batch["uid"]}
    source_timings = source.timings()
    target_timings = target.timings() if by_uid else {}
    changes, conflicts = [], 0
    for batch in source.batches:
        timings = source_timings.get(batch["id"], [])
        twin = by_uid.get(batch["uid"])
        if twin is None:
            changes.append((batch, timings))
            continue
        twin_timings = dict(target_timings.get(twin["id"], []))
        both_closed = OPEN not in (batch["disturbed"], twin["disturbed"])
        fields = ("round", "default_ns", "disturbed") if both_closed else ("round",)
        if any(batch[name] != twin[name] for name in fields) or any(
            twin_timings.get(config, runtime_ps) != runtime_ps for config, runtime_ps in timings
        ):
            conflicts += 1
            continue
        new_timings = [(config, runtime_ps) for config, runtime_ps in timings if config not in twin_timings]
        is_closed_now = twin["disturbed"] == OPEN != batch["disturbed"]
        if new_timings or is_closed_now:
            changes.append((batch, new_timings))
    return changes, conflicts


def _new_rows(
    source: list[dict[str, Any]], target: list[dict[str, Any]], names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the rows of `source` that have no equal row in `target`, compared by the columns `names`."""
    existing = {tuple(row[name] for name in names) for row in target}
    return [row for row in source if tuple(row[name] for name in names) not in existing]


class _KernelRows:
    """All rows of one kernel in a store, as dictionaries; runs are identified by their uid."""

    def __init__(self, store: Store, kernel: int) -> None:
        """Read all rows except timings, which are many."""
        self._store, self._kernel = store, {"kernel": kernel}
        self.batches = self._read(
            "id, run, round, taken, default_ns, disturbed, watch, uid",
            "FROM batch WHERE kernel = :kernel ORDER BY id",
        )
        self.verdicts = self._read(
            "verdict.run, run.uid AS run_uid, config.key, verdict.status, verdict.reason, verdict.details",
            f"""FROM verdict JOIN config ON config.id = verdict.config LEFT JOIN run ON run.id = verdict.run
            WHERE verdict.kernel = :kernel ORDER BY verdict.{store.database.row_order_sql}""",
        )
        self.finished = self._read(
            "finished.run, run.uid AS run_uid, config.key, finished.seconds",
            """FROM finished JOIN config ON config.id = finished.default_config
            LEFT JOIN run ON run.id = finished.run WHERE finished.kernel = :kernel""",
        )

    def _read(self, columns: str, clauses: str) -> list[dict[str, Any]]:
        """Select `columns` of this kernel's rows, by SQL `clauses`; return a dict per row."""
        names = [column.split(".")[-1].split(" ")[-1] for column in columns.split(", ")]
        rows = self._store.database.read(f"SELECT {columns} {clauses}", self._kernel)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def timings(self) -> dict[int, list[tuple[Config, int]]]:
        """Return (configuration, picoseconds) of all timings, by batch number."""
        if not self.batches:
            return {}
        # The range of batches lets a planner without statistics use the primary key instead of reading all timings.
        query = """SELECT timing.batch, config.key, timing.runtime_ps FROM timing
            JOIN batch ON batch.id = timing.batch JOIN config ON config.id = timing.config
            WHERE batch.kernel = :kernel AND timing.batch BETWEEN :first AND :last"""
        values = {**self._kernel, "first": self.batches[0]["id"], "last": self.batches[-1]["id"]}
        timings: dict[int, list[tuple[Config, int]]] = defaultdict(list)
        for batch, key, runtime_ps in self._store.database.read(query, values):
            timings[batch].append((self._store.config_of(key), runtime_ps))
        return timings
