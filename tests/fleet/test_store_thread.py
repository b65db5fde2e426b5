"""The thread of the store: it waits for a database server that starts late, and reports other errors at once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.store.store import Store
from tilewise_fleet.service import store_thread
from tilewise_fleet.service.store_thread import StoreThread

URL = "postgresql://tilewise@database/measurements"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_thread, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(store_thread, "_OPEN_SECONDS", 0.2)


def test_it_waits_for_a_database_server_that_starts_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts: list[str] = []

    def open_late(where: str) -> Store:
        attempts.append(where)
        if len(attempts) < 3:
            raise UnavailableError("The store is not available: connection refused.")
        return Store(tmp_path / "s.sqlite")

    monkeypatch.setattr(store_thread, "Store", open_late)
    thread = StoreThread(URL)
    assert thread.submit(lambda store: store.queue_length()).result(10) == 0
    thread.close()
    assert attempts == [URL] * 3
    assert "connection refused. Trying again in 0.01 s." in capsys.readouterr().err


def test_it_gives_up_after_a_while_and_at_once_if_access_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []

    def never(where: str) -> Store:
        attempts.append(where)
        raise UnavailableError("The store is not available: connection refused.")

    def refuse(where: str) -> Store:
        attempts.append(where)
        raise ConfigurationError("The store refuses access: password authentication failed.")

    monkeypatch.setattr(store_thread, "Store", never)
    with pytest.raises(UnavailableError, match="connection refused"):
        StoreThread(URL)
    assert 2 < len(attempts) < 30
    attempts.clear()
    monkeypatch.setattr(store_thread, "Store", refuse)
    with pytest.raises(ConfigurationError, match="refuses access"):
        StoreThread(URL)
    assert len(attempts) == 1
