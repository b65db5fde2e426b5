"""The measurement store's promises: nothing half written, nothing mixed, nothing lost, one sentence when it cannot."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE, until
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.store import claims
from tilewise.store.aggregate import read_measured
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store, Verdict

MACHINE = Machine("triton", "Fake GPU", {"driver": "1"})
_spawn = multiprocessing.get_context("spawn")


def _kernel(rows: int) -> Kernel:
    return Kernel("test", Problem.of("softmax", rows=rows, cols=8, dtype="fp32"))


def _configs(count: int) -> list[Config]:
    return [Config.of(block=i + 1) for i in range(count)]


def _write_forever(path: str, number: int, batches: int) -> None:
    with Store(path) as store:
        run = store.begin(MACHINE, number, {})
        for index in range(batches):
            timings = [(config, 1000.0 + index) for config in _configs(8)]
            store.add_batch(run, _kernel(number), index, 900.0, timings)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(MACHINE, 0, {"rounds": 3})
        assert store.claim(run, _kernel(1))
        store.add_verdicts(run, _kernel(1), [Verdict(_configs(1)[0], "misfit", "too big")])
        store.add_batch(run, _kernel(1), 0, 900.0, [(config, 1.5) for config in _configs(3)])
        store.finish(run, _kernel(1), _configs(1)[0], 0.1)
        assert store.finished() == {_kernel(1).problem.key}
        assert store.verdicts(_kernel(1)) == [(_configs(1)[0], "misfit", "too big")]
        (batch,) = store.batches(_kernel(1))
        assert batch.runtime_ns == {config.key: 1.5 for config in _configs(3)} and not batch.open
        assert store.counts() == {"kernels": 1, "pairs": 3, "timings": 3, "batches": 1, "disturbed": 0}


def test_a_killed_writer_leaves_whole_batches_only(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    writer = _spawn.Process(target=_write_forever, args=(str(path), 1, 100_000))
    writer.start()

    def has_batches() -> bool:
        with contextlib.suppress(sqlite3.Error):
            return path.exists() and sqlite3.connect(path).execute("SELECT count(*) FROM batch").fetchone()[0] > 20
        return False

    until(has_batches, "the twentieth batch")
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    with Store(path) as store:
        counts = store.counts()
        assert counts["batches"] > 20
        assert counts["timings"] == 8 * counts["batches"]
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        store.add_batch(store.begin(MACHINE, 2, {}), _kernel(1), 0, 900.0, [(_configs(1)[0], 1.0)])


def test_several_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    writers = [_spawn.Process(target=_write_forever, args=(str(path), number, 40)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE)
        assert writer.exitcode == 0
    with Store(path) as store:
        assert store.counts()["batches"] == 120
        assert store.counts()["timings"] == 960


def test_a_kernel_claimed_by_a_living_process_is_not_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        run = store.begin(MACHINE, 0, {})
        assert store.claim(run, _kernel(1))
        with sqlite3.connect(path) as db:  # as if another living process held it
            parent = os.getppid()
            born = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
            db.execute("UPDATE claim SET process = ?, born = ?", (parent, born))
        assert not store.claim(run, _kernel(1))
        with sqlite3.connect(path) as db:  # ... and then died
            db.execute("UPDATE claim SET born = 'long ago'")
        assert store.claim(run, _kernel(1))


def test_another_machine_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.begin(MACHINE, 0, {})
        with pytest.raises(ConfigurationError, match=r"measured on Fake GPU .* this is Other GPU"):
            store.begin(Machine("triton", "Other GPU", {}), 0, {})
        store.begin(Machine("triton", "Fake GPU", {"driver": "2"}), 0, {})


def test_a_store_of_another_format_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(FileFormatError, match="format 99"):
        Store(path)


def test_a_foreign_database_or_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    foreign = tmp_path / "f.sqlite"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE t (x)")
    with pytest.raises(FileFormatError, match="not a measurement store"):
        Store(foreign)
    text = tmp_path / "t.sqlite"
    text.write_text("hello " * 1000)
    with pytest.raises(FileFormatError, match="not a readable measurement store"):
        Store(text)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        Store(tmp_path / "no" / "such" / "folder" / "s.sqlite")


def test_a_full_disk_is_one_sentence_and_loses_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        run = store.begin(MACHINE, 0, {})
        store.add_batch(run, _kernel(1), 0, 900.0, [(config, 1.0) for config in _configs(8)])
        pages = store.database.connection.execute("PRAGMA page_count").fetchone()[0]
        store.database.connection.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to be full
        with pytest.raises(TilewiseError, match=r"is full; all finished measurements are saved"):
            for index in range(2000):
                store.add_batch(run, _kernel(1), index, 900.0, [(config, 1.0) for config in _configs(64)])
    with Store(path) as store:
        assert store.counts()["batches"] >= 1
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_copy_taken_while_writing_is_consistent(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(MACHINE, 0, {})
        store.add_batch(run, _kernel(1), 0, 900.0, [(config, 1.0) for config in _configs(8)])
        store.snapshot(tmp_path / "copy.sqlite")
    with Store(tmp_path / "copy.sqlite") as copy:
        assert copy.counts()["timings"] == 8


def _open_at_once(path: str, start: Any) -> None:
    start.wait()
    with Store(path) as store:
        store.counts()


def test_several_processes_may_make_one_store_at_the_same_moment(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(10):
        start = context.Event()
        path = str(tmp_path / f"{number}.sqlite")
        processes = [context.Process(target=_open_at_once, args=(path, start)) for _ in range(4)]
        for process in processes:
            process.start()
        start.set()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0, 0, 0]


@pytest.mark.parametrize(("kind", "runtime_ns"), [("triton", 120.0), ("cpu", 111.25)])
def test_a_cpus_runtime_is_the_faster_two_of_every_three_and_a_gpus_the_median(
    kind: str, runtime_ns: float, tmp_path: Path
) -> None:
    kernel, default, other = Kernel("own", Problem.of("matmul", m=1)), Config.of(a=1), Config.of(a=2)
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(Machine(kind, "here", {"name": "here"}), 0, {})
        for number, runtime in enumerate((150.0, 100.0, 130.0, 110.0)):
            store.add_batch(run, kernel, number, 200.0, [(other, runtime)])
        store.finish(run, kernel, default, 1.0)
        timings = {timing.config: timing.runtime_ns for timing in read_measured(store)[0].timings}
    assert timings == {default: 200.0, other: runtime_ns}


@pytest.mark.parametrize("content", [b"", b"\n", b"a note of my own"])
def test_a_scrap_of_a_file_is_not_taken_for_a_store_and_stays_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="not a measurement store"):
        Store(path, create=False)
    if content:  # an empty file may become one, as `mktemp` makes them
        with pytest.raises(FileFormatError, match="not a measurement store"):
            Store(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("hidden", [True, False], ids=["/proc hides it", "/proc shows it"])
def test_a_living_process_keeps_its_claim_where_proc_hides_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(MACHINE, 0, {})
        assert store.claim(run, _kernel(1))
        other, real = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE), claims._start_time
        born = real(other.pid)
        store.database.write(
            lambda transaction: transaction.execute(
                "UPDATE claim SET process = :process, born = :born", {"process": other.pid, "born": born}
            )
        )
        if hidden:
            monkeypatch.setattr(claims, "_start_time", lambda process: "" if process == other.pid else real(process))
        assert not store.claim(run, _kernel(1))
        other.communicate()
        assert store.claim(run, _kernel(1))


def test_a_finished_kernel_is_claimed_only_again(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(MACHINE, 0, {})
        assert store.claim(run, _kernel(1)) and store.claim(run, _kernel(1)), "it has the kernel already"
        store.finish(run, _kernel(1), _configs(1)[0], 0.1)
        assert not store.claim(run, _kernel(1))
        assert store.claim(run, _kernel(1), again=True)


def test_the_queue_gives_kernels_by_priority_each_once(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(MACHINE, 0, {})
        assert store.plan([_kernel(1), _kernel(2)]) == 2
        assert store.plan([_kernel(3)], priority=-0.5, why="popular") == 1
        assert store.plan([_kernel(2), _kernel(4)], priority=1.0) == 1, "queued already"
        order = [kernel.problem["rows"] for kernel, _ in store.queue()]
        assert order == [4, 1, 2, 3] and store.queue_length() == 4
        store.postpone(_kernel(4))
        store.dequeue(_kernel(1))
        claimed = [store.claim_next(run) for _ in range(4)]
        assert [kernel and kernel.problem["rows"] for kernel in claimed] == [2, 3, 4, None]
        store.finish(run, _kernel(2), _configs(1)[0], 0.1)
        assert store.queue_length() == 2 and store.plan([_kernel(2)]) == 0, "finished"


def test_an_open_batch_is_disturbed_until_it_is_closed(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(MACHINE, 0, {})
        number = store.open_batch(run, _kernel(1), 2, 900.0)
        store.add_timing(number, _configs(1)[0], 5.0)
        (batch,) = store.batches(_kernel(1))
        assert batch.open and batch.disturbed and batch.round == 2
        store.close_batch(number, 800.0, disturbed=False)
        (batch,) = store.batches(_kernel(1))
        assert not batch.open and not batch.disturbed and batch.default_ns == 800.0


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ("UPDATE timing SET runtime_ps = 0", "an impossible time"),
        ("UPDATE timing SET runtime_ps = -5", "an impossible time"),
        ("UPDATE timing SET runtime_ps = 'x'", "an impossible time"),
        ("UPDATE batch SET default_ns = 0", "an impossible time"),
        ("UPDATE batch SET round = 1.5", "an impossible time"),
        ("UPDATE batch SET taken = 'x'", "an impossible time"),
        ("UPDATE config SET key = '[1]'", "a row that is not a table"),
        ("UPDATE config SET key = '{\"block\": 1.5}'", "values that are not integers"),
        (f"UPDATE config SET key = '{{\"block\": {2**53}}}'", "values that are not integers"),
        ("UPDATE config SET key = X'00'", "a configuration that is not a text"),
    ],
)
def test_damaged_rows_are_a_sentence_each(tmp_path: Path, edit: str, sentence: str) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        run = store.begin(MACHINE, 0, {})
        store.add_batch(run, _kernel(1), 0, 900.0, [(_configs(1)[0], 1.5)])
    connection = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute(edit)
    connection.close()
    with Store(tmp_path / "s.sqlite") as store, pytest.raises(FileFormatError, match=sentence):
        for batch in store.batches(_kernel(1)):
            [store.config_of(key) for key in batch.runtime_ns]


@pytest.mark.parametrize("reason", ["database is locked", "database table is busy"])
def test_a_locked_store_is_a_sentence_about_another_process(tmp_path: Path, reason: str) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        error = store.database._to_tilewise_error(sqlite3.OperationalError(reason))  # type: ignore[attr-defined]
        assert isinstance(error, ConfigurationError) and "another process" in str(error)
        for other in ("attempt to write a readonly database", "unable to open database file"):
            error = store.database._to_tilewise_error(sqlite3.OperationalError(other))  # type: ignore[attr-defined]
            assert "cannot be written" in str(error)


def test_a_store_without_machine_and_run_rows_is_a_sentence_or_empty(tmp_path: Path) -> None:
    """Rows that others refer to may be missing in a damaged file; once that was an IndexError."""
    for table in ("machine", "run", "kernel", "config", "batch"):
        path = tmp_path / f"{table}.sqlite"
        with Store(path) as store:
            run = store.begin(MACHINE, 0, {})
            store.plan([_kernel(2)])
            store.add_batch(run, _kernel(1), 0, 900.0, [(config, 1.5) for config in _configs(3)])
            store.finish(run, _kernel(1), _configs(1)[0], 0.1)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(f"DELETE FROM {table}")
        connection.close()
        for reader in (read_measured, Store.counts, Store.queue, Store.partitions, Store.machines, Store.runs):
            with contextlib.suppress(TilewiseError), Store(path) as store:
                reader(store)
