"""Judgments a day, and the items that a reviewer is to look at, kept as they come."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "daily",
        sa.Column("project", _ID, autoincrement=False, nullable=False),
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("judgments", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_daily_project"),
        sa.PrimaryKeyConstraint("project", "day", name="pk_daily"),
    )
    op.create_table(
        "docket",
        sa.Column("item", _ID, autoincrement=False, nullable=False),
        sa.Column("project", _ID, nullable=False),
        sa.Column("is_split", sa.Boolean(), nullable=False),
        sa.Column("spread", sa.Integer(), nullable=False),
        sa.Column("doubted", _ID, nullable=True),
        sa.ForeignKeyConstraint(["item"], ["item.id"], name="fk_docket_item"),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_docket_project"),
        sa.ForeignKeyConstraint(["doubted"], ["person.id"], name="fk_docket_doubted"),
        sa.PrimaryKeyConstraint("item", name="pk_docket"),
    )
    op.create_index("ix_docket_widest", "docket", ["project", "is_split", "spread", "item"])
    fill(op.get_bind())


def fill(connection: sa.Connection) -> None:
    """Both tables from the judgments that there are."""
    connection.execute(sa.text(_DAILY))
    connection.execute(sa.text(_DOCKET))


_DAILY = """
INSERT INTO daily (project, day, judgments)
SELECT assignment.project, judgment.at / 86400000, count(*)
FROM judgment JOIN assignment ON assignment.id = judgment.assignment
WHERE judgment.verdict NOT IN ('undone', 'decided')
GROUP BY assignment.project, judgment.at / 86400000
"""
_DOCKET = """
INSERT INTO docket (item, project, is_split, spread, doubted)
SELECT item.id, item.project, true,
    max(CASE WHEN judgment.verdict = 'skip' THEN -9 ELSE coalesce(judgment.outcome, 0) END)
        - min(CASE WHEN judgment.verdict = 'skip' THEN 9 ELSE coalesce(judgment.outcome, 0) END),
    NULL
FROM item
JOIN assignment ON assignment.item = item.id
JOIN judgment ON judgment.assignment = assignment.id
WHERE NOT item.is_gold AND item.repeats IS NULL AND judgment.verdict <> 'undone'
    AND NOT EXISTS (SELECT 1 FROM judgment AS later WHERE later.supersedes = judgment.seq)
GROUP BY item.id, item.project
HAVING (
        max(CASE WHEN judgment.outcome > 0 THEN 1 ELSE 0 END) + max(CASE WHEN judgment.outcome < 0 THEN 1 ELSE 0 END)
            + max(CASE WHEN judgment.verdict = 'both_bad' THEN 1 ELSE 0 END) > 1
        OR count(DISTINCT judgment.ranking) > 1
    )
    AND max(CASE WHEN judgment.verdict = 'decided' THEN 1 ELSE 0 END) = 0
    AND max(CASE WHEN judgment.verdict = 'skip' AND EXISTS (
        SELECT 1 FROM flag WHERE flag.judgment = judgment.seq AND flag.kind = 'guideline'
    ) THEN 1 ELSE 0 END) = 0
"""
