"""The desk: items come, judgments go, nothing tells gold, another's item is not there."""

from __future__ import annotations

import re

from sqlalchemy import func, select
from team_site import (
    TOKEN,
    Clock,
    TeamSite,
    gold_pair,
    make_local,
    new_shop,
    pair,
    ranked,
    step,
)

from kedge.label import tables
from kedge.label.database import Store
from kedge.label.projects import Settings, add_guideline
from kedge.label.status import status


def judgments(store: Store) -> int:
    query = select(func.count()).select_from(tables.judgment)
    return store.read(lambda connection: connection.scalar(query)) or 0


def test_one_person_on_this_machine_works_to_the_end(store: Store) -> None:
    project = new_shop(store, [pair(n) for n in range(3)])
    me = make_local(store)
    assert me.client.get("/work", params={"token": TOKEN}).status_code == 200
    task = me.post("/work/next", {"project": "shop"}).json()["task"]
    for done in range(3):
        assert task["kind"] == "pair"
        body = {"assignment": task["assignment"], "decision": step(-2, axes={"honest": -1}, reason="clear")}
        task = me.post("/work/judge", body).json()["task"]
        assert judgments(store) == done + 1
    assert task is None
    assert status(store, project).given == 3


def test_the_same_judgment_twice_is_one(store: Store) -> None:
    new_shop(store, [pair(n) for n in range(3)])
    me = make_local(store)
    first = me.post("/work/next").json()["task"]["assignment"]
    body = {"assignment": first, "decision": step(1)}
    replies = [me.post("/work/judge", body).json()["task"]["assignment"] for _ in range(3)]
    assert judgments(store) == 1
    assert len(set(replies)) == 1
    other = me.post("/work/judge", {"assignment": first, "decision": step(3)})
    assert other.status_code == 400
    assert "judged already" in other.json()["error"]
    assert judgments(store) == 1


def test_undo_brings_the_item_back_and_gives_the_next_one_up(store: Store) -> None:
    new_shop(store, [pair(n) for n in range(3)])
    me = make_local(store)
    first = me.post("/work/next").json()["task"]["assignment"]
    second = me.post("/work/judge", {"assignment": first, "decision": step(1)}).json()["task"]["assignment"]
    back = me.post("/work/undo", {"assignment": first, "current": second}).json()["task"]["assignment"]
    assert back == first
    again = me.post("/work/judge", {"assignment": first, "decision": step(-1)}).json()["task"]["assignment"]
    assert again == second  # which nobody else has got meanwhile
    assert me.post("/work/undo", {"assignment": second}).json()["error"] == "there is nothing to undo"


def test_another_persons_item_is_not_there(site: TeamSite) -> None:
    project = new_shop(site.store, [pair(n) for n in range(4)])
    ann, bob = (site.person("annotator", f"{name}@example.org", [project]) for name in ("ann", "bob"))
    hers = ann.post("/work/next").json()["task"]["assignment"]
    bob.post("/work/next")
    for path, body in (("judge", {"decision": step(1)}), ("undo", {})):
        stolen = bob.post(f"/work/{path}", {"assignment": hers, **body})
        unknown = bob.post(f"/work/{path}", {"assignment": "0" * 32, **body})
        assert (stolen.status_code, stolen.content) == (unknown.status_code, unknown.content)
        assert stolen.status_code == 404
    assert judgments(site.store) == 0


def test_another_project_is_not_there(site: TeamSite) -> None:
    shop = new_shop(site.store, [pair(1)])
    new_shop(site.store, [pair(2)], name="secret")
    ann = site.person("annotator", projects=[shop])
    assert ann.get("/work?project=secret").status_code == 404
    assert ann.get("/work?project=secret").content == ann.get("/work?project=nothing").content
    assert ann.post("/work/next", {"project": "secret"}).status_code == 404
    assert "secret" not in ann.get("/").text


def test_nothing_in_a_reply_tells_gold_or_models(site: TeamSite) -> None:
    settings = Settings(overlap_share=0.0, gold_share=0.5, practice=0)
    project = new_shop(
        site.store, [*(pair(n) for n in range(40)), *(gold_pair(n) for n in range(60, 90))], settings=settings
    )
    ann = site.person("annotator", projects=[project])
    reply = ann.post("/work/next").json()
    shapes: dict[bool, set[str]] = {True: set(), False: set()}
    item, assignment = tables.item, tables.assignment
    for _ in range(40):
        task = reply["task"]
        text = str(reply)
        assert "secret-model" not in text
        assert "gold" not in text.lower().replace("kedge", "")
        query = select(item.c.is_gold).join(assignment).where(assignment.c.id == task["assignment"])
        is_gold = site.store.read(lambda connection, query=query: connection.scalar(query))
        # All but the words and the random id must be the same.
        plain = re.sub(r"(first|second) of \d+|question \d+|[0-9a-f]{32}", "", text)
        shapes[is_gold].add(re.sub(r", 'guideline': {'number.*$", "", plain))
        site.clock.advance(3)
        outcome = -2 if task["html"].index("first of") < task["html"].index("second of") else 2
        reply = ann.post("/work/judge", {"assignment": task["assignment"], "decision": step(outcome)}).json()
    assert len(shapes[True]) == 1
    assert shapes[True] == {next(iter(shapes[False]))}


