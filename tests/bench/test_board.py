"""The board: entries stay, once, in order; whatever is altered is noticed; nobody enters in another's name."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")


from tilewise.bench import Rejected, parse_recipe
from tilewise.bench.scoring import Score
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise_arena.board import Board, open_board, verify
from tilewise_arena.board.chain import link_hash
from tilewise_arena.board.tokens import create_token, holder_of, revoke_token


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    with open_board(tmp_path / "board.sqlite") as class_board:
        yield class_board


def made_up_score(speedup: float = 4.0, event: str = "MLP_SPRINT") -> Score:
    """A result as a measurement has it; the board only looks at whether it follows from its own figures."""
    side = {"memory_bytes": 1000, "file_bytes": 800, "accuracy": 0.98, "dtypes": ["float32"]}
    figures = {
        "baseline": side | {"latency_s": {"p50": speedup * 1e-4}},
        "entry": side | {"latency_s": {"p50": 1e-4}, "memory_bytes": 500, "file_bytes": 200},
    }
    score = (speedup * 2 * 4) ** (1 / 3)
    checks = {"checks": ["right"], "accuracy": 0.98, "floor": 0.97}
    return Score(event, score, speedup, 2.0, 4.0, (score * 0.99, score * 1.01), figures, [], checks, {}, [])


def recipe(name: str = "", samples: int | None = None) -> dict[str, Any]:
    """A recipe of this name; another name makes another recipe, since a name alone does not."""
    samples = samples or 1 + zlib.crc32(name.encode()) % 1400
    steps = [{"step": "backend", "name": "native"}, {"step": "quantize", "samples": samples}]
    return parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "name": name, "steps": steps}).as_dict()


def filled(board: Board, count: int = 4) -> list[int]:
    numbers = []
    for i in range(count):
        with board.write() as transaction:
            numbers.append(transaction.submit(f"team {i}", recipe(f"r{i}"))["entry"])
            transaction.result(numbers[-1], "scored", made_up_score(2.0 + i).as_dict())
    return numbers


def test_entries_come_back_best_first_and_the_chain_verifies(board: Board) -> None:
    numbers = filled(board)
    assert [e["id"] for e in board.entries("MLP_SPRINT")] == numbers[::-1]
    verification = verify(board)
    assert verification.good and verification.sealed and verification.entries == 4 and verification.links == 8


def test_a_scored_submission_goes_on_a_local_board(board: Board) -> None:
    receipt = board.add_scored("owls", parse_recipe(recipe()), made_up_score())
    assert board.entry(receipt["entry"])["status"] == "scored"  # type: ignore[index]
    assert board.record("MLP_SPRINT", "closed") == receipt["entry"]


def test_a_replayed_submission_is_rejected_and_names_the_first(board: Board) -> None:
    with board.write() as transaction:
        first = transaction.submit("owls", recipe())["entry"]
    with pytest.raises(Rejected, match=f"already, as entry {first}") as raised, board.write() as transaction:
        transaction.submit("owls", recipe())
    assert raised.value.code == "replayed"
    assert len(board.entries()) == 1
    with board.write() as transaction:
        assert transaction.submit("rooks", recipe())["entry"] == 2


def test_entries_are_counted_by_themselves(board: Board) -> None:
    """A class's tokens and every result are links of the ledger too; the first entry is still entry 1."""
    create_token(board, "owls")
    create_token(board, "rooks")
    assert filled(board, 3) == [1, 2, 3]
    assert verify(board).good


def test_a_refused_part_leaves_the_rest_of_a_transaction(board: Board) -> None:
    with board.write() as transaction:
        transaction.submit("owls", recipe())
        with pytest.raises(Rejected), transaction.part():
            transaction.submit("owls", recipe())
        transaction.submit("rooks", recipe())
    assert len(board.entries()) == 2
    assert verify(board).good


