"""`kedge label serve`, `token` and `invite`: what is refused before anything is served, and what is printed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.label.accounts import (
    accept_invite,
    check_password,
    find_bearer,
    find_person,
    find_session,
    make_invite,
    open_session,
)
from kedge.label.database import open_store
from kedge.label.projects import find_project
from kedge.label.team.members import projects_of


@pytest.fixture
def shop(kedge: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "guide.md").write_text("Prefer what is true.\n\n## Quiz\nWhich?\n- [x] the true one\n- [ ] none\n")
    new = (
        "label",
        "new",
        "shop",
        "--questions",
        "pair",
        "--guideline",
        "guide.md",
        "--pay",
        "14.5",
        "--currency",
        "EUR",
    )
    assert kedge(*new, "--practice", "3").code == 0
    return lambda *arguments: kedge("label", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--team", "--url", "https://labels.example.org"), "need TLS"),
        (("--team", "--behind-proxy", "10.0.0.1"), "the public address is needed"),
        (("--team", "--url", "http://x", "--behind-proxy", "10.0.0.1"), "https://HOST"),
        (("--team", "--url", "https://x", "--behind-proxy", "0.0.0.0/0"), "trusts everybody"),
        (("--team", "--url", "https://x", "--tls-cert", "no.pem", "--tls-key", "no.pem"), "no such file"),
        (("--url", "https://x"), "add --team"),
        (("--chat", "policy"), "NAME=URL"),
        (("--chat", "policy=http://example.org/v1"), "unencrypted"),
        (("--watch", "nowhere"), "nowhere"),
        (("--board", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused_with_words(shop: Callable[..., Any], arguments: Any, words: str) -> None:
    ended = shop("serve", *arguments)
    assert ended.code == 2
    assert words in ended.err


def test_a_store_that_is_not_there_is_not_served(kedge: Callable[..., Any]) -> None:
    ended = kedge("label", "serve")
    assert ended.code == 2
    assert "no store of labels" in ended.err


def test_tokens_and_links_are_printed_once_and_kept_as_hashes(shop: Callable[..., Any], tmp_path: Path) -> None:
    token = shop("token", "shop", "judge@machines").out.splitlines()[0]
    link = shop("invite", "shop", "ann@example.org", "--url", "https://labels.example.org/").out.splitlines()[0]
    assert link.startswith("https://labels.example.org/join#")
    refused = shop("invite", "shop", "robot@machines", "--role", "machine")
    assert (refused.code, "kedge label token" in refused.err) == (2, True)
    store = open_store(str(tmp_path / "labels.db"))
    project = find_project(store, "shop")
    assert (project.settings.pay, project.settings.currency, project.settings.practice) == (14.5, "EUR", 3)
    machine = find_bearer(store, token)
    assert machine is not None
    assert [known.name for known in projects_of(store, machine)] == ["shop"]
    assert token.encode() not in (tmp_path / "labels.db").read_bytes()
    store.close()


def test_a_person_has_no_token(shop: Callable[..., Any], tmp_path: Path) -> None:
    link = shop("invite", "shop", "ann@example.org").out.splitlines()[0]
    store = open_store(str(tmp_path / "labels.db"))
    accept_invite(store, link.partition("#")[2], "correct horse battery")
    assert [known.name for known in projects_of(store, find_person(store, "ann@example.org"))] == ["shop"]
    store.close()
    ended = shop("token", "shop", "ann@example.org")
    assert ended.code == 2
    assert "tokens are for machines" in ended.err


def test_a_link_gives_a_new_password_and_another_project(shop: Callable[..., Any], tmp_path: Path) -> None:
    first = shop("invite", "shop", "ann@example.org").out.splitlines()[0]
    shop("new", "other", "--questions", "pair", "--guideline", "guide.md")
    store = open_store(str(tmp_path / "labels.db"))
    ann = accept_invite(store, first.partition("#")[2], "correct horse battery")
    session, _ = open_session(store, ann)
    other = shop("invite", "other", "ann@example.org", "--role", "manager")
    assert (other.code, "as annotator" in other.err) == (2, True)
    link = shop("invite", "other", "ann@example.org").out.splitlines()[0]
    again = accept_invite(store, link.partition("#")[2], "another long password")
    assert again.id == ann.id
    assert find_session(store, session) is None
    assert check_password(store, "ann@example.org", "correct horse battery") is None
    assert check_password(store, "ann@example.org", "another long password") == ann
    assert [known.name for known in projects_of(store, ann)] == ["other", "shop"]
    with pytest.raises(DataError, match="has an account already"):
        make_invite(store, find_project(store, "shop"), "ann@example.org", "annotator")  # as pages make them
    store.close()


def test_a_quiz_without_a_right_answer_is_refused(kedge: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "guide.md").write_text("Look.\n\n## Quiz\nWhich?\n- [ ] a\n- [ ] b\n")
    ended = kedge("label", "new", "shop", "--questions", "pair", "--guideline", "guide.md")
    assert ended.code == 2
    assert "found 2 options, 0 of them marked [x]" in ended.err
