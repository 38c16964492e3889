"""The table of the store's one owner, and that of rows that nobody can read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "006"
down_revision = "005"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "owner",
        # there is one row
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        # JSON text: which dispatcher
        sa.Column("holder", sa.Text, nullable=False),
        # changes with every write of the owner
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("is_released", sa.Boolean, nullable=False),
    )
    op.create_table(
        "damaged_jobs",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("found_s", sa.Double, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        # JSON text: the columns as they were
        sa.Column("row", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("damaged_jobs")
    op.drop_table("owner")
