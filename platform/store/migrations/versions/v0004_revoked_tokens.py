"""Tokens that are not valid any more are remembered, so that none of them comes back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision: str | None = "0003"


def upgrade() -> None:
    """Add the column; all tokens that are there are valid."""
    with op.batch_alter_table("tokens") as table:
        table.add_column(sa.Column("revoked_at", sa.Float(53), nullable=True))


def downgrade() -> None:
    """Take it away again, with the tokens that are not valid."""
    op.execute("DELETE FROM tokens WHERE revoked_at IS NOT NULL")
    with op.batch_alter_table("tokens") as table:
        table.drop_column("revoked_at")
