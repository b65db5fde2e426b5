"""What the commands that serve share: the server's library, and a socket to listen on."""

from __future__ import annotations

import errno
import gc
import socket
from typing import Any

from tilewise.errors import ConfigurationError, UnavailableError


def require_uvicorn() -> Any:
    try:
        import uvicorn
    except ImportError:
        raise UnavailableError("a server needs uvicorn: pip install tilewise-arena, or tilewise-fleet") from None
    return uvicorn


def listen(host: str, port: int) -> socket.socket:
    """A socket on this address, or a sentence that says why there is none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
        # inherited by what is accepted; asyncio does not see that these are TCP, and an answer's body would wait 40 ms
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, UnicodeError) as error:
        why = (getattr(error, "strerror", None) or "that is no address").partition(" (while")[0]  # where, once more
        hint = "; --port 0 takes a free one" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        raise ConfigurationError(f"nothing can listen on {host[:80]}, port {port}: {why}{hint}") from None


def shown_address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def settle() -> None:
    """What was imported stays: looking through all of it again would hold up everybody for 0.2 s."""
    gc.collect()
    gc.freeze()
