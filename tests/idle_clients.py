"""Connections that are opened and never finished, held by other processes.

An ordinary account may have 1,024 files open in a process, fewer than a server has to withstand, so each process holds
200 connections.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from tests.waiting import PATIENCE

CONNECTIONS_PER_PROCESS = 200
# Opens connections, every second one with half a request, and holds them until its input ends.
_CLIENT = """
import socket, sys
port, count = map(int, sys.argv[1:])
connections = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(count)]
for connection in connections[::2]:
    connection.sendall(b"POST /choose HTTP/1.1\\r\\nhost: x\\r\\n")
print("open", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def idle_connections(port: int) -> Iterator[None]:
    """Hold 200 unfinished connections to a local server while the block runs."""
    command = [sys.executable, "-c", _CLIENT, str(port), str(CONNECTIONS_PER_PROCESS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None and client.stdout.readline() == "open\n"
            yield
        finally:
            client.communicate("", timeout=PATIENCE)
