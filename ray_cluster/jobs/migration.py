"""Brings a job store's schema to this version, from whichever version it has."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

_SCRIPTS = Path(__file__).with_name("migrations")


class MigrationFailed(Exception):
    """The schema is of a version that this program does not know."""


def migrate(connection: sa.Connection) -> None:
    """Run the migrations that a database lacks, in the connection's transaction.

    Raises:
        MigrationFailed: a later version of this program has written the database.
    """
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise MigrationFailed(
            "its schema is of a later version of ray-cluster; run that version, or name another "
            "job store"
        ) from error
