"""The first tables. Migrations are frozen: later changes of `kedge.label.tables` come in files of their own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _project_and_guideline_and_person()
    _session_and_invite()
    _text_and_item()
    _answer_and_gold()
    _assignment()
    _judgment_and_flag()
    _chat_and_turn_and_thumb()
    _call_and_export()
    _audit_and_chain()
    heads = sa.table("chain", sa.column("name"), sa.column("seq"), sa.column("hash"))
    op.bulk_insert(heads, [{"name": name, "seq": 0, "hash": "0" * 32} for name in ("audit", "judgment")])


def _project_and_guideline_and_person() -> None:
    op.create_table(
        "project",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("questions", sa.Text(), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(length=64), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_project"),
        sa.UniqueConstraint("name", name="uq_project_name"),
    )
    op.create_table(
        "guideline",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("project", _ID, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_guideline_project"),
        sa.PrimaryKeyConstraint("id", name="pk_guideline"),
        sa.UniqueConstraint("project", "version", name="uq_guideline_project_version"),
    )
    op.create_table(
        "person",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("uid", sa.String(length=32), nullable=False),
        sa.Column("email", sa.String(length=320), nullable=True),
        sa.Column("password", sa.Text(), nullable=True),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("languages", sa.Text(), nullable=False),
        sa.Column("takes_harm", sa.Boolean(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("forgotten", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_person"),
        sa.UniqueConstraint("email", name="uq_person_email"),
        sa.UniqueConstraint("uid", name="uq_person_uid"),
    )


def _session_and_invite() -> None:
    op.create_table(
        "session",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("person", _ID, nullable=False),
        sa.Column("csrf", sa.String(length=64), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("last_seen", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["person.id"], name="fk_session_person"),
        sa.PrimaryKeyConstraint("hash", name="pk_session"),
    )
    op.create_index("ix_session_person", "session", ["person"], unique=False)
    op.create_table(
        "invite",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("project", _ID, nullable=False),
        sa.Column("email", sa.String(length=320), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("expires", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_invite_project"),
        sa.PrimaryKeyConstraint("hash", name="pk_invite"),
    )
    op.create_index("ix_invite_email", "invite", ["email"], unique=False)


def _text_and_item() -> None:
    op.create_table(
        "text",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_text"),
    )
    op.create_table(
        "item",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("project", _ID, nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("prompt", sa.String(length=64), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
        sa.Column("have", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Float(precision=53), nullable=False),
        sa.Column("propensity", sa.Float(precision=53), nullable=True),
        sa.Column("is_gold", sa.Boolean(), nullable=False),
        sa.Column("is_heldout", sa.Boolean(), nullable=False),
        sa.Column("is_harmful", sa.Boolean(), nullable=False),
        sa.Column("language", sa.String(length=40), nullable=True),
        sa.Column("origin", sa.String(length=2000), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_item_project"),
        sa.ForeignKeyConstraint(["prompt"], ["text.hash"], name="fk_item_prompt"),
        sa.PrimaryKeyConstraint("id", name="pk_item"),
        sa.UniqueConstraint("project", "key", name="uq_item_project_key"),
    )
    op.create_index(
        "ix_item_gold",
        "item",
        ["project", "key"],
        unique=False,
        sqlite_where=sa.text("is_gold"),
        postgresql_where=sa.text("is_gold"),
    )
    op.create_index(
        "ix_item_open",
        "item",
        ["project", sa.literal_column("priority DESC"), "id"],
        unique=False,
        sqlite_where=sa.text("have < wanted"),
        postgresql_where=sa.text("have < wanted"),
    )


def _answer_and_gold() -> None:
    op.create_table(
        "answer",
        sa.Column("item", _ID, autoincrement=False, nullable=False),
        sa.Column("place", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("text", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=1000), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("scores", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["item"], ["item.id"], name="fk_answer_item"),
        sa.ForeignKeyConstraint(["text"], ["text.hash"], name="fk_answer_text"),
        sa.PrimaryKeyConstraint("item", "place", name="pk_answer"),
    )
    op.create_table(
        "gold",
        sa.Column("item", _ID, autoincrement=False, nullable=False),
        sa.Column("expected", sa.Text(), nullable=False),
        sa.Column("tolerance", sa.Integer(), nullable=False),
        sa.Column("explanation", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["item"], ["item.id"], name="fk_gold_item"),
        sa.PrimaryKeyConstraint("item", name="pk_gold"),
    )


def _assignment() -> None:
    op.create_table(
        "assignment",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("project", _ID, nullable=False),
        sa.Column("item", _ID, nullable=False),
        sa.Column("person", _ID, nullable=False),
        sa.Column("guideline", _ID, nullable=False),
        sa.Column("order", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("leased_until", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53), nullable=False),
        sa.Column("is_right", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["guideline"], ["guideline.id"], name="fk_assignment_guideline"),
        sa.ForeignKeyConstraint(["item"], ["item.id"], name="fk_assignment_item"),
        sa.ForeignKeyConstraint(["person"], ["person.id"], name="fk_assignment_person"),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_assignment_project"),
        sa.PrimaryKeyConstraint("id", name="pk_assignment"),
        sa.UniqueConstraint("item", "person", name="uq_assignment_item_person"),
    )
    op.create_index(
        "ix_assignment_leased",
        "assignment",
        ["leased_until"],
        unique=False,
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_index(
        "ix_assignment_tally", "assignment", ["project", "person", "state", "is_right", "seconds"], unique=False
    )


def _judgment_and_flag() -> None:
    op.create_table(
        "judgment",
        sa.Column("seq", _ID, autoincrement=False, nullable=False),
        sa.Column("assignment", sa.String(length=32), nullable=False),
        sa.Column("verdict", sa.String(length=10), nullable=False),
        sa.Column("outcome", sa.Integer(), nullable=True),
        sa.Column("ranking", sa.Text(), nullable=True),
        sa.Column("axes", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("edit", sa.String(length=64), nullable=True),
        sa.Column("seconds", sa.Float(precision=53), nullable=False),
        sa.Column("idle_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("guideline", _ID, nullable=False),
        sa.Column("supersedes", _ID, nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["assignment"], ["assignment.id"], name="fk_judgment_assignment"),
        sa.ForeignKeyConstraint(["edit"], ["text.hash"], name="fk_judgment_edit"),
        sa.ForeignKeyConstraint(["guideline"], ["guideline.id"], name="fk_judgment_guideline"),
        sa.ForeignKeyConstraint(["supersedes"], ["judgment.seq"], name="fk_judgment_supersedes"),
        sa.PrimaryKeyConstraint("seq", name="pk_judgment"),
        sa.UniqueConstraint("supersedes", name="uq_judgment_supersedes"),
    )
    op.create_index("ix_judgment_assignment", "judgment", ["assignment"], unique=False)
    op.create_index(
        "uq_judgment_first",
        "judgment",
        ["assignment"],
        unique=True,
        sqlite_where=sa.text("supersedes IS NULL"),
        postgresql_where=sa.text("supersedes IS NULL"),
    )
    op.create_table(
        "flag",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("judgment", _ID, nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("text", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["judgment"], ["judgment.seq"], name="fk_flag_judgment"),
        sa.PrimaryKeyConstraint("id", name="pk_flag"),
    )
    op.create_index("ix_flag_judgment", "flag", ["judgment"], unique=False)


def _chat_and_turn_and_thumb() -> None:
    op.create_table(
        "chat",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("project", _ID, nullable=False),
        sa.Column("person", _ID, nullable=False),
        sa.Column("models", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["person.id"], name="fk_chat_person"),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_chat_project"),
        sa.PrimaryKeyConstraint("id", name="pk_chat"),
    )
    op.create_table(
        "turn",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("chat", _ID, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("text", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=1000), nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["chat"], ["chat.id"], name="fk_turn_chat"),
        sa.ForeignKeyConstraint(["text"], ["text.hash"], name="fk_turn_text"),
        sa.PrimaryKeyConstraint("id", name="pk_turn"),
    )
    op.create_table(
        "thumb",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("turn", _ID, nullable=False),
        sa.Column("person", _ID, nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("edit", sa.String(length=64), nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["edit"], ["text.hash"], name="fk_thumb_edit"),
        sa.ForeignKeyConstraint(["person"], ["person.id"], name="fk_thumb_person"),
        sa.ForeignKeyConstraint(["turn"], ["turn.id"], name="fk_thumb_turn"),
        sa.PrimaryKeyConstraint("id", name="pk_thumb"),
    )


def _call_and_export() -> None:
    op.create_table(
        "call",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("reply", sa.Text(), nullable=True),
        sa.Column("tokens_in", sa.Integer(), nullable=False),
        sa.Column("tokens_out", sa.Integer(), nullable=False),
        sa.Column("usd", sa.Float(precision=53), nullable=False),
        sa.Column("latency", sa.Float(precision=53), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_call"),
    )
    op.create_table(
        "export",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("project", _ID, nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("as_of", sa.BigInteger(), nullable=False),
        sa.Column("filter", sa.Text(), nullable=False),
        sa.Column("who", _ID, nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["project.id"], name="fk_export_project"),
        sa.ForeignKeyConstraint(["who"], ["person.id"], name="fk_export_who"),
        sa.PrimaryKeyConstraint("id", name="pk_export"),
    )
    op.create_index("ix_export_project_as_of", "export", ["project", "as_of"], unique=False)


def _audit_and_chain() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", _ID, autoincrement=False, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("who", _ID, nullable=True),
        sa.Column("action", sa.String(length=40), nullable=False),
        sa.Column("about", sa.Text(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["who"], ["person.id"], name="fk_audit_who"),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
    )
    op.create_table(
        "chain",
        sa.Column("name", sa.String(length=20), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_chain"),
    )
