"""The board on the web: an API, pages for teams and teacher, limits on what strangers may send."""

from tilewise_arena.server.app import create_app

__all__ = ["create_app"]
