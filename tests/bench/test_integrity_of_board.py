"""What a teacher says stays said, what the ledger covers cannot be changed beside it, and no clock decides anything."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from tests.bench.test_board import filled, made_up_score, recipe
from tilewise.bench import Rejected, Settings, parse_recipe
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.web.tokens import public_name
from tilewise_arena.board import Board, open_board, verify
from tilewise_arena.board.backup import back_up, backup_lines, restore
from tilewise_arena.board.chain import board_key
from tilewise_arena.board.grades import grades_csv
from tilewise_arena.board.sessions import open_session, session_holder
from tilewise_arena.board.tokens import create_token
from tilewise_arena.cli.teaching import backup, grades
from tilewise_arena.worker import Watch, run_one


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return open_board(tmp_path / "board.sqlite")


def _unguarded(board: Board) -> sqlite3.Connection:
    return sqlite3.connect(str(board.path), isolation_level=None)


def _status(board: Board, number: int) -> str:
    entry = board.entry(number)
    assert entry is not None
    return str(entry["status"])


def test_an_entry_disqualified_while_it_runs_is_neither_scored_nor_graded_nor_a_record(board: Board) -> None:
    with board.write() as transaction:
        number = transaction.submit("owls", recipe())["entry"]
        assert transaction.claim_job("worker", 3) == number
    with board.write() as transaction:
        transaction.disqualify(number, "two members in two teams")
    with board.write() as transaction:
        assert not transaction.holds("worker", number)
        transaction.result(number, "scored", made_up_score().as_dict())
    assert _status(board, number) == "disqualified"
    assert "owls" not in grades_csv(board)
    with pytest.raises(Rejected, match="disqualified"), board.write() as transaction:
        transaction.record(number, 0.0, 1.0, None)
    assert board.waiting() == 0 and verify(board).good


def test_a_worker_leaves_a_disqualified_entry_alone(board: Board, quick: Settings) -> None:
    with board.write() as transaction:
        number = transaction.submit("owls", recipe())["entry"]
        transaction.disqualify(number, "two members in two teams")
    assert run_one(board, quick) is None


def test_a_rerun_does_not_lift_a_disqualification_but_the_teacher_can(board: Board) -> None:
    number = filled(board, 1)[0]
    with board.write() as transaction:
        transaction.disqualify(number, "two members in two teams", "teacher1")
    with pytest.raises(ConfigurationError, match="lift the disqualification first"), board.write() as transaction:
        transaction.requeue(number)
    with board.write() as transaction:
        transaction.reinstate(number, "teacher1")
    assert (_status(board, number), board.waiting()) == ("queued", 1)
    assert verify(board).good


def test_the_ledger_says_which_teacher_did_it(board: Board) -> None:
    number = filled(board, 1)[0]
    with board.write() as transaction:
        transaction.set_open("MLP_SPRINT", False, "ada")
        transaction.requeue(number, "ada")
        transaction.disqualify(number, "because it is", "grace")
        transaction.reinstate(number, "ada")
    create_token(board, "owls", by="grace")
    bodies = [link.body for link in board.links() if '"by"' in link.body]
    assert [body.count('"ada"') for body in bodies] == [1, 1, 0, 1, 0] and len(bodies) == 5
    assert verify(board).good


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE tokens SET role = 'admin'", "another role"),
        ("UPDATE tokens SET team = 'rooks'", "another team"),
        ("UPDATE tokens SET hash = 'x'", "another hash"),
        ("UPDATE tokens SET revoked_at = '2020'", "another revoked"),
        ("DELETE FROM tokens", "not on the board"),
        ("INSERT INTO tokens VALUES ('aa', 'bb', 'owls', 'admin', '2020', NULL)", "not in the ledger"),
        ("UPDATE jobs SET state = 'done'", "should wait for its run"),
        ("UPDATE jobs SET state = 'queued' WHERE entry = 1", "does not say why"),
        ("UPDATE files SET content = 'other'", "does not give its hash"),
        ("DELETE FROM files", "is missing"),
        ("UPDATE tokens SET created_at = '2020'", "another created_at"),
        ("UPDATE jobs SET attempts = 99", "attempts or its place in the queue"),
        ("UPDATE jobs SET attempts = attempts - 1", "attempts or its place in the queue"),
        ("UPDATE jobs SET turn = 99", "attempts or its place in the queue"),
        ("UPDATE jobs SET attempts = 99, seal = ''", "attempts or its place in the queue"),
        ("UPDATE jobs SET entry = entry + 100", "should wait for its run"),
        ("INSERT INTO jobs VALUES (77, 'queued', 0, '', 0, 0, '')", "does not say why"),
        ("UPDATE sessions SET until = until + 1e6", "session of token"),
        ("UPDATE sessions SET token = 'other'", "session of token"),
        ("INSERT INTO sessions VALUES ('aa', 'bb', 9e9, '')", "session of token"),
        ("CREATE TRIGGER mine AFTER INSERT ON entries BEGIN UPDATE entries SET score = 99; END", "trigger"),
        ("CREATE TRIGGER mine AFTER UPDATE ON jobs BEGIN UPDATE entries SET team = 'rooks'; END", "trigger"),
        ("CREATE VIEW best AS SELECT * FROM entries", "trigger, view, rule or index"),
        ("UPDATE events SET open = 1", "open or closed"),
        ("DELETE FROM events", "open or closed"),
        ("INSERT INTO events VALUES ('CNN_MARATHON', 0)", "open or closed"),
        ("DELETE FROM entries", "not on the board"),
        ("UPDATE entries SET score = score + 0.001 WHERE id = 1", "another score"),
        ("UPDATE jobs SET beat = 'other'", "attempts or its place in the queue"),
        ("CREATE UNIQUE INDEX once ON entries (team)", "that no board has"),
        ("CREATE INDEX mine ON entries (json(name)) WHERE team = 'rooks'", "that no board has"),
        ("ALTER TABLE entries ADD COLUMN extra INTEGER CHECK (team != 'rooks')", "that no board has"),
    ],
)
def test_verify_notices_what_is_changed_beside_the_ledger(board: Board, statement: str, sentence: str) -> None:
    filled(board, 1)
    create_token(board, "owls")
    steps = [{"step": "weights", "file": "w"}]
    with board.write() as transaction:
        content = parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": steps}).as_dict()
        transaction.submit("owls", content, {"w": b"weights"})
        transaction.set_open("TILE_OLYMPIAD", False)
    with board.write() as transaction:
        assert transaction.claim_job("worker", 3) is not None
    open_session(board, "teacher1", 60.0)
    assert verify(board).good
    connection = _unguarded(board)
    connection.execute(statement)
    assert sentence in " ".join(verify(board).faults)


def test_a_session_that_was_prolonged_or_given_to_another_opens_nothing(board: Board) -> None:
    names = {team: public_name(create_token(board, team, admin=True)) for team in ("ada", "grace")}
    for edit in ("UPDATE sessions SET until = until + 1e6", f"UPDATE sessions SET token = '{names['grace']}'"):
        cookie = open_session(board, names["ada"], 60.0)
        holder = session_holder(board, cookie)
        assert holder is not None and holder.team == "ada"
        _unguarded(board).execute(edit)
        assert session_holder(board, cookie) is None
        _unguarded(board).execute("DELETE FROM sessions")


def test_a_refused_backup_leaves_nothing_behind(board: Board, tmp_path: Path) -> None:
    """A student's token as the teacher's: the ledger says otherwise, and once the refused board stayed in place."""
    filled(board, 1)
    create_token(board, "owls")
    back_up(board, tmp_path / "b.jsonl")
    text = (tmp_path / "b.jsonl").read_text()
    for old, new in (('"role": "team"', '"role": "admin"'), ('"attempts": 0', '"attempts": 99')):
        assert old in text
        (tmp_path / "altered.jsonl").write_text(text.replace(old, new))
        with pytest.raises(Rejected, match="does not hold a whole board"):
            restore(tmp_path / "altered.jsonl", tmp_path / "new.sqlite")
        assert not list(tmp_path.glob("new.sqlite*"))
    assert restore(tmp_path / "b.jsonl", tmp_path / "new.sqlite") > 0


def test_nothing_is_written_over_without_force(board: Board, tmp_path: Path) -> None:
    filled(board, 1)
    path = tmp_path / "precious.txt"
    for command in (lambda force: backup(path, str(board.path), force=force),
                    lambda force: grades(str(board.path), path, force=force)):  # fmt: skip
        path.write_text("precious")
        with pytest.raises(ConfigurationError, match="--force"):
            command(False)
        assert path.read_text() == "precious"
        command(True)
        assert path.read_text() != "precious"


def test_a_lost_key_is_not_replaced_in_silence(board: Board) -> None:
    filled(board, 1)
    board.key_path.unlink()
    assert board.path is not None
    with pytest.raises(UnavailableError, match="key is missing"):
        open_board(board.path)
    assert not board.key_path.exists()


@pytest.mark.parametrize("stored", ["", "\n", "ab" * 31])
def test_a_key_that_was_cut_short_is_refused(stored: str, tmp_path: Path) -> None:
    """With an empty key, anybody could seal links; a full disk or a crash could have left one."""
    (tmp_path / "b.key").write_text(stored)
    with pytest.raises(UnavailableError, match="cut short"):
        open_board(tmp_path / "b.sqlite", key=tmp_path / "b.key")


def test_the_file_of_a_key_appears_whole_and_never_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "b.key", os.link
    first: list[bytes | None] = []

    def link(source: Path, target: Path) -> None:
        assert not target.exists() and len(bytes.fromhex(source.read_text())) == 32
        monkeypatch.setattr(os, "link", real)
        first.append(board_key(path, create=True))  # another process is faster
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    assert board_key(path, create=True) == first[0] == board_key(path, create=False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_backup_with_its_key_can_never_be_read_by_others(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    real = Path.replace

    def replace(source: Path, target: Path) -> Path:
        modes.append(source.stat().st_mode & 0o777)
        return real(source, target)

    monkeypatch.setattr(Path, "replace", replace)
    back_up(board, tmp_path / "backup.jsonl")
    restore(tmp_path / "backup.jsonl", tmp_path / "again.sqlite")
    assert modes and set(modes) == {0o600}


def test_a_second_key_adds_nothing_to_a_board(board: Board, tmp_path: Path) -> None:
    assert board.path is not None
    other = open_board(board.path, key=tmp_path / "other.key")  # both opened while the board was empty
    filled(board, 1)
    with pytest.raises(UnavailableError, match="not the one that sealed"), other.write() as transaction:
        transaction.submit("rooks", recipe())
    assert verify(board).good


def test_a_teachers_backup_is_restored_with_the_key_or_sealed_anew(board: Board, tmp_path: Path) -> None:
    filled(board)
    create_token(board, "owls")
    page = tmp_path / "page.jsonl"
    page.write_text("".join(f"{line}\n" for line in backup_lines(board)))
    with pytest.raises(ConfigurationError, match="holds no key"):
        restore(page, tmp_path / "a.sqlite")
    wrong = tmp_path / "wrong.key"
    wrong.write_text("00" * 32)
    with pytest.raises(Rejected, match="seal"):
        restore(page, tmp_path / "b.sqlite", wrong)
    restore(page, tmp_path / "c.sqlite", board.key_path)
    restore(page, tmp_path / "d.sqlite", new_key=True)
    for name, key in (("c.sqlite", board.key_path), ("d.sqlite", None)):
        with open_board(tmp_path / name, create=False, key=key) as again:
            verdict = verify(again)
            assert verdict.good and verdict.sealed, verdict.faults
            assert len(again.entries()) == 4


def test_a_backup_with_a_changed_file_is_not_restored_as_whole(board: Board, tmp_path: Path) -> None:
    steps = [{"step": "weights", "file": "w"}]
    content = parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": steps}).as_dict()
    with board.write() as transaction:
        transaction.submit("owls", content, {"w": b"weights"})
    back_up(board, tmp_path / "b.jsonl")
    text = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(text.replace("d2VpZ2h0cw==", "e2VpZ2h0cw=="))
    with pytest.raises(Rejected, match="altered"):
        restore(tmp_path / "b.jsonl", tmp_path / "new.sqlite")


# --- leases ---


def test_a_job_is_abandoned_when_its_beat_stands_still_by_a_steady_clock() -> None:
    now = [0.0]
    watch = Watch(60.0, lambda: now[0])
    assert watch.abandoned({7: 1, 8: 1}) == {}
    now[0] = 59.0
    assert watch.abandoned({7: 1, 8: 2}) == {}
    now[0] = 61.0
    assert watch.abandoned({7: 1, 8: 3}) == {7: 1}
    assert watch.abandoned({8: 3}) == {}


def test_clock_jumps_take_no_entry_from_its_worker(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with board.write() as transaction:
        number = transaction.submit("owls", recipe())["entry"]
        assert transaction.claim_job("alive", 3) == number
    watch, real = Watch(), time.time
    for days in (1, 400, -400):
        monkeypatch.setattr(time, "time", lambda days=days: real() + days * 86400)
        with board.write() as transaction:
            assert transaction.claim_job("other", 3, watch.abandoned(board.running())) is None
    with board.write() as transaction:
        assert transaction.holds("alive", number)


def test_a_beat_between_look_and_claim_keeps_the_job(board: Board) -> None:
    with board.write() as transaction:
        number = transaction.submit("owls", recipe())["entry"]
        transaction.claim_job("slow", 3)
    running = board.running()
    with board.write() as transaction:
        transaction.beat("slow")
    with board.write() as transaction:
        assert transaction.claim_job("other", 3, running) is None
        assert transaction.holds("slow", number)


def test_an_attempt_broken_off_in_good_order_does_not_count(board: Board) -> None:
    with board.write() as transaction:
        number = transaction.submit("owls", recipe())["entry"]
    for _ in range(5):
        with board.write() as transaction:
            assert transaction.claim_job("w", 2) == number
            transaction.release("w", counts=False)
    assert _status(board, number) == "queued"


def test_a_team_with_many_entries_does_not_hold_up_the_others(board: Board) -> None:
    with board.write() as transaction:
        many = [transaction.submit("owls", recipe(f"o{i}"))["entry"] for i in range(5)]
        late = [transaction.submit(team, recipe(team))["entry"] for team in ("rooks", "crows")]
    jobs = []
    for _ in range(5):
        with board.write() as transaction:
            jobs.append(transaction.claim_job("w", 3))
            transaction.result(jobs[-1], "scored", made_up_score().as_dict())
    assert jobs == [many[0], *late, many[1], many[2]]
    with board.write() as transaction:
        again = transaction.submit("crows", recipe("again"))["entry"]
        assert transaction.claim_job("w", 3) == again
