"""The jobs table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "001"
down_revision = None


def upgrade() -> None:
    """Make the table and its indexes."""
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("client", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("body_digest", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("slo_s", sa.Double, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("finished_s", sa.Double),
        sa.Column("attempts", sa.Integer, nullable=False),
        # JSON texts: read and written whole
        sa.Column("requests", sa.Text, nullable=False),
        sa.Column("images", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
    )
    op.create_index("jobs_by_key", "jobs", ["client", "idempotency_key"], unique=True)
    op.create_index("jobs_by_client", "jobs", ["client", "created_s", "job_id"])
    op.create_index("jobs_by_state", "jobs", ["state"])
    op.create_index("jobs_by_end", "jobs", ["finished_s"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("jobs")
