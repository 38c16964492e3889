"""The table of registered LoRAs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "004"
down_revision = "003"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "loras",
        sa.Column("lora_id", sa.Text, primary_key=True),
        sa.Column("is_removed", sa.Boolean, nullable=False),
        # JSON texts
        sa.Column("lora", sa.Text, nullable=False),
        sa.Column("facts", sa.Text),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("loras")
