"""The store of labels under load: a crowd at once, processes that are killed, a million judgments.

    python benchmarks/label_store.py [--annotators 200] [--each 10] [--judgments 1000000] [--folder FOLDER]

- crowd: so many annotators in threads of one process, on SQLite, and on PostgreSQL where it is installed. Each judgment
  is a lease and a write, both flushed to disk. Nothing may be lost, doubled, or give gold away.
- kill: processes are killed with SIGKILL between a lease and its write, eight times; every judgment that was
  acknowledged must be there.
- status: `kedge label status` of a million judgments over a third as many items, with agreement and what is told of
  people, and each page of who manages, must take at most a second.

FOLDER is where the stores are made, to measure a certain disk. Exit code 1 where any of this does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory

from fastapi.testclient import TestClient

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "label"))

from clusters import start_cluster
from load import crowd, killed, prepare

from kedge.label.audit import tampered
from kedge.label.database import open_store
from kedge.label.projects import new_project
from kedge.label.status import status
from kedge.label.team.members import local_person
from kedge.label.team.review import read_docket
from kedge.web.app import make_app
from kedge.web.entrance import Entrance, LocalEntrance
from label_million import fill

KILLS, AFTER = 8, 5
MOST_STATUS_SECONDS = 1.0
PAGES = ("/manage", "/manage/agreement", "/review", "/me")


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
    """A million judgments: the status, and the pages of who manages, with everything that they load."""
    store = open_store(address, create=True)
    project = new_project(store, "million", ["pair"], "Look.")
    started = time.perf_counter()
    labels = fill(store, project, judgments)
    now = status(store, project)
    print(
        f"{name}: {now.as_of:,} judgments over {now.items:,} items (filled in {time.perf_counter() - started:.0f} s), "
        f"{read_docket(store, project, 0).count:,} to review; {now.agreement['pair'].in_words()}",
        flush=True,
    )
    host = "127.0.0.1:8123"
    local = LocalEntrance(token="t", person=local_person(store))
    entrance = Entrance(store=store, origin=f"http://{host}", hosts=(host,), local=local)
    browser = TestClient(make_app(entrance), base_url=f"http://{host}")
    is_good = now.given == labels
    works = {"status": lambda: status(store, project), **{path: partial(_load, browser, path) for path in PAGES}}
    for what, work in works.items():
        seconds, own = zip(*(_timed(work) for _ in range(5)), strict=True)
        best, worst = min(seconds), max(seconds)
        print(f"  {what}: {best:.2f} s at best, {worst:.2f} s at worst, {min(own):.2f} s of CPU", flush=True)
        is_good &= min(seconds) <= MOST_STATUS_SECONDS
    store.close()
    return is_good


def _load(browser: TestClient, path: str) -> None:
    reply = browser.get(path, params={"token": "t"})
    if reply.status_code != HTTPStatus.OK:
        raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:200]}")


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that it took, and seconds of this process's CPU (PostgreSQL's own are not among them)."""
    started, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - own


if __name__ == "__main__":
    sys.exit(main())
