"""A table for when waiting jobs are expected to run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    """Create it."""
    op.create_table(
        "forecasts",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_forecasts")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("forecasts")
