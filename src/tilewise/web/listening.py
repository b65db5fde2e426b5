"""Helpers for commands that start a server: the import of uvicorn, and a listening socket."""

from __future__ import annotations

import errno
import gc
import socket
from typing import Any

from tilewise.errors import ConfigurationError, UnavailableError


def require_uvicorn() -> Any:
    """Import and return uvicorn, or raise an error that says how to install it."""
    try:
        import uvicorn
    except ImportError:
        raise UnavailableError("a server needs uvicorn: pip install uvicorn") from None
    return uvicorn


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket for an address; raise an error that says why it is impossible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
        # Accepted connections inherit this option. asyncio sets it only on sockets that it knows to be TCP; without it,
        # the body of a response waits 40 ms for a delayed acknowledgement (Nagle's algorithm).
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, UnicodeError) as error:
        why = (getattr(error, "strerror", None) or "this is not an address").partition(" (while")[0]
        hint = "; --port 0 takes a free one" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        raise ConfigurationError(f"nothing can listen on {host[:80]}, port {port}: {why}{hint}") from None


def format_address(listening: socket.socket) -> str:
    """Return a listening socket's host and port as in a URL."""
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def freeze_imports() -> None:
    """Exclude all current objects from garbage collection: traversing the imported modules would take 0.2 s."""
    gc.collect()
    gc.freeze()
