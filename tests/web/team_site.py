"""A team's site without a network: a store in memory, people with sessions, and what a browser would send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from fastapi.testclient import TestClient
from httpx2 import Response

from kedge.data.examples import Message, Messages
from kedge.label.accounts import Person, Role, add_person, open_session
from kedge.label.database import Store, open_store
from kedge.label.incoming import Draft, DraftAnswer, Gold
from kedge.label.items import add_items
from kedge.label.projects import Project, Settings, new_project
from kedge.label.team.members import add_member, local_person
from kedge.web.app import NOTHING, Extras, make_app
from kedge.web.entrance import COOKIE, Entrance, LocalEntrance, Logins, Network

ORIGIN = "https://labels.example.org"
HOST = "labels.example.org"
LOCAL_HOST = "127.0.0.1:8123"
TOKEN = "s3cret-token"
GUIDE = "Prefer what is *true*.\n"
QUIZ = """Prefer what is true.

## Quiz
Which is better?
- [ ] the longer one
- [x] the true one

What about private data?
- [x] flag it
- [ ] nothing
"""
PLAIN = Settings(overlap_share=0.0, gold_share=0.0, practice=0)


SHM = Path("/dev/shm")


@cache
def _empty_store() -> bytes:
    """The file of a store with tables and nothing in them: making them takes longer than a test."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "labels.db"
        store = open_store(str(file), create=True)
        store.read(lambda connection: connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all())
        store.close()
        return file.read_bytes()


@contextmanager
def new_store(clock: Clock) -> Iterator[Store]:
    """An empty store, in memory where there is such a folder: every commit is flushed to disk."""
    with TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        file = Path(folder) / "labels.db"
        file.write_bytes(_empty_store())
        store = open_store(str(file), now=clock, randomness=Random(7))
        yield store
        store.close()


class Clock:
    def __init__(self) -> None:
        self.time = 1_800_000_000_000

    def __call__(self) -> int:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += round(1000 * seconds)


def says(role: Any, text: str) -> Messages:
    return (Message(role, text),)


def pair(number: int, *, texts: tuple[str, str] | None = None, **options: Any) -> Draft:
    first, second = texts or (f"first of {number}", f"second of {number}")
    answers = (
        DraftAnswer(text=says("assistant", first), model="secret-model-a"),
        DraftAnswer(text=says("assistant", second), model="secret-model-b"),
    )
    return Draft(prompt=says("user", f"question {number}"), answers=answers, **options)


def gold_pair(number: int) -> Draft:
    return pair(number, gold=Gold(expected=-2, tolerance=1, explanation="the first is true"))


def ranked(number: int, count: int = 4) -> Draft:
    answers = tuple(DraftAnswer(text=says("assistant", f"answer {place} of {number}")) for place in range(count))
    return Draft(prompt=says("user", f"ranked {number}"), answers=answers)


@dataclass(slots=True)
class Visitor:
    """A browser of one person, or of nobody; `post` sends what a page of ours would send."""

    client: TestClient
    csrf: str = ""
    person: Person | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])

    def get(self, path: str, **options: Any) -> Response:
        return self.client.get(path, headers=self.headers, follow_redirects=False, **options)

    def post(self, path: str, body: Any = None, **headers: str | None) -> Response:
        sent = {"origin": ORIGIN, "content-type": "application/json", "x-csrf-token": self.csrf, **self.headers}
        for name, value in headers.items():
            sent[name.replace("_", "-")] = value  # type: ignore[assignment]
        given = {name: value for name, value in sent.items() if value is not None}
        return self.client.post(path, json={} if body is None else body, headers=given, follow_redirects=False)


@dataclass(slots=True)
class TeamSite:
    store: Store
    clock: Clock
    entrance: Entrance
    app: Any

    def anybody(self, address: str = "203.0.113.9") -> Visitor:
        return Visitor(TestClient(self.app, base_url=ORIGIN, client=(address, 50000)))

    def person(self, role: Role, email: str = "", projects: Sequence[Project] = ()) -> Visitor:
        """Somebody with a session, a member of these projects."""
        person = add_person(self.store, email or f"{role}@example.org", role)
        for project in projects:
            add_member(self.store, project, person)
        identity, csrf = open_session(self.store, person)
        visitor = self.anybody()
        visitor.headers["cookie"] = f"{COOKIE}={identity}"
        visitor.csrf, visitor.person = csrf, person
        return visitor


def make_site(store: Store, clock: Clock, *, proxies: Sequence[Network] = (), extras: Extras = NOTHING) -> TeamSite:
    logins = Logins(now=lambda: clock() / 1000)
    entrance = Entrance(store=store, origin=ORIGIN, hosts=(HOST,), proxies=proxies, logins=logins)
    return TeamSite(store, clock, entrance, make_app(entrance, extras))


def make_local(store: Store, extras: Extras = NOTHING) -> Visitor:
    local = LocalEntrance(token=TOKEN, person=local_person(store))
    entrance = Entrance(store=store, origin=f"http://{LOCAL_HOST}", hosts=(LOCAL_HOST,), local=local)
    app = make_app(entrance, extras)
    client = TestClient(app, base_url=f"http://{LOCAL_HOST}")
    return Visitor(client, headers={"origin": f"http://{LOCAL_HOST}", "x-kedge-token": TOKEN})


def new_shop(
    store: Store,
    drafts: Sequence[Draft] = (),
    *,
    name: str = "shop",
    guide: str = GUIDE,
    settings: Settings = PLAIN,
    questions: Sequence[str] = ("pair", "rank", "thumb", "write", "axes", "edit"),
) -> Project:
    project = new_project(store, name, list(questions), guide, settings)
    add_items(store, project, drafts)
    return project


def step(outcome: int, **options: Any) -> dict[str, Any]:
    return {"verdict": "step", "outcome": outcome, "seconds": 3.0, **options}
