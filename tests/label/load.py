"""Many annotators at once, and processes that are killed: what came out, counted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread

from made_up import gold_pair, pair
from sqlalchemy import func, select

from kedge.label import tables
from kedge.label.accounts import Person, add_person, find_person
from kedge.label.audit import tampered
from kedge.label.database import Store, open_store
from kedge.label.items import add_items
from kedge.label.judging import judge
from kedge.label.projects import Project, Settings, find_project, new_project
from kedge.label.questions import Decision
from kedge.label.work import next_task

OVERLAP = Settings(overlap_share=0.2, overlap_wanted=3, gold_share=0.08)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a crowd did. `seconds` are those of each judgment: the lease and the write."""

    judgments: int
    wall_seconds: float
    seconds: Sequence[float]
    errors: Sequence[str]
    lost: int
    """Acknowledged, and not in the store."""
    doubled: int
    """Two judgments of one assignment, two assignments of one item to one person, or more labels than wanted."""
    shapes: int
    """Kinds of replies, texts and ids apart: more than one would give gold away."""
    gold: int

    def quantile(self, share: float) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]

    @property
    def is_good(self) -> bool:
        return not self.errors and self.lost == self.doubled == 0 and self.shapes == 1


def prepare(store: Store, *, items: int, annotators: int) -> tuple[Project, list[Person]]:
    project = new_project(store, "load", ["pair"], "Look.", OVERLAP)
    add_items(store, project, [pair(number) for number in range(items)])
    add_items(store, project, [gold_pair(number) for number in range(items, items + max(10, items // 10))])
    return project, [add_person(store, f"person{number}@example.org") for number in range(annotators)]


def crowd(store: Store, project: Project, people: Sequence[Person], each: int) -> Load:
    """All people at once, so many judgments each."""
    acknowledged: list[tuple[int, str]] = []
    seconds: list[float] = []
    errors: list[str] = []
    shapes: Counter[str] = Counter()

    def work(person: Person) -> None:
        try:
            for _ in range(each):
                started = time.perf_counter()
                task = next_task(store, project, person)
                if task is None:
                    return
                shapes[re.sub(r"[0-9a-f]{32}|\d+|first|second", "", str(task))] += 1
                seq = judge(store, project, person, task.assignment, Decision(verdict="step", outcome=-1, seconds=1.0))
                seconds.append(time.perf_counter() - started)
                acknowledged.append((seq, task.assignment))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [Thread(target=work, args=(person,)) for person in people]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - started
    return Load(
        judgments=len(acknowledged),
        wall_seconds=wall,
        seconds=seconds,
        errors=errors,
        lost=lost(store, acknowledged),
        doubled=doubled(store),
        shapes=len(shapes),
        gold=store.read(
            lambda connection: (
                connection.scalar(select(func.count()).where(tables.assignment.c.is_right.is_not(None))) or 0
            )
        ),
    )


def lost(store: Store, acknowledged: Sequence[tuple[int, str]]) -> int:
    """Acknowledged judgments that are not in the store under their number."""
    table = tables.judgment
    rows = store.read(lambda connection: connection.execute(select(table.c.seq, table.c.assignment)).all())
    return len(set(acknowledged) - {(seq, assignment) for seq, assignment in rows})


def doubled(store: Store) -> int:
    judgment, assignment, item = tables.judgment, tables.assignment, tables.item

    def count(connection: object) -> int:
        run = connection.execute  # pyright: ignore
        twice = run(select(judgment.c.assignment).group_by(judgment.c.assignment).having(func.count() > 1)).all()
        again = run(
            select(assignment.c.item).group_by(assignment.c.item, assignment.c.person).having(func.count() > 1)
        ).all()
        labels = (
            select(assignment.c.item, func.count().label("labels"))
            .where(assignment.c.state == "done")
            .group_by(assignment.c.item)
            .subquery()
        )
        over = run(
            select(item.c.id)
            .join(labels, labels.c.item == item.c.id)
            .where(~item.c.is_gold, labels.c.labels > item.c.wanted)
        ).all()
        wrong = run(select(item.c.id).where(~item.c.is_gold, item.c.have > item.c.wanted)).all()
        return len(twice) + len(again) + len(over) + len(wrong)

    return store.read(count)


def annotate(address: str, email: str) -> None:
    """Label for ever, and say each number that was acknowledged: what `killed` starts as a process, and kills."""
    store = open_store(address)
    project = find_project(store, "load")
    person = find_person(store, email)
    while (task := next_task(store, project, person)) is not None:
        print(f"leased {task.assignment}", flush=True)
        seq = judge(store, project, person, task.assignment, Decision(verdict="step", outcome=-1))
        print(f"done {seq} {task.assignment}", flush=True)


def killed(address: str, store: Store, people: Sequence[Person], *, after: int) -> list[str]:
    """Kill annotators' processes right after a lease, so many of them into their work; what is wrong afterwards."""
    with ThreadPoolExecutor(len(people)) as readers:
        logs = list(readers.map(lambda person: _until_killed(address, person, after), people))
    acknowledged = [(int(line[1]), line[2]) for log in logs for line in log if line[0] == "done"]
    problems = [f"{count} acknowledged judgments are lost"] if (count := lost(store, acknowledged)) else []
    problems += [f"{count} are doubled"] if (count := doubled(store)) else []
    short = [log for log in logs if sum(line[0] == "leased" for line in log) <= after]
    problems += [f"{len(short)} processes ended before they were killed"] if short else []
    return problems + tampered(store)


def _until_killed(address: str, person: Person, after: int) -> list[list[str]]:
    """What one process said until it was killed, and what was still on its way."""
    script = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); from load import annotate; "
    command = [sys.executable, "-c", script + f"annotate({address!r}, {person.email!r})"]
    log: list[list[str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            log.append(line.split())
            if line.startswith("leased") and sum(line[0] == "leased" for line in log) > after:
                break
        child.send_signal(signal.SIGKILL)
        log += [line.split() for line in child.stdout if line.endswith("\n")]
    return log
