"""A small crowd and a small killing; benchmarks/label_store.py does the large ones."""

from __future__ import annotations

from threading import Thread

from load import Load, crowd, killed, prepare
from made_up import Clock

from kedge.label.accounts import Person
from kedge.label.audit import tampered
from kedge.label.database import Store, open_store
from kedge.label.work import next_task


def test_a_crowd_loses_doubles_and_reveals_nothing(store: Store) -> None:
    project, people = prepare(store, items=60, annotators=20)
    load = crowd(store, project, people, each=4)
    assert load.is_good, load
    assert load.judgments == 80
    assert tampered(store) == []


def test_the_last_items_are_given_out_exactly_as_often_as_wanted(store: Store) -> None:
    project, people = prepare(store, items=10, annotators=12)
    load = crowd(store, project, people, each=20)
    assert load.is_good, load
    assert [next_task(store, project, person) for person in people] == [None] * 12


def test_after_a_kill_between_lease_and_write_all_that_was_acknowledged_is_there(address: str) -> None:
    clock = Clock()
    store = open_store(address, create=True, now=clock)
    project, people = prepare(store, items=40, annotators=1)
    assert killed(address, store, people, after=3) == []
    clock.time = 2_000_000_000_000
    # What the dead held goes to the living.
    assert next_task(store, project, people[0]) is not None
    store.close()


def test_several_servers_write_their_first_judgments_at_once(store: Store, address: str) -> None:
    project, people = prepare(store, items=30, annotators=6)
    stores = [open_store(address) for _ in people]
    loads: list[Load] = []

    def serve(own: Store, person: Person) -> None:
        loads.append(crowd(own, project, [person], each=3))

    threads = [Thread(target=serve, args=pair) for pair in zip(stores, people, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in stores:
        server.close()
    assert [load.errors for load in loads] == [[]] * len(people)
    assert sum(load.judgments for load in loads) == 3 * len(people)
    assert tampered(store) == []
