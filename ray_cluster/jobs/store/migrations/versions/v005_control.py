"""The table of what the controller has saved: its plan, its memory, its history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "005"
down_revision = "004"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "control",
        sa.Column("name", sa.Text, primary_key=True),
        # JSON text
        sa.Column("document", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("control")
