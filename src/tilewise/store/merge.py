"""Taking over what another store holds: a journal that was filled offline into the shared store, or a part of that
into a file. Runs and batches have names of their own, so taking the same ones over twice changes nothing.

Files of older versions have no such names. Theirs are made of what they hold: the machine, when the run began, its
seed and settings; a batch is called by its run and its number in it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.store.home import Rows
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import OPEN, Machine, Store

_BATCH = """INSERT INTO batch (run, kernel, round, taken, default_ns, disturbed, watch, uid)
    VALUES (:run, :kernel, :round, :taken, :default_ns, :disturbed, :watch, :uid) ON CONFLICT (uid)
    DO UPDATE SET default_ns = excluded.default_ns, disturbed = excluded.disturbed, watch = excluded.watch
    WHERE batch.disturbed = :open AND excluded.disturbed <> :open"""


def merge(source: Store, target: Store) -> dict[str, int]:
    """Take every run, batch, timing, verdict and finished kernel of `source` over into `target`, a kernel at a time:
    a merge that was interrupted is gone on with by the next. Gives how many of each were new."""
    runs = _runs(source)
    identities = {(machine.kind, machine.identity) for machine, _ in runs.values()}
    if not target.shared:
        _check_alike(target, identities)
    before = _totals(target)
    for part, kernels in _kernels(source, identities).items():
        source.choose_part(part)
        target.choose_part(part)
        for kernel, number in kernels:
            _take_over(source, target, kernel, number, runs)
    after = _totals(target)
    return {name: after[name] - before[name] for name in after}


def _check_alike(target: Store, identities: set[tuple[str, str]]) -> None:
    known = {(str(kind), str(who)) for kind, who in target.home.read("SELECT DISTINCT kind, identity FROM machine")}
    if len(known | identities) > 1:
        names = "; ".join(sorted(f"{kind} {who}" for kind, who in known | identities))
        raise ConfigurationError(
            f"{target.name} is a file, which holds one kind of machine, and this would make several: {names}; merge "
            f"into a postgresql:// store, or export one with --machine."
        )


def _totals(store: Store) -> dict[str, int]:
    queries = {"kernels": "count(DISTINCT kernel) FROM finished", "runs": "count(*) FROM run"}
    queries |= {name: f"count(*) FROM {name[:-1] if name != 'batches' else 'batch'}" for name in ("batches", "timings")}
    queries |= {"verdicts": "count(*) FROM verdict"}
    return {name: int(store.home.read(f"SELECT {query}")[0][0]) for name, query in queries.items()}


def _runs(source: Store) -> dict[int, tuple[Machine, dict[str, Any]]]:
    """Every run by its number: who measured, and the values of its row."""
    query = """SELECT run.id, kind, identity, details, started, seed, settings, uid FROM run
        JOIN machine ON machine.id = run.machine"""
    found = {}
    for number, kind, identity, details, started, seed, settings, uid in source.home.read(query):
        machine = Machine(str(kind), str(identity), source.table_of(details))
        if source.shared and source._part is not None and machine.part != source._part:
            continue
        name = uid or _digest(kind, identity, details, started, seed, settings)
        found[int(number)] = machine, {"started": started, "seed": seed, "settings": settings, "uid": name}
    return found


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _kernels(source: Store, identities: set[tuple[str, str]]) -> Mapping[str, list[tuple[Kernel, int]]]:
    """Kernels and their numbers, by the part they belong to."""
    parts = {Machine(kind, identity, {}).part for kind, identity in identities}
    found: dict[str, list[tuple[Kernel, int]]] = defaultdict(list)
    only = next(iter(parts), "") if not source.shared else None
    for number, program, problem, part in source.home.read("SELECT id, program, problem, part FROM kernel ORDER BY id"):
        whose = only if only is not None else str(part)
        if whose in parts:
            found[whose].append((source.kernel_of(program, problem), int(number)))
    return found


def _take_over(
    source: Store, target: Store, kernel: Kernel, number: int, runs: Mapping[int, tuple[Machine, dict[str, Any]]]
) -> None:
    read = _Reader(source, number)
    batches, timings, verdicts, finished = read.batches(), read.timings(), read.verdicts(), read.finished()
    if not batches and not verdicts and not finished:
        return
    if not {row["run"] for row in (*batches, *verdicts, *finished)} <= runs.keys():
        raise FileFormatError(f"{source.name} is damaged: it holds measurements of a run that it does not know.")

    def work(rows: Rows) -> None:
        here = target.kernel_row(rows, kernel)
        numbers = {
            run: target.run_row(rows, *runs[run]) for run in {b["run"] for b in (*batches, *verdicts, *finished)}
        }
        for batch in batches:
            uid = batch["uid"] or f"{runs[batch['run']][1]['uid']}/{batch['id']}"
            values = {**batch, "run": numbers[batch["run"]], "kernel": here, "uid": uid, "open": OPEN}
            values.pop("id")
            rows.run(_BATCH, values)
            there = rows.all("SELECT id FROM batch WHERE uid = :uid", {"uid": uid})[0][0]
            target.add_timings(rows, int(there), timings.get(batch["id"], []))
        for row in verdicts:
            target.add_verdict(rows, {**row, "run": numbers[row["run"]], "kernel": here}, source.config_of(row["key"]))
        for row in finished:
            target.add_finished(rows, numbers[row["run"]], here, source.config_of(row["key"]), row["seconds"])

    target.home.change(work)


class _Reader:
    """The rows of one kernel."""

    def __init__(self, store: Store, kernel: int) -> None:
        self._store, self._kernel = store, {"kernel": kernel}

    def _rows(self, columns: str, rest: str) -> list[dict[str, Any]]:
        names = [column.split(".")[-1] for column in columns.split(", ")]
        found = self._store.home.read(f"SELECT {columns} {rest}", self._kernel)
        return [dict(zip(names, row, strict=True)) for row in found]

    def batches(self) -> list[dict[str, Any]]:
        columns = "id, run, round, taken, default_ns, disturbed, watch, uid"
        return self._rows(columns, "FROM batch WHERE kernel = :kernel ORDER BY id")

    def timings(self) -> dict[int, list[tuple[Config, int]]]:
        rows = self._rows(
            "timing.batch, config.key, timing.runtime_ps",
            "FROM timing JOIN batch ON batch.id = timing.batch JOIN config ON config.id = timing.config "
            "WHERE batch.kernel = :kernel",
        )
        found: dict[int, list[tuple[Config, int]]] = defaultdict(list)
        for row in rows:
            found[row["batch"]].append((self._store.config_of(row["key"]), row["runtime_ps"]))
        return found

    def verdicts(self) -> list[dict[str, Any]]:
        rest = f"""FROM verdict JOIN config ON config.id = verdict.config WHERE verdict.kernel = :kernel
            ORDER BY verdict.{self._store.home.order}"""
        return self._rows("verdict.run, config.key, verdict.status, verdict.reason, verdict.details", rest)

    def finished(self) -> list[dict[str, Any]]:
        rest = "FROM finished JOIN config ON config.id = finished.default_config WHERE finished.kernel = :kernel"
        return self._rows("finished.run, config.key, finished.seconds", rest)
