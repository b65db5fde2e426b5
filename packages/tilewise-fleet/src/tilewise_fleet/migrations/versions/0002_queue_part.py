"""A queue row knows its partition, so that an index finds the next kernel of one kind of machine."""

from __future__ import annotations

from alembic import op

revision, down_revision, branch_labels, depends_on = "0002", "0001", None, None
_UPGRADE = (
    "ALTER TABLE queue ADD COLUMN part TEXT NOT NULL DEFAULT ''",
    "UPDATE queue SET part = kernel.part FROM kernel WHERE kernel.id = queue.kernel",
    "DROP INDEX queue_order",
    "CREATE INDEX queue_order ON queue (part, priority DESC, id)",
)
_DOWNGRADE = (
    "DROP INDEX queue_order",
    "CREATE INDEX queue_order ON queue (priority DESC, id)",
    "ALTER TABLE queue DROP COLUMN part",
)


def upgrade() -> None:
    for statement in _UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in _DOWNGRADE:
        op.execute(statement)
