"""Who works in which project, the tokens of machines, and what reviewers decided, found at once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "member",
        sa.Column("project", _ID, autoincrement=False, nullable=False),
        sa.Column("person", _ID, autoincrement=False, nullable=False),
        sa.Column("quiz_tries", sa.Integer(), nullable=False),
        sa.Column("passed", sa.BigInteger(), nullable=True),
        sa.Column("paused", sa.BigInteger(), nullable=True),
        sa.Column("gold_seen", sa.Integer(), nullable=False),
        sa.Column("gold_right", sa.Integer(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["person.id"], name="fk_member_person"),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_member_project"),
        sa.PrimaryKeyConstraint("project", "person", name="pk_member"),
    )
    op.create_table(
        "bearer",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("person", _ID, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("revoked", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["person"], ["person.id"], name="fk_bearer_person"),
        sa.PrimaryKeyConstraint("hash", name="pk_bearer"),
    )
    op.create_index("ix_bearer_person", "bearer", ["person"], unique=False)
    decided = sa.text("verdict = 'decided'")
    op.create_index("ix_judgment_decided", "judgment", ["assignment"], sqlite_where=decided, postgresql_where=decided)
