"""The store of labels under load: a crowd at once, processes that are killed, a million judgments.

    python benchmarks/label_store.py [--annotators 200] [--each 10] [--judgments 1000000] [--folder FOLDER]

- crowd: so many annotators in threads of one process, on SQLite, and on PostgreSQL where it is installed. Each judgment
  is a lease and a write, both flushed to disk. Nothing may be lost, doubled, or give gold away.
- kill: processes are killed with SIGKILL between a lease and its write, eight times; every judgment that was
  acknowledged must be there.
- status: `kedge label status` of a million judgments over a third as many items, with agreement and what is told of
  people, must take at most a second.

FOLDER is where the stores are made, to measure a certain disk. Exit code 1 where any of this does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Connection, insert, text, update

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "label"))

from clusters import start_cluster
from load import crowd, killed, prepare

from kedge.label import tables
from kedge.label.audit import tampered
from kedge.label.database import Store, open_store
from kedge.label.projects import Project, new_project
from kedge.label.status import status

KILLS, AFTER = 8, 5
MOST_STATUS_SECONDS = 1.0
_BATCH = 50_000
_EACH_ITEM = 3
_PROMPTS = 50_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--annotators", type=int, default=200)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--judgments", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    is_good = True
    with addresses(options.folder) as stores:
        for name, new_address in stores:
            is_good &= report_crowd(name, new_address(), options.annotators, options.each)
            is_good &= report_kills(name, new_address())
            is_good &= report_status(name, new_address(), options.judgments)
    return 0 if is_good else 1


@contextmanager
def addresses(folder: Path | None) -> Iterator[list[tuple[str, Callable[[], str]]]]:
    """The kinds of stores that there are here, each with a way to get an address of a new one."""
    with TemporaryDirectory(dir=folder) as home, start_cluster(str(folder or "/tmp")) as cluster:
        numbers = iter(range(1000))
        stores: list[tuple[str, Callable[[], str]]] = [("SQLite", lambda: f"{home}/labels-{next(numbers)}.db")]
        if cluster is None:
            print("PostgreSQL is not installed: left out")
        else:
            stores.append(("PostgreSQL", cluster.new_database))
        yield stores


def report_crowd(name: str, address: str, annotators: int, each: int) -> bool:
    store = open_store(address, create=True)
    # With overlap and gold there is more than enough to do for all.
    project, people = prepare(store, items=annotators * each, annotators=annotators)
    load = crowd(store, project, people, each)
    problems = tampered(store)
    print(
        f"{name}: {annotators} annotators, {load.judgments} judgments in {load.wall_seconds:.1f} s: "
        f"{load.judgments / load.wall_seconds:.0f} judgments/s, p50 {load.quantile(0.5):.2f} s, "
        f"p99 {load.quantile(0.99):.2f} s; errors {len(load.errors)}, lost {load.lost}, doubled {load.doubled}, "
        f"kinds of replies {load.shapes} with {load.gold} gold among them, tampered {len(problems)}",
        flush=True,
    )
    for error in [*load.errors[:3], *problems]:
        print(f"  {error}")
    store.close()
    return load.is_good and not problems and load.judgments == annotators * each


def report_kills(name: str, address: str) -> bool:
    store = open_store(address, create=True)
    _, people = prepare(store, items=KILLS * AFTER * 8, annotators=KILLS)
    problems = killed(address, store, people, after=AFTER)
    print(
        f"{name}: {KILLS} processes killed between lease and write: {'; '.join(problems) or 'nothing lost'}", flush=True
    )
    store.close()
    return not problems


def report_status(name: str, address: str, judgments: int) -> bool:
    store = open_store(address, create=True)
    project = new_project(store, "million", ["pair"], "Look.")
    started = time.perf_counter()
    fill(store, project, judgments)
    filled = time.perf_counter() - started
    seconds = [_timed(lambda: status(store, project)) for _ in range(3)]
    now = status(store, project)
    print(
        f"{name}: {now.as_of:,} judgments over {now.items:,} items (filled in {filled:.0f} s): status in "
        f"{', '.join(f'{value:.2f}' for value in seconds)} s; {now.agreement['pair'].in_words()}",
        flush=True,
    )
    store.close()
    return now.given == judgments and min(seconds) <= MOST_STATUS_SECONDS


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def fill(store: Store, project: Project, judgments: int) -> None:
    """Items and judgments in bulk, without their chain: only reading them is measured."""
    count = -(-judgments // _EACH_ITEM)
    prompts = [{"hash": _digest("prompt", number), "body": "[]"} for number in range(_PROMPTS)]
    store.write(lambda connection: connection.execute(insert(tables.body), prompts))
    person = {"role": "annotator", "languages": [], "takes_harm": False, "at": 0}
    rows = [{"id": number, "uid": str(number), "email": f"p{number}@example.org", **person} for number in range(1, 201)]
    store.write(lambda connection: connection.execute(insert(tables.person), rows))
    item = {
        "project": project.id, "round": 0, "kind": "pair", "wanted": _EACH_ITEM, "have": _EACH_ITEM, "words": 120,
        "priority": 0.0, "is_gold": False, "is_heldout": False, "is_harmful": False,
    }  # fmt: skip
    _bulk(
        store,
        tables.item,
        (
            {"id": number, "key": _digest("item", number), "prompt": _digest("prompt", number % _PROMPTS), **item}
            for number in range(1, count + 1)
        ),
    )
    assignment = {
        "project": project.id, "guideline": project.guideline, "state": "done", "leased_until": 0,
        "seconds": 20.0, "is_right": None,
    }  # fmt: skip
    _bulk(
        store,
        tables.assignment,
        (
            {
                "id": f"{number:032x}",
                "item": 1 + number // _EACH_ITEM,
                "person": 1 + (number * 7 + number // _EACH_ITEM) % 200,
                "order": [number % 2, 1 - number % 2],
                **assignment,
            }
            for number in range(judgments)
        ),
    )
    judgment = {
        "verdict": "step", "seconds": 20.0, "idle_seconds": 0.0, "guideline": project.guideline,
        "at": 0, "hash": "0",
    }  # fmt: skip
    _bulk(
        store,
        tables.judgment,
        (
            {"seq": number + 1, "assignment": f"{number:032x}", "outcome": _outcome(number), **judgment}
            for number in range(judgments)
        ),
    )
    head = update(tables.chain).where(tables.chain.c.name == "judgment").values(seq=judgments)
    store.write(lambda connection: connection.execute(head))
    if not store.is_sqlite:
        # PostgreSQL does so by itself as tables grow, but not yet after so much at once.
        store.write(lambda connection: connection.execute(text("ANALYZE")))


def _digest(what: str, number: int) -> str:
    return hashlib.sha256(f"{what} {number}".encode()).hexdigest()


def _outcome(number: int) -> int:
    """A step that depends on the item, and in one of four cases on chance."""
    own, item = _digest("label", number), _digest("truth", number // _EACH_ITEM)
    return int(own if own[0] < "4" else item, 16) % 7 - 3


def _bulk(store: Store, table: Any, rows: Iterator[dict[str, Any]]) -> None:
    def put(connection: Connection, batch: Sequence[dict[str, Any]]) -> None:
        connection.execute(insert(table), batch)

    while batch := list(islice(rows, _BATCH)):
        store.write(lambda connection, batch=batch: put(connection, batch))


if __name__ == "__main__":
    sys.exit(main())
