"""One store, two homes: the same promises in a file and in PostgreSQL; claims that expire, queues, and merging."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.postgres import Cluster
from tests.store.stores import HOMES, new_database, shared_cluster
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError
from tilewise.store import claims
from tilewise.store.aggregate import open_measurements, read_measured
from tilewise.store.claims import LostClaimError
from tilewise.store.merge import merge
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store, Verdict

HERE, THERE = Machine("cpu", "Test CPU", {"name": "Test CPU"}), Machine("triton", "Test GPU", {"name": "Test GPU"})
NewStore = Callable[[], str]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with shared_cluster() as shared:
        yield shared


@pytest.fixture
def database(request: pytest.FixtureRequest) -> NewStore:
    return lambda: new_database(request.getfixturevalue("cluster"), f"s{next(_numbers)}")


@pytest.fixture(params=HOMES)
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> NewStore:
    if request.param == "file":
        return lambda: str(tmp_path / f"{next(_numbers)}.sqlite")
    return request.getfixturevalue("database")


def kernel(m: int) -> Kernel:
    return Kernel("own", Problem.of("matmul", m=m))


def config(number: int) -> Config:
    return Config.of(block=number)


def fill(store: Store, machine: Machine = HERE, kernels: int = 2, finish: bool = True) -> int:
    run = store.begin(machine, 7, {"rounds": 2})
    for m in range(kernels):
        assert store.claim(run, kernel(m))
        store.add_verdicts(run, kernel(m), [Verdict(config(n), "ok") for n in range(3)])
        for turn in range(2):
            timings = [(config(n), 100.0 + 10 * n + turn) for n in range(1, 3)]
            store.add_batch(run, kernel(m), turn, 100.0 + turn, timings)
        number = store.open_batch(run, kernel(m), 2, 101.0)
        store.add_timing(number, config(1), 111.0)
        store.close_batch(number, 100.5, disturbed=True, watch={"load": 2.0})
        if finish:
            store.finish(run, kernel(m), config(0), 0.5)
    return run


def content(where: str, part: str | None = None) -> list[Any]:
    """What a store says, without the numbers of its rows."""
    with open_measurements(where, part) as store:
        kernels = []
        for kernel_read in store.kernels():
            batches = [
                (b.round, b.default_ns, b.disturbed, sorted(b.runtime_ns.items())) for b in store.batches(kernel_read)
            ]
            kernels.append(
                (kernel_read.problem.key, batches, store.verdicts(kernel_read), store.default_config(kernel_read))
            )
        return sorted([kernels, store.counts(), [m.identity for m in store.machines()]], key=str)


def test_both_homes_say_the_same(new_store: NewStore, tmp_path: Path) -> None:
    where, plain = new_store(), str(tmp_path / "plain.sqlite")
    for place in (where, plain):
        with Store(place) as store:
            fill(store)
    assert content(where) == content(plain)
    with open_measurements(where) as store:
        problems = read_measured(store)
        assert [len(m.timings) for m in problems] == [3, 3]
        assert store.counts() == {"kernels": 2, "pairs": 4, "timings": 10, "batches": 6, "disturbed": 2}


def test_both_homes_have_the_same_columns(database: NewStore, tmp_path: Path) -> None:
    from sqlalchemy import inspect

    with Store(tmp_path / "s.sqlite") as file, Store(database()) as shared:
        inspector = inspect(shared.database.engine)  # type: ignore[attr-defined]
        tables = {row[0] for row in file.database.read("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables | {"alembic_version"} == set(inspector.get_table_names())
        for table in tables:
            own = {row[1] for row in file.database.read(f"PRAGMA table_info({table})")}
            there = {column["name"] for column in inspector.get_columns(table)}
            assert there - own == ({"id"} if table == "verdict" else set()), table
            assert own <= there


def test_a_batch_sent_twice_is_there_once(new_store: NewStore) -> None:
    with Store(new_store()) as store:
        run = store.begin(HERE, 0, {}, uid="r1")
        assert store.begin(HERE, 0, {}, uid="r1") == run
        for _ in range(2):
            store.add_batch(run, kernel(1), 0, 100.0, [(config(1), 90.0)], uid="b1")
            store.add_verdicts(run, kernel(1), [Verdict(config(1), "ok")])
        assert store.counts()["timings"] == store.counts()["batches"] == 1
        assert len(store.verdicts(kernel(1))) == 1


def test_timings_of_a_shared_store_cannot_be_changed(database: NewStore) -> None:
    with Store(database()) as store:
        fill(store)
        for statement in ("UPDATE timing SET runtime_ps = 1", "DELETE FROM timing"):
            with pytest.raises(UnavailableError, match="only ever added to"):
                store.database.write(lambda transaction, statement=statement: transaction.execute(statement))


def test_merging_twice_changes_nothing(new_store: NewStore, tmp_path: Path) -> None:
    source, target = str(tmp_path / "journal.sqlite"), new_store()
    with Store(source) as journal:
        fill(journal)
    with Store(source) as journal, Store(target) as into:
        first, second = merge(journal, into), merge(journal, into)
    assert first == {"kernels": 2, "runs": 1, "batches": 6, "timings": 10, "verdicts": 6, "conflicts": 0}
    assert set(second.values()) == {0}
    assert content(target) == content(source)


def test_a_journal_of_an_older_version_is_merged_once_too(new_store: NewStore, tmp_path: Path) -> None:
    source, target = str(tmp_path / "old.sqlite"), new_store()
    with Store(source) as journal:
        fill(journal)
    with sqlite3.connect(source) as db:  # as it was written before runs and batches had names
        db.execute("DROP INDEX run_uid")
        db.execute("DROP INDEX batch_uid")
        db.execute("ALTER TABLE run DROP COLUMN uid")
        db.execute("ALTER TABLE batch DROP COLUMN uid")
        db.execute("ALTER TABLE kernel DROP COLUMN part")
        db.execute("DROP TABLE queue")
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    with Store(target) as into:
        for expected in (10, 0):
            with Store(source) as journal:
                assert merge(journal, into)["timings"] == expected
    assert content(target) == content(source)


def test_a_batch_judged_after_it_was_merged_is_judged_there_too(tmp_path: Path) -> None:
    source, target = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    with Store(source) as journal, Store(target) as into:
        run = journal.begin(HERE, 0, {})
        batch = journal.open_batch(run, kernel(1), 0, 100.0)
        journal.add_timing(batch, config(1), 90.0)
        merge(journal, into)
        assert into.batches(kernel(1))[0].open
        journal.close_batch(batch, 101.0, disturbed=False)
        merge(journal, into)
        (merged_batch,) = into.batches(kernel(1))
        assert not merged_batch.open and not merged_batch.disturbed and merged_batch.default_ns == 101.0


@pytest.mark.parametrize("other", [{"default": 101.0}, {"time": 91.0}, {"turn": 1}, {"m": 2}])
def test_a_batch_with_the_name_of_another_is_reported_and_not_copied(
    new_store: NewStore, tmp_path: Path, capsys: pytest.CaptureFixture, other: dict[str, Any]
) -> None:
    from tilewise.cli.store import merge as merge_command

    def add(where: str, m: int = 1, turn: int = 0, default: float = 100.0, time: float = 90.0) -> None:
        with Store(where) as store:
            run = store.begin(HERE, 0, {}, uid="run")
            store.add_batch(run, kernel(m), turn, default, [(config(1), time)], uid="batch")

    source, target = str(tmp_path / "source.sqlite"), new_store()
    add(source, **other)
    add(target)
    before = content(target)
    with Store(source) as journal, Store(target) as into:
        assert merge(journal, into) == dict.fromkeys(("kernels", "runs", "batches", "timings", "verdicts"), 0) | {
            "conflicts": 1
        }
    assert content(target) == before
    merge_command([source], into=target)
    assert "1 batch was not copied" in " ".join(capsys.readouterr().out.split())


def test_a_second_merge_writes_nothing(new_store: NewStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = str(tmp_path / "journal.sqlite"), new_store()
    with Store(source) as journal, Store(target) as into:
        fill(journal)
        merge(journal, into)
        monkeypatch.setattr(into, "add_timings", lambda *_: pytest.fail("it was there already"))
        monkeypatch.setattr(into, "add_verdict", lambda *_: pytest.fail("it was there already"))
        monkeypatch.setattr(into, "add_finished", lambda *_: pytest.fail("it was there already"))
        assert set(merge(journal, into).values()) == {0}


def test_a_file_takes_over_no_other_machines_measurements(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as a, Store(tmp_path / "b.sqlite") as b:
        fill(a, HERE)
        fill(b, THERE)
        with pytest.raises(ConfigurationError, match=r"one kind of machine.*cpu Test CPU; triton Test GPU"):
            merge(a, b)


def test_machines_of_different_kinds_fill_their_own_parts(database: NewStore, tmp_path: Path) -> None:
    where = database()
    with Store(where) as one, Store(where) as other:
        fill(one, HERE)
        fill(other, THERE, kernels=1)
        assert one.counts()["kernels"] == 2 and other.counts()["kernels"] == 1
        assert one.partitions() == ["cpu Test CPU", "triton Test GPU"]
    with pytest.raises(ConfigurationError, match=r"2 kinds of machine; name one with --machine"), Store(where) as store:
        store.counts()
    with Store(where, partition=THERE.partition) as store, Store(tmp_path / "gpu.sqlite") as copy:
        assert merge(store, copy)["kernels"] == 1
        assert [machine.identity for machine in copy.machines()] == ["Test GPU"]


def test_the_queue_gives_each_kernel_once_and_the_urgent_first(new_store: NewStore) -> None:
    with Store(new_store()) as store:
        run = store.begin(HERE, 0, {})
        assert store.plan([kernel(m) for m in range(3)]) == 3
        assert store.plan([kernel(m) for m in range(4)], why="again") == 1
        assert store.plan([kernel(9)], priority=2.0, why="asked for often") == 1
        claimed_kernels = [store.claim_next(run) for _ in range(5)]
        assert claimed_kernels[0] == kernel(9) and set(claimed_kernels) == {kernel(m) for m in (0, 1, 2, 3, 9)}
        assert store.claim_next(run) is None
        store.finish(run, kernel(9), config(0), 0.1)
        assert [k for k, _ in store.queue()] == [kernel(m) for m in range(4)]
        store.release(kernel(0))
        assert store.claim_next(run) == kernel(0)
        assert store.plan([kernel(9)]) == 0, "it is finished"


def test_many_collectors_never_take_the_same_kernel(database: NewStore) -> None:
    where, count = database(), 60
    with Store(where) as store:
        store.begin(HERE, 0, {})
        store.plan([kernel(m) for m in range(count)])
    claimed_kernels: list[list[Kernel]] = []

    def take() -> None:
        with Store(where) as own:
            run, claim_list = own.begin(HERE, 0, {}), []
            while (claim := own.claim_next(run)) is not None:
                claim_list.append(claim)
            claimed_kernels.append(claim_list)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [claim for claim_list in claimed_kernels for claim in claim_list]
    assert len(everything) == count and len(set(everything)) == count


def _as_another_machine(store: Store, age_s: float) -> None:
    values = {"age": age_s}
    query = f"UPDATE claim SET host = 'elsewhere', run = run + 1000, taken = {store.database.now_sql} - :age"
    store.database.write(lambda transaction: transaction.execute(query, values))


def test_a_claim_without_beats_is_free_after_its_lease(new_store: NewStore) -> None:
    with Store(new_store()) as store:
        run = store.begin(HERE, 0, {})
        store.plan([kernel(1)])
        assert store.claim_next(run) == kernel(1)
        store.claims.stop_renewing(1)
        _as_another_machine(store, 0.0)
        assert store.claim_next(run) is None
        _as_another_machine(store, store.database.lease_s + 1)
        assert store.claim_next(run) == kernel(1)


def test_the_queue_of_an_older_store_gets_its_partition(database: NewStore, tmp_path: Path) -> None:
    from sqlalchemy import create_engine, text

    from tilewise_fleet.postgres import driver_url
    from tilewise_fleet.tables import upgrade

    where = database()
    engine = create_engine(driver_url(where))
    upgrade(engine, "0001")
    with engine.begin() as connection:
        insert = "INSERT INTO kernel (program, problem, part) VALUES ('own', :problem, :part)"
        connection.execute(text(insert), {"problem": kernel(1).problem.key, "part": HERE.partition})
        connection.execute(text("INSERT INTO queue (kernel, priority, why, added) VALUES (1, 0.0, 'planned', 0.0)"))
    engine.dispose()
    with Store(where) as store:
        assert store.claim_next(store.begin(THERE, 0, {})) is None
        assert store.claim_next(store.begin(HERE, 0, {})) == kernel(1)

    with Store(tmp_path / "s.sqlite") as store:
        store.begin(HERE, 0, {})
        store.plan([kernel(1)])
        store.database.write(lambda transaction: transaction.execute("ALTER TABLE queue DROP COLUMN part"))
    with Store(tmp_path / "s.sqlite") as store:
        assert store.claim_next(store.begin(HERE, 0, {})) == kernel(1)


def test_the_next_kernel_is_found_by_an_index_over_the_partition(database: NewStore) -> None:
    with Store(database()) as store:
        store.begin(HERE, 0, {})
        query = claims._NEXT.format(now=store.database.now_sql, skip=store.database.skip_locked_sql)

        def explain(transaction: Any) -> str:
            for method in ("seqscan", "bitmapscan", "sort"):  # what a planner prefers for a table of no rows
                transaction.execute(f"SET LOCAL enable_{method} = off")
            rows = transaction.fetch(f"EXPLAIN {query}", {"part": "cpu", "lease": 1.0})
            return "\n".join(row[0] for row in rows)

        plan = store.database.write(explain)
        assert "queue_order" in plan and "part = 'cpu'" in plan.replace('"', "") and "Sort" not in plan


_ELSEWHERE = [
    pytest.param("pid:[2]", "here 1 pid:[1]", id="another container with this hostname"),
    pytest.param("pid:[1]", "here 2 pid:[1]", id="another machine with this hostname"),
]


@pytest.mark.parametrize(("namespace", "other"), _ELSEWHERE)
def test_a_claim_of_a_process_that_cannot_be_looked_up_is_a_lease(
    new_store: NewStore, monkeypatch: pytest.MonkeyPatch, namespace: str, other: str
) -> None:
    monkeypatch.setattr(claims, "_host_identity", lambda: f"here 1 {namespace}")
    where = new_store()
    with Store(where) as store:
        run = store.begin(HERE, 0, {})
        store.plan([kernel(1)])
        values = {"host": other, "process": 10**9, "run": run + 1}
        claim = f"""INSERT INTO claim (kernel, run, host, process, born, taken)
            SELECT id, :run, :host, :process, '1', {store.database.now_sql} FROM kernel"""
        store.database.write(lambda transaction: transaction.execute(claim, values))
        assert not store.claim(run, kernel(1)) and store.claim_next(run) is None, "its process may live there"
        store.database.write(lambda transaction: transaction.execute("UPDATE claim SET taken = 1.0"))
        assert store.claim_next(run) == kernel(1)


def test_a_process_that_lives_here_keeps_its_claim_beyond_the_lease(new_store: NewStore) -> None:
    with Store(new_store()) as store:
        run = store.begin(HERE, 0, {})
        store.plan([kernel(1)])
        assert store.claim_next(run) == kernel(1)
        store.database.write(lambda transaction: transaction.execute("UPDATE claim SET taken = 1.0"))
        assert store.claim_next(run) is None


def test_after_a_restart_a_file_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_host_identity", lambda: f"here 1 {claims._INITIAL_NAMESPACE}")
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(HERE, 0, {})
        assert store.claim(run, kernel(1))
        monkeypatch.setattr(claims, "_host_identity", lambda: f"here 2 {claims._INITIAL_NAMESPACE}")
        assert store.claim(run, kernel(1))


def test_every_batch_renews_the_claim_in_a_file(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(HERE, 0, {})
        assert store.claim(run, kernel(1))
        store.database.write(lambda transaction: transaction.execute("UPDATE claim SET taken = 1.0"))
        store.open_batch(run, kernel(1), 0, 100.0)
        ((age,),) = store.database.read(f"SELECT {store.database.now_sql} - taken FROM claim")
        assert float(age) < store.database.lease_s


_CLAIMS_AND_SLEEPS = """
import sys, time
from tests.store.test_shared_store import HERE, Store, kernel
store = Store(sys.argv[1])
assert store.claim(store.begin(HERE, 0, {}), kernel(1))
print("claimed", flush=True)
time.sleep(600)
"""


def test_a_live_claim_in_another_pid_namespace_is_not_taken(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    isolated = [str(unshare), "--pid", "--fork", "--mount-proc", "--kill-child"]
    if unshare is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot create a PID namespace")
    where, environment = tmp_path / "s.sqlite", os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*isolated, sys.executable, "-c", _CLAIMS_AND_SLEEPS, str(where)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "claimed\n"
            with Store(where) as store:
                assert not store.claim(store.begin(HERE, 0, {}), kernel(1))
        finally:
            process.kill()


def test_a_beat_renews_what_this_process_holds(database: NewStore) -> None:
    with Store(database()) as store:
        run = store.begin(HERE, 0, {})
        assert store.claim(run, kernel(1))
        store.database.write(lambda transaction: transaction.execute("UPDATE claim SET taken = 1.0"))
        store.claims.renew()
        ((age,),) = store.database.read(f"SELECT {store.database.now_sql} - taken FROM claim")
        assert float(age) < store.database.lease_s


def test_whoever_lost_its_claim_writes_nothing_more(database: NewStore) -> None:
    with Store(database()) as store:
        run = store.begin(HERE, 0, {})
        assert store.claim(run, kernel(1))
        batch = store.open_batch(run, kernel(1), 0, 100.0)
        store.add_timing(batch, config(1), 90.0)
        _as_another_machine(store, 0.0)
        with pytest.raises(LostClaimError, match="taken this kernel over"):
            store.close_batch(batch, 100.0, disturbed=False)
        with pytest.raises(LostClaimError):
            store.finish(run, kernel(1), config(0), 1.0)
        store.release(kernel(1))
        assert store.counts()["timings"] == 0
        assert store.database.read("SELECT host FROM claim") == [("elsewhere",)], "the new holder keeps it"


def test_a_database_that_is_started_again_costs_patience_only(
    cluster: Cluster, database: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewise_fleet.postgres.LOCK_TIMEOUT_S", 600.0)  # a busy machine recovers slowly
    with Store(database()) as store:
        run = store.begin(HERE, 0, {})
        restart = threading.Thread(target=cluster.crash)
        restart.start()
        for number in range(40):
            store.add_batch(run, kernel(1), number, 100.0, [(config(1), 90.0)])
        restart.join()
        store.add_batch(run, kernel(1), 41, 100.0, [(config(1), 90.0)])
        assert store.counts()["timings"] == 41


def test_info_of_an_empty_database_says_that_it_is_empty(database: NewStore, capsys: pytest.CaptureFixture) -> None:
    from tilewise.cli.store import info

    where = database()
    info(where)
    assert "holds no measurements yet" in capsys.readouterr().out
    Store(where, create=False).close()


def test_a_server_that_recovers_is_waited_for_while_a_store_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise_fleet.postgres import PostgresDatabase

    class OperationalError(Exception):
        pass

    store = PostgresDatabase.__new__(PostgresDatabase)
    store.name, store._retry_seconds, store._error = "x", -1.0, OperationalError
    answers = iter(["connection failed: the database system is not yet accepting connections", "starting up", ""])

    def attempt() -> bool:
        if message := next(answers):
            raise OperationalError(message)
        return True

    assert store._retry(attempt)
    answers = iter(["connection refused"])
    with pytest.raises(UnavailableError, match="connection refused"):
        store._retry(attempt)


def test_what_is_no_store_is_refused_with_a_sentence(database: NewStore) -> None:
    with pytest.raises(ConfigurationError, match=r"a file or a postgresql:// URL, not mysql://…@db/x"):
        Store("mysql://me:secret@db/x")
    with pytest.raises(FileFormatError, match="no measurement store at"):
        Store(database(), create=False)
    with pytest.raises(UnavailableError) as error:
        Store("postgresql://me:secret@/x?host=/no/such/folder")
    assert "secret" not in str(error.value)
    where = database()
    with Store(where) as store:
        store.database.write(lambda transaction: transaction.execute("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(FileFormatError, match="newer tilewise"):
        Store(where)


def test_without_the_extra_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(TilewiseError, match=r"pip install (packages/)?tilewise-fleet"):
        Store("postgresql://db/x")


def test_the_command_line_merges_tells_and_exports(new_store: NewStore, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tilewise.cli.store import store as commands

    journal, target, copy = tmp_path / "j.sqlite", new_store(), tmp_path / "copy.sqlite"
    with Store(journal) as journal_store:
        fill(journal_store)

    def run(*words: str) -> Any:
        done = CliRunner().invoke(commands, [*words, "--json"], catch_exceptions=False)
        assert done.exit_code == 0
        return json.loads(done.stdout)

    assert run("merge", str(journal), "--into", target)[str(journal)]["timings"] == 10
    assert run("merge", str(journal), "--into", target)[str(journal)]["timings"] == 0
    assert run("info", target)["machines"]["cpu Test CPU"]["kernels"] == 2
    assert run("export", target, "--out", str(copy), "--machine", "cpu Test CPU")["kernels"] == 2
    assert content(str(copy)) == content(str(journal))
