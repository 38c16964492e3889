"""What cascades have decided over the images of open jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "003"
down_revision = "002"


def upgrade() -> None:
    """Add the column; jobs of before have none."""
    # JSON text
    op.add_column("jobs", sa.Column("deferred", sa.Text))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("jobs", "deferred")