def test_invented_results_do_not_get_on_the_board(board: Board) -> None:
    number = filled(board, 1)[0]
    invented = made_up_score().as_dict() | {"score": 1000.0}
    with pytest.raises(Rejected) as raised, board.write() as transaction:
        transaction.result(number, "scored", invented)
    assert raised.value.code == "invented numbers"


def _unguarded(board: Board) -> sqlite3.Connection:
    """The file as somebody with a database tool has it: triggers dropped."""
    assert board.path is not None
    connection = sqlite3.connect(board.path, isolation_level=None)
    for what in ("UPDATE", "DELETE"):
        connection.execute(f"DROP TRIGGER ledger_no_{what}")
    return connection


def test_the_database_itself_refuses_to_change_the_ledger(board: Board) -> None:
    filled(board, 1)
    assert board.path is not None
    connection = sqlite3.connect(board.path)
    for statement in ("UPDATE ledger SET at = 'x'", "DELETE FROM ledger"):
        with pytest.raises(sqlite3.IntegrityError, match="only ever added to"):
            connection.execute(statement)


def test_an_altered_link_is_noticed(board: Board) -> None:
    filled(board)
    _unguarded(board).execute("UPDATE ledger SET body = replace(body, 'team 1', 'team 9') WHERE seq = 3")
    assert "link 3 was altered" in verify(board).faults[0]


def test_links_in_another_order_are_noticed(board: Board) -> None:
    filled(board)
    connection = _unguarded(board)
    for old, new in ((3, 99), (5, 3), (99, 5)):
        connection.execute("UPDATE ledger SET seq = ? WHERE seq = ?", (new, old))
    assert not verify(board).good


def test_a_removed_link_is_noticed(board: Board) -> None:
    filled(board)
    _unguarded(board).execute("DELETE FROM ledger WHERE seq = 4")
    assert "link 4 is missing" in verify(board).faults[0]


def test_a_chain_computed_anew_lacks_the_seal(board: Board) -> None:
    filled(board, 2)
    connection = _unguarded(board)
    previous = "0" * 64
    for seq, at, kind, body in connection.execute("SELECT seq, at, kind, body FROM ledger ORDER BY seq").fetchall():
        body = body.replace("team 1", "team 9")
        digest = link_hash(seq, at, kind, body, previous)
        values = (body, previous, digest, seq)
        connection.execute("UPDATE ledger SET body = ?, previous = ?, hash = ? WHERE seq = ?", values)
        previous = digest
    assert "seal" in verify(board).faults[0]


def test_a_tail_cut_off_is_noticed_by_whoever_kept_a_receipt(board: Board) -> None:
    with board.write() as transaction:
        transaction.submit("owls", recipe())
    with board.write() as transaction:
        receipt = transaction.submit("rooks", recipe())
    connection = _unguarded(board)
    connection.execute("DELETE FROM ledger WHERE seq = 2")
    connection.execute("DELETE FROM entries WHERE id = 2")
    connection.execute("DELETE FROM jobs WHERE entry = 2")
    assert verify(board).good  # the chain itself ends earlier, and is whole
    assert "cut off" in verify(board, receipt["hash"]).faults[0]


def test_a_score_changed_beside_the_ledger_is_noticed(board: Board) -> None:
    numbers = filled(board)
    _unguarded(board).execute("UPDATE entries SET score = 99 WHERE id = ?", (numbers[0],))
    assert f"entry {numbers[0]} shows another score" in verify(board).faults[0]


def test_a_disqualified_entry_stays_with_its_reason_and_loses_its_record(board: Board) -> None:
    number = board.add_scored("owls", parse_recipe(recipe()), made_up_score())["entry"]
    with board.write() as transaction:
        transaction.disqualify(number, "two members in two teams")
    entry = board.entry(number)
    assert entry is not None
    assert (entry["status"], entry["reason"]) == ("disqualified", "two members in two teams")
    assert board.record("MLP_SPRINT", "closed") is None
    assert verify(board).good


