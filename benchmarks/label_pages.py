"""The pages of labels under load: 200 machines at once against one server on loopback, and the server killed.

    python benchmarks/label_pages.py [--annotators 200] [--each 10] [--db postgresql://…]

- crowd: every annotator asks for items and judges them over HTTP, with a token of its own; nothing may be lost,
  doubled, or tell gold from the rest. Judgments a second, and how long a judgment took (the reply has the next item).
- kill: the server is killed (SIGKILL) in the middle; every judgment that was acknowledged must be there.

Exit code 1 where something was lost, doubled or told.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
from sqlalchemy import func, select

from kedge.data.examples import Message
from kedge.label import tables
from kedge.label.database import Store, open_store
from kedge.label.incoming import Draft, DraftAnswer, Gold
from kedge.label.items import add_items
from kedge.label.projects import Settings, new_project
from kedge.label.team.members import machine_token

HOST = "labels.test"


@dataclass
class Tally:
    """What the annotators saw: acknowledged assignments, seconds, and shapes of replies."""

    acknowledged: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    shapes: set[str] = field(default_factory=set)

    def quantile(self, share: float) -> float:
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))] if self.seconds else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--annotators", type=int, default=200)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--db", default="", help="an empty PostgreSQL database; else a SQLite file that is thrown away")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        address = options.db or str(Path(folder) / "labels.db")
        store = open_store(address, create=True)
        tokens = prepare(store, options.annotators, options.each)
        calm = crowd(store, address, tokens, options.each, kills=False)
        killed = crowd(store, address, tokens, options.each, kills=True)
        store.close()
    return int(not (calm and killed))


def prepare(store: Store, annotators: int, each: int) -> list[str]:
    """A project with enough pairs and gold for two rounds, and a token for each annotator."""
    settings = Settings(wanted=2, overlap_share=0.0, gold_share=0.1, practice=0)
    project = new_project(store, "load", ["pair"], "Look.", settings)
    drafts = [_draft(number) for number in range(annotators * each * 2)]
    golds = [_draft(-1 - number, Gold(expected=1, tolerance=3)) for number in range(100)]
    add_items(store, project, [*drafts, *golds])
    return [machine_token(store, project, f"machine{number}@load") for number in range(annotators)]


def _draft(number: int, gold: Gold | None = None) -> Draft:
    answers = tuple(DraftAnswer(text=(Message("assistant", f"{side} of {number:07d}"),)) for side in ("one", "two"))
    return Draft(prompt=(Message("user", f"question {number:07d}"),), answers=answers, gold=gold)


def crowd(store: Store, address: str, tokens: list[str], each: int, *, kills: bool) -> bool:
    """One round; with `kills` the server dies in the middle of it."""
    before, tally = _count(store), Tally()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kedge.cli", "label", "serve", "--db", address, "--port", str(port), "--team"]
    team = ["--url", f"https://{HOST}", "--behind-proxy", "127.0.0.1"]
    server = subprocess.Popen([*command, *team], stdout=subprocess.DEVNULL)
    try:
        since = asyncio.run(_round(server, f"http://127.0.0.1:{port}", tokens, each, tally, kills=kills))
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    took = time.monotonic() - since
    kept, doubled = _kept(store, tally.acknowledged), _doubled(store)
    lost = len(tally.acknowledged) - kept
    extra = _count(store) - before - len(tally.acknowledged)
    name = "killed" if kills else "crowd"
    print(f"{name}: {len(tally.acknowledged):,} acknowledged, {lost} lost, {doubled} doubled, {extra} not acknowledged")
    rate, median, slow = len(tally.acknowledged) / took, tally.quantile(0.5), tally.quantile(0.99)
    print(f"  {rate:,.0f} judgments/s, p50 {median:.2f} s, p99 {slow:.2f} s")
    print(f"  shapes of replies: {len(tally.shapes)}")
    return not lost and not doubled and len(tally.shapes) == 1 and (kills or not extra)


async def _round(
    server: subprocess.Popen[bytes], url: str, tokens: list[str], each: int, tally: Tally, *, kills: bool
) -> float:
    limits = httpx2.Limits(max_connections=len(tokens), max_keepalive_connections=len(tokens))
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=120) as http:
        await _until_up(http, server)
        since = time.monotonic()
        work = [asyncio.create_task(_annotate(http, token, each, tally)) for token in tokens]
        if kills:
            while len(tally.acknowledged) < len(tokens) * each // 3 and not all(task.done() for task in work):
                await asyncio.sleep(0.02)
            server.send_signal(signal.SIGKILL)
        ended = await asyncio.gather(*work, return_exceptions=True)
        problems = [error for error in ended if isinstance(error, BaseException)]
        if problems and not kills:
            raise problems[0]
        return since


async def _until_up(http: httpx2.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            await http.get("/login", headers=_headers(""))
            return
        except httpx2.HTTPError:
            await asyncio.sleep(0.1)
    raise RuntimeError("the server did not start")


def _headers(token: str) -> dict[str, str]:
    bearer = {"Authorization": f"Bearer {token}"} if token else {}
    return {"Host": HOST, "X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.1", **bearer}


async def _annotate(http: httpx2.AsyncClient, token: str, each: int, tally: Tally) -> None:
    reply = await http.post("/work/next", json={}, headers=_headers(token))
    for _ in range(each):
        task = reply.json()["task"]
        if task is None:
            return
        tally.shapes.add(re.sub(r"[0-9a-f]{32}|-?\d{6,}|\b(one|two)\b", "", reply.text))
        body = {"assignment": task["assignment"], "decision": {"verdict": "step", "outcome": 1, "seconds": 1.0}}
        since = time.monotonic()
        reply = await http.post("/work/judge", json=body, headers=_headers(token))
        reply.raise_for_status()
        tally.seconds.append(time.monotonic() - since)
        tally.acknowledged.append(task["assignment"])


def _count(store: Store) -> int:
    query = select(func.count()).select_from(tables.judgment)
    return store.read(lambda connection: connection.scalar(query)) or 0


def _kept(store: Store, assignments: list[str]) -> int:
    query = select(tables.judgment.c.assignment)
    known = set(store.read(lambda connection: connection.scalars(query).all()))
    return sum(assignment in known for assignment in assignments)


def _doubled(store: Store) -> int:
    """Assignments with two judgments, and items with more labels than they want."""
    judgment, item = tables.judgment, tables.item
    twice = select(judgment.c.assignment).group_by(judgment.c.assignment).having(func.count() > 1)
    over = select(item.c.id).where(item.c.have > item.c.wanted, ~item.c.is_gold)
    return store.read(
        lambda connection: len(connection.execute(twice).all()) + len(connection.execute(over).all())
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