def test_rank_takes_rankings_alone(store: Store) -> None:
    new_shop(store, [pair(1), ranked(2), ranked(3)])
    me = make_local(store)
    task = me.post("/work/next", {"kind": "rank"}).json()["task"]
    assert task["kind"] == "rank"
    body = {
        "kind": "rank",
        "assignment": task["assignment"],
        "decision": {"verdict": "ranking", "ranking": [2, 1, 2, 4]},
    }
    assert me.post("/work/judge", body).json()["task"]["kind"] == "rank"
    assert me.post("/work/next").json()["task"]["kind"] == "rank"  # the one that is held
    query = select(tables.judgment.c.ranking)
    ranking = store.read(lambda connection: connection.scalar(query))
    assert sorted(ranking) == [1, 2, 2, 4]


REFUSED = (
    ({"verdict": "step", "outcome": 4}, "outcome: found 4"),
    ({"verdict": "step", "outcome": True}, "valid integer"),
    ({"verdict": "step", "outcome": 1, "model": "x"}, "Extra inputs"),
    ({"verdict": "skip"}, "a skip says why"),
    ({"verdict": "decided", "outcome": 1}, "verdict: found 'decided'"),
    ({"verdict": "undone"}, "verdict: found 'undone'"),
    ({"verdict": "step", "outcome": 1, "flags": {"guideline": "x"}}, "no such flag"),
    ({"verdict": "step", "outcome": 1, "seconds": -1}, "greater than or equal to 0"),
)


def test_what_does_not_answer_the_question_is_refused_with_words(store: Store) -> None:
    new_shop(store, [pair(1)])
    me = make_local(store)
    task = me.post("/work/next").json()["task"]
    for decision, words in REFUSED:
        reply = me.post("/work/judge", {"assignment": task["assignment"], "decision": decision})
        assert reply.status_code in (400, 422)
        assert words in reply.json()["error"]
    assert judgments(store) == 0


def test_no_more_time_is_counted_than_has_passed(store: Store, clock: Clock) -> None:
    project = new_shop(store, [pair(1), pair(2)])
    me = make_local(store)
    task = me.post("/work/next").json()["task"]
    clock.advance(60)
    me.post("/work/judge", {"assignment": task["assignment"], "decision": step(1) | {"seconds": 90000.0}})
    assert 60 <= 3600 * status(store, project).people[0].hours <= 70


def test_a_new_guideline_comes_with_the_next_item_and_the_quiz_never_does(store: Store) -> None:
    project = new_shop(store, [pair(1), pair(2)], guide="First.\n\n## Quiz\nq?\n- [x] aha\n- [ ] no\n")
    me = make_local(store)
    reply = me.post("/work/next", {"guideline": 0}).json()
    assert "First." in reply["guideline"]["html"]
    assert "aha" not in str(reply)
    assert "aha" not in me.client.get("/work", params={"token": TOKEN}).text
    number = reply["guideline"]["number"]
    assert "guideline" not in me.post("/work/next", {"guideline": number}).json()
    add_guideline(store, project, "Second.")
    body = {"assignment": reply["task"]["assignment"], "decision": step(1), "guideline": number}
    assert "Second." in me.post("/work/judge", body).json()["guideline"]["html"]


def test_harmful_items_come_to_those_who_take_them_and_not_too_often(site: TeamSite) -> None:
    settings = Settings(overlap_share=0.0, gold_share=0.0, practice=0, harm_an_hour=2)
    project = new_shop(site.store, [pair(n, is_harmful=True) for n in range(6)], settings=settings)
    ann = site.person("annotator", projects=[project])
    assert ann.post("/work/next").json()["task"] is None
    assert ann.post("/me/preferences", {"takes_harm": True}).status_code == 200
    for _ in range(2):
        task = ann.post("/work/next").json()["task"]
        reply = ann.post("/work/judge", {"assignment": task["assignment"], "decision": step(1)}).json()
    assert reply["task"] is None
    site.clock.advance(3700)
    assert ann.post("/work/next").json()["task"] is not None


def test_a_machine_works_by_its_token_and_sees_texts_as_they_are(site: TeamSite) -> None:
    from kedge.label.team.members import machine_token

    project = new_shop(site.store, [pair(1, texts=("<b>a</b>", "b")), pair(2)])
    robot = site.anybody()
    robot.headers = {"authorization": f"Bearer {machine_token(site.store, project, 'judge@machines')}"}
    task = robot.post("/work/next", origin=None).json()["task"]
    assert {answer[0]["content"] for answer in task["answers"]} <= {"<b>a</b>", "b", "first of 2", "second of 2"}
    assert "html" not in task
    body = {"assignment": task["assignment"], "decision": step(1)}
    assert robot.post("/work/judge", body, origin=None).status_code == 200
    assert robot.get("/manage").status_code == 404
    assert robot.get("/work").status_code == 404
    machine_token(site.store, project, "judge@machines")  # a new one ends the old one
    assert robot.post("/work/next", origin=None).status_code == 401
