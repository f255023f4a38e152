"""Who may ask for what: one table. What is not in it is not there, and what somebody may not see looks the same."""

from __future__ import annotations

from collections.abc import Mapping

from kedge.label.accounts import ROLES, Role

_ALL = frozenset(ROLES)
_PEOPLE = frozenset[Role]({"owner", "manager", "annotator", "auditor"})
_LABELLERS = frozenset[Role]({"owner", "manager", "annotator"})
_WORKERS = frozenset[Role]({"owner", "manager", "annotator", "machine"})
_LEADERS = frozenset[Role]({"owner", "manager"})
_READERS = frozenset[Role]({"owner", "manager", "auditor"})

PUBLIC = frozenset({("GET", "/login"), ("POST", "/login"), ("GET", "/join"), ("POST", "/join")})
"""For those who have no session yet."""
ROUTES: Mapping[tuple[str, str], frozenset[Role]] = {
    ("GET", "/"): _PEOPLE,
    ("POST", "/logout"): _PEOPLE,
    ("GET", "/start"): _LABELLERS,
    ("POST", "/start/quiz"): _LABELLERS,
    ("POST", "/start/next"): _LABELLERS,
    ("POST", "/start/practise"): _LABELLERS,
    ("GET", "/work"): _LABELLERS,
    ("GET", "/rank"): _LABELLERS,
    ("POST", "/work/next"): _WORKERS,
    ("POST", "/work/judge"): _WORKERS,
    ("POST", "/work/undo"): _WORKERS,
    ("GET", "/me"): _PEOPLE,
    ("POST", "/me/preferences"): _PEOPLE,
    ("GET", "/review"): _READERS,
    ("POST", "/review/decide"): _LEADERS,
    ("POST", "/review/ask"): _LEADERS,
    ("GET", "/manage"): _READERS,
    ("GET", "/manage/agreement"): _READERS,
    ("POST", "/manage/invite"): _LEADERS,
    ("POST", "/manage/pause"): _LEADERS,
    ("POST", "/manage/export"): _LEADERS,
    ("POST", "/manage/verify"): _READERS,
    ("GET", "/chat"): _LABELLERS,
    ("POST", "/chat/say"): _LABELLERS,
    ("POST", "/chat/vote"): _LABELLERS,
    ("POST", "/chat/thumb"): _LABELLERS,
    ("POST", "/chat/end"): _LABELLERS,
    ("GET", "/board"): _READERS,
    ("POST", "/board/send"): _LEADERS,
    ("POST", "/board/badcase"): _LEADERS,
}
MOUNTS: Mapping[str, frozenset[Role]] = {"/watch": _READERS}
"""Applications that are hosted whole; they are only read."""


def roles_for(method: str, path: str) -> frozenset[Role]:
    """Who may ask for it; nobody where there is no such thing.

    >>> sorted(roles_for("GET", "/review")), sorted(roles_for("GET", "/nothing"))
    (['auditor', 'manager', 'owner'], [])
    """
    for prefix, roles in MOUNTS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return roles if method == "GET" else frozenset()
    return ROUTES.get((method, path), frozenset())
