"""The table of what each pool's workers were last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "002"
down_revision = "001"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "workers",
        sa.Column("pool", sa.Text, primary_key=True),
        sa.Column("registered_s", sa.Double, nullable=False),
        # JSON text
        sa.Column("registration", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("workers")
