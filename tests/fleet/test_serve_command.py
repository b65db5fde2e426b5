"""`tilewise fleet serve` as a command: invalid addresses, and an orderly end whenever it is interrupted."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed: pip install tilewise-fleet")

from tests.fleet.served import ServedStore, post
from tests.idle_clients import CONNECTIONS_PER_PROCESS, idle_connections
from tests.waiting import PATIENCE, interruptible
from tilewise.errors import ConfigurationError
from tilewise.store.store import Store
from tilewise.web.connections import MAX_PENDING
from tilewise.web.listening import listen


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1", "a" * 300, "\x00"])
def test_an_address_that_cannot_be_listened_at_is_a_sentence(host: str) -> None:
    with pytest.raises(ConfigurationError, match="nothing can listen on"):
        listen(host, 0)


def test_a_port_that_another_has_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ConfigurationError, match="in use"):
        listen("127.0.0.1", listener.getsockname()[1])


def test_a_mistyped_store_is_refused_and_not_created(tmp_path: Path) -> None:
    from tilewise_fleet.cli.fleet import serve

    with pytest.raises(ConfigurationError, match=r"no store at .*typo\.sqlite"):
        serve(store=str(tmp_path / "typo.sqlite"), host="127.0.0.1", port=0, rate=0.0, open_to_all=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order_from_its_first_moment_on(number: signal.Signals, tmp_path: Path) -> None:
    Store(tmp_path / "s.sqlite").close()
    words = ["fleet", "serve", "--store", str(tmp_path / "s.sqlite"), "--port", "0"]
    command = [sys.executable, "-m", "tilewise.cli.app", *words]
    with interruptible():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert "the service is at" in process.stdout.readline()
        process.send_signal(number)
        try:
            assert process.wait(PATIENCE) == 0 and not process.stderr.read()
        finally:
            process.kill()


def test_half_sent_heads_do_not_keep_others_out(tmp_path: Path) -> None:
    """More connections than the server has room for; everybody else was answered with 503 once."""
    with ServedStore(str(tmp_path / "s.sqlite")) as served, contextlib.ExitStack() as stack:
        for _ in range(MAX_PENDING // CONNECTIONS_PER_PROCESS + 1):
            stack.enter_context(idle_connections(served.port))
        with urlopen(f"{served.url}/health", timeout=PATIENCE) as answer:
            assert answer.status == 200
        problem = {"family": "matmul", "m": 512, "n": 512, "k": 512, "dtype": "fp16"}
        device = {"kind": "triton", "identity": "gpu"}
        assert post(served.port, "/choose", {"device": device, "problem": problem})[0] in (200, 400)
