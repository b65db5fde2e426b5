"""Alembic's way in: it is handed a connection with a transaction, and nothing is configured in files."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], target_metadata=None)
with context.begin_transaction():
    context.run_migrations()
