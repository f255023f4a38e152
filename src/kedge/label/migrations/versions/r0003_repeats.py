"""Items that somebody is asked again, and how long an item is to read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("item", sa.Column("words", sa.Integer(), nullable=True))
    if op.get_bind().dialect.name == "sqlite":
        # SQLite adds a constraint only together with its column, and without a name.
        op.execute("ALTER TABLE item ADD COLUMN repeats INTEGER REFERENCES item (id)")
    else:
        op.add_column("item", sa.Column("repeats", sa.BigInteger(), nullable=True))
        op.create_foreign_key("fk_item_repeats", "item", "item", ["repeats"], ["id"])
    where = sa.text("repeats IS NOT NULL")
    op.create_index("ix_item_repeats", "item", ["repeats"], sqlite_where=where, postgresql_where=where)
    op.create_index("ix_item_tally", "item", ["project", "is_gold", "repeats", "wanted"])
