"""What nodes say of themselves when they are checked; the GPU of a paused job; what a job continues; events by time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    """Add the columns; nodes that are there already are checked again."""
    with op.batch_alter_table("nodes") as table:
        table.add_column(sa.Column("problem", sa.Text(), nullable=False, server_default=""))
        table.add_column(sa.Column("checked", sa.JSON(), nullable=False, server_default="{}"))
        table.add_column(sa.Column("devices", sa.JSON(), nullable=False, server_default="[]"))
    with op.batch_alter_table("jobs") as table:
        table.add_column(sa.Column("last_gpu", sa.String(length=100), nullable=True))
        table.add_column(sa.Column("continues", sa.String(length=40), nullable=True))
    op.create_index(op.f("ix_events_time"), "events", ["time"], unique=False)


def downgrade() -> None:
    """Take them away again."""
    op.drop_index(op.f("ix_events_time"), table_name="events")
    with op.batch_alter_table("jobs") as table:
        for name in ("continues", "last_gpu"):
            table.drop_column(name)
    with op.batch_alter_table("nodes") as table:
        for name in ("devices", "checked", "problem"):
            table.drop_column(name)