def test_a_record_needs_p_below_a_hundredth(board: Board) -> None:
    first, second = filled(board, 2)
    with board.write() as transaction:
        transaction.record(first, 0.0, 1.0, None)
    with pytest.raises(Rejected, match=r"p < 0\.01"), board.write() as transaction:
        transaction.record(second, 0.02, 1.1, first)
    with board.write() as transaction:
        transaction.record(second, 0.001, 1.1, first)
    assert board.record("MLP_SPRINT", "closed") == second
    assert [r["entry"] for r in board.records("MLP_SPRINT", "closed")] == [first, second]
    assert verify(board).good


def test_a_closed_event_takes_no_entries_until_it_is_opened(board: Board) -> None:
    with board.write() as transaction:
        transaction.set_open("MLP_SPRINT", False)
    with pytest.raises(Rejected, match="closed for new entries"), board.write() as transaction:
        transaction.submit("owls", recipe())
    with board.write() as transaction:
        transaction.set_open("MLP_SPRINT", True)
        transaction.submit("owls", recipe())


def test_tokens_are_stored_hashed_and_end_when_revoked(board: Board) -> None:
    token = create_token(board, "owls")
    holder = holder_of(board, token)
    assert holder is not None and holder.team == "owls" and not holder.is_admin
    assert board.path is not None
    stored = "".join(str(row) for row in sqlite3.connect(board.path).iterdump())
    assert token not in stored and token.split("_", 2)[2] not in stored
    assert holder_of(board, token[:-1] + "x") is None
    revoke_token(board, token.split("_")[1])
    assert holder_of(board, token) is None
    with pytest.raises(ConfigurationError, match="could be revoked"):
        revoke_token(board, "nothing")


def test_a_job_is_claimed_once_and_comes_back_when_its_worker_dies(board: Board) -> None:
    with board.write() as transaction:
        number = transaction.submit("owls", recipe())["entry"]
    with board.write() as transaction:
        assert transaction.claim_job("a", 3) == number
    with board.write() as transaction:
        assert transaction.claim_job("b", 3) is None
    for _ in range(2):
        with board.write() as transaction:
            assert transaction.claim_job("b", 3, board.running()) == number
    with board.write() as transaction:
        assert transaction.claim_job("b", 3, board.running()) is None
    assert board.entry(number)["status"] == "noisy"  # type: ignore[index]


def test_files_of_an_entry_come_back(board: Board, tmp_path: Path) -> None:
    steps = [{"step": "weights", "file": "sub/w.safetensors"}]
    content = parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": steps}).as_dict()
    with board.write() as transaction:
        number = transaction.submit("owls", content, {"sub/w.safetensors": b"weights"})["entry"]
    folder = tmp_path / "run"
    recipe_read = board.recipe(number, folder)
    assert recipe_read.read_file("sub/w.safetensors").read_bytes() == b"weights"


def test_a_board_that_is_no_board_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(UnavailableError, match="cannot be opened"):
        open_board(tmp_path / "x.sqlite")
    with pytest.raises(UnavailableError, match="no board"):
        open_board(tmp_path / "none.sqlite", create=False)
    with pytest.raises(ConfigurationError, match="postgresql"):
        open_board("mysql://u:secret@host/db")


def test_a_missing_database_driver_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_libpq(*_: object, **__: object) -> None:
        raise ImportError("no pq wrapper available.\nAttempts made: ...")

    monkeypatch.setattr("tilewise_arena.board.schema.create_engine", without_libpq)
    with pytest.raises(UnavailableError, match="driver"):
        open_board("postgresql://nobody@localhost/none")
    try:
        open_board("mysql://u:secret@host/db")
    except ConfigurationError as error:
        assert "secret" not in str(error)


def test_the_ledger_holds_what_was_submitted_as_canonical_json(board: Board) -> None:
    filled(board, 1)
    link = next(board.links())
    assert json.loads(link.body)["recipe"] == recipe("r0")
