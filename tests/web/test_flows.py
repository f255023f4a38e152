"""A person's way from the link to the queue, what a reviewer decides, and what who manages sees and does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import select
from team_site import GUIDE, ORIGIN, QUIZ, TeamSite, Visitor, gold_pair, new_shop, pair, ranked, step

from kedge.core.errors import ConfigError
from kedge.label import tables
from kedge.label.accounts import make_invite
from kedge.label.audit import tampered
from kedge.label.database import Store
from kedge.label.export import Settling, export_labels
from kedge.label.judging import judge
from kedge.label.projects import Project, Settings
from kedge.label.questions import Decision
from kedge.label.status import status
from kedge.label.team.pace import pace
from kedge.label.team.quiz import split_quiz
from kedge.label.work import next_task

PASSWORD = "correct horse battery"
TAUGHT = Settings(overlap_share=0.0, gold_share=0.0, practice=2)


def right(html: str) -> int:
    """The step that gold expects: the first answer is the better one, on whichever side it stands."""
    return -2 if html.index("first of") < html.index("second of") else 2


def test_from_the_link_to_the_queue(site: TeamSite) -> None:
    drafts = [*(pair(n) for n in range(3)), *(gold_pair(n) for n in range(10, 16))]
    project = new_shop(site.store, drafts, guide=QUIZ, settings=TAUGHT)
    token = make_invite(site.store, project, "dora@example.org", "annotator")
    dora = site.anybody()
    short = dora.post("/join", {"token": token, "password": "short"})
    assert (short.status_code, "at least 10" in short.json()["error"]) == (400, True)
    joined = dora.post("/join", {"token": token, "password": PASSWORD})
    assert joined.json() == {"go": "/"}
    assert dora.post("/join", {"token": token, "password": PASSWORD}).status_code == 400  # it works once
    dora.csrf = dora.client.get("/start").text.partition('name="csrf" content="')[2].partition('"')[0]
    # Neither the queue nor practice before the quiz.
    assert dora.client.get("/work", follow_redirects=False).headers["location"] == "/start?project=shop"
    assert dora.post("/work/next").json() == {"task": None, "go": "/start?project=shop"}
    assert dora.post("/start/next").json()["task"] is None
    page = dora.client.get("/start").text
    assert "the true one" in page
    assert "[x]" not in page
    said = dora.post("/start/quiz", {"answers": [0, 0]}).json()["say"]
    assert said.startswith("1 of 2 are right")
    assert dora.post("/start/quiz", {"answers": [1, 0]}).json() == {"go": "/start?project=shop"}
    for number in range(2):
        reply = dora.post("/start/next").json()
        assert reply["progress"] == f"{number + 1} of 2"
        outcome = right(reply["task"]["html"]) * (1 if number else -1)
        body = {"assignment": reply["task"]["assignment"], "decision": step(outcome)}
        feedback = dora.post("/start/practise", body).json()["feedback"]
        assert ("Right" in feedback, "Not quite" in feedback) == (bool(number), not number)
        assert "the first is true" in feedback
    assert dora.post("/start/next").json() == {"task": None, "go": "/work?project=shop"}
    assert dora.client.get("/start", follow_redirects=False).headers["location"] == "/work?project=shop"
    assert dora.post("/work/next").json()["task"]["kind"] == "pair"
    now = status(site.store, project)
    assert (now.given, now.people[0].gold) == (0, 0)  # practice is neither a label nor a test


def test_two_tries_and_then_a_manager_decides(site: TeamSite) -> None:
    project = new_shop(site.store, [pair(1)], guide=QUIZ)
    ann, boss = site.person("annotator", projects=[project]), site.person("manager", projects=[project])
    assert ann.post("/start/quiz", {"answers": [1]}).status_code == 400
    for _ in range(2):
        ann.post("/start/quiz", {"answers": [0, 0]})
    assert "Both tries are used" in ann.get("/start").text
    refused = ann.post("/start/quiz", {"answers": [1, 0]})
    assert refused.status_code == 400
    assert ann.person is not None
    assert "failed the quiz" in boss.get("/manage").text
    assert boss.post("/manage/pause", {"person": ann.person.id, "paused": False}).status_code == 200
    assert ann.post("/start/quiz", {"answers": [1, 0]}).json() == {"go": "/start?project=shop"}
    assert ann.get("/work").status_code == 200


def test_who_is_wrong_on_gold_is_paused_and_can_be_let_on(site: TeamSite) -> None:
    settings = Settings(overlap_share=0.0, gold_share=0.999, practice=0)
    drafts = [*(pair(n) for n in range(4)), *(gold_pair(n) for n in range(10, 40))]
    project = new_shop(site.store, drafts, settings=settings)
    ann, boss = site.person("annotator", projects=[project]), site.person("manager", projects=[project])
    reply, wrong = ann.post("/work/next").json(), 0
    while reply["task"] is not None:
        body = {"assignment": reply["task"]["assignment"], "decision": step(-right(reply["task"]["html"]))}
        reply, wrong = ann.post("/work/judge", body).json(), wrong + 1
    assert reply["go"] == "/start?project=shop"
    assert 8 <= wrong <= 10
    assert "paused for you" in ann.get("/start").text
    assert ann.post("/work/next").json()["task"] is None
    assert ann.person is not None
    boss.post("/manage/pause", {"person": ann.person.id, "paused": False})
    assert ann.post("/work/next").json()["task"] is not None


def disagreeing(site: TeamSite) -> tuple[Project, Visitor]:
    """Three items on which two people disagree, one on which they agree, and a ranking."""
    settings = Settings(wanted=2, overlap_share=0.0, gold_share=0.0, practice=0)
    project = new_shop(site.store, [*(pair(n) for n in range(4)), ranked(9, 3)], settings=settings)
    for name, sign in (("ann", -1), ("bob", 1)):
        person = site.person("annotator", f"{name}@example.org", [project]).person
        assert person is not None
        while (task := next_task(site.store, project, person)) is not None:
            if task.kind == "rank":
                order = tuple(1 + int(answer[0].content[7]) for answer in task.answers)
                decision = Decision(verdict="ranking", ranking=order if sign < 0 else tuple(4 - n for n in order))
            else:
                is_third = "question 3" in task.prompt[0].content
                is_first_left = task.answers[0][0].content.startswith("first")
                outcome = (-2 if is_first_left else 2) * (1 if is_third or sign < 0 else -1)
                words = f"because, says {name} <b>"
                decision = Decision(verdict="step", outcome=outcome, reason=words)
            judge(site.store, project, person, task.assignment, decision)
    return project, site.person("manager", projects=[project])


def exported(store: Store, project: Project, folder: Path, **options: object) -> list[dict]:
    out = folder / "out.jsonl"
    export_labels(store, project, out, force=True, **options)  # pyright: ignore
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_reviewer_decides_and_exports_take_it_while_old_ones_stay(site: TeamSite, tmp_path: Path) -> None:
    project, boss = disagreeing(site)
    as_of = status(site.store, project).as_of
    before = exported(site.store, project, tmp_path)
    assert [row["chosen"][0]["content"] for row in before if "question" in str(row["prompt"])] == ["first of 3"]
    page = boss.get("/review").text
    assert "4 disagreements" in page
    assert "because, says ann &lt;b&gt;" in page
    assert "ann@example.org" not in page
    query = select(tables.item.c.key).order_by(tables.item.c.id)
    keys = site.store.read(lambda connection: connection.scalars(query).all())
    assert boss.post("/review/decide", {"item": keys[0], "decision": step(3, reason="clear")}).status_code == 200
    assert boss.post("/review/decide", {"item": keys[1], "decision": {"verdict": "both_bad"}}).status_code == 200
    ruled = {"item": keys[4], "decision": {"verdict": "ranking", "ranking": [1, 2, 2]}}
    assert boss.post("/review/decide", ruled).status_code == 200
    asked = boss.post("/review/ask", {"item": keys[2], "words": "what if both are true?"})
    assert asked.status_code == 200
    assert boss.post("/review/ask", {"item": keys[2], "words": " "}).status_code == 400
    assert "0 disagreements" in boss.get("/review").text
    assert "what if both are true?" in boss.get("/manage").text
    rows = exported(site.store, project, tmp_path)
    compared = [row for row in rows if "question" in str(row["prompt"])]
    chosen = {row["prompt"][0]["content"]: row["chosen"][0]["content"] for row in compared}
    assert chosen == {"question 0": "second of 0", "question 3": "first of 3"}
    assert next(row for row in rows if "question 0" in str(row["prompt"]))["decided"] is True
    rankings = exported(site.store, project, tmp_path, kind="rankings")
    assert next(row["rank"] for row in rankings if "ranked" in str(row["prompt"])) == [1, 2, 2]
    assert exported(site.store, project, tmp_path, as_of=as_of) == before
    for settle in ("dawid_skene", "weighted"):
        rows = exported(site.store, project, tmp_path, settling=Settling(settle=settle))
        (decided,) = [row for row in rows if "question 0" in str(row["prompt"])]
        assert (decided["chosen"][0]["content"], decided["certainty"]) == ("second of 0", 1.0)
        assert not any("question 1" in str(row["prompt"]) for row in rows)
    assert tampered(site.store) == []
    # Decided again: the last one counts.
    boss.post("/review/decide", {"item": keys[0], "decision": step(-1)})
    assert "first of 0" in str(exported(site.store, project, tmp_path))


def test_gold_and_other_projects_cannot_be_decided(site: TeamSite) -> None:
    settings = Settings(overlap_share=0.0, gold_share=0.0, practice=0)
    project = new_shop(site.store, [gold_pair(1)], settings=settings)
    new_shop(site.store, [pair(1)], name="other")
    boss = site.person("manager", projects=[project])
    keys = site.store.read(lambda connection: connection.scalars(select(tables.item.c.key)).all())
    for key in (*keys, "0" * 32):
        answer = boss.post("/review/decide", {"item": key, "decision": step(1)})
        assert (answer.status_code, answer.json()["error"]) == (400, "there is no such item")


def test_who_manages_sees_people_agreement_flags_and_the_audit(site: TeamSite) -> None:
    project, boss = disagreeing(site)
    page = boss.get("/manage").text
    for words in ("10</b>of 10 labels", "person.new", "2</b>people have worked", "there is no gold"):
        assert words in page
    days = boss.get("/manage").text
    for words in ("<b>4</b>disagreements to review", "&lt; 1 day" if "&lt;" in days else "< 1 day", "<b>10</b></li>"):
        assert words in days
    people = boss.get("/manage").text
    for words in ("ann@example.org", "working", "pause"):
        assert words in people
    page = boss.get("/manage").text
    for question, agreement in status(site.store, project).agreement.items():  # what the command tells
        assert f'<th scope="row">{question}</th><td>' in page
        assert f"<b>{agreement.alpha:.2f}</b>" in page
    link = boss.post("/manage/invite", {"email": "eve@example.org", "role": "annotator"}).json()["html"]
    token = link.partition(f"{ORIGIN}/join#")[2][:64]
    assert site.anybody().post("/join", {"token": token, "password": PASSWORD}).status_code == 200
    assert boss.post("/manage/invite", {"email": "x@example.org", "role": "owner"}).status_code == 422
    assert boss.post("/manage/verify").json()["say"] == "Judgments and audit are as they were written."


def test_alpha_has_an_interval_where_enough_was_labelled_twice(site: TeamSite) -> None:
    settings = Settings(wanted=2, overlap_share=0.0, gold_share=0.0, practice=0)
    project = new_shop(site.store, [pair(n) for n in range(16)], settings=settings)
    for name in ("ann", "bob"):
        person = site.person("annotator", f"{name}@example.org", [project]).person
        assert person is not None
        number = 0
        while (task := next_task(site.store, project, person)) is not None:
            is_first_left = task.answers[0][0].content.startswith("first")
            outcome = (-2 if number % 2 else 3) * (1 if is_first_left else -1)
            judge(site.store, project, person, task.assignment, Decision(verdict="step", outcome=outcome))
            number += 1
    html = site.person("auditor", projects=[project]).get("/manage/agreement").text
    assert "<b>1.00</b>" in html
    assert "16 items" in html
    assert "100 %" in html


def test_the_download_is_the_export(site: TeamSite, tmp_path: Path) -> None:
    project, boss = disagreeing(site)
    answer = boss.post("/manage/export", {"kind": "rankings", "heldout": False})
    assert answer.headers["content-disposition"] == 'attachment; filename="shop-rankings-10.jsonl"'
    out = tmp_path / "out.jsonl"
    told = export_labels(site.store, project, out, kind="rankings")
    assert answer.content == out.read_bytes()
    assert answer.headers["x-kedge-hash"] == told.hash
    assert told.hash[:16] in boss.get("/manage").text


def test_my_gold_of_today_is_not_told(site: TeamSite) -> None:
    settings = Settings(overlap_share=0.0, gold_share=0.999, practice=0, pay=12.0, currency="EUR")
    drafts = [*(pair(n) for n in range(4)), *(gold_pair(n) for n in range(10, 40))]
    project = new_shop(site.store, drafts, settings=settings)
    ann = site.person("annotator", projects=[project])
    reply = ann.post("/work/next").json()
    for _ in range(3):
        site.clock.advance(600)
        decision = step(right(reply["task"]["html"])) | {"seconds": 600}
        body = {"assignment": reply["task"]["assignment"], "decision": decision}
        reply = ann.post("/work/judge", body).json()
    page = ann.get("/me").text
    assert "<b>3</b>today" in page
    assert "<b>6.00</b>EUR at 12 an hour" in page
    assert "known questions" not in page
    assert ann.person is not None
    site.clock.advance(24 * 3600)
    tomorrow = pace(site.store, project, ann.person)
    assert (tomorrow.today, tomorrow.total, tomorrow.gold_right) == (0, 3, tomorrow.gold)
    assert tomorrow.gold >= 2


def test_a_quiz_that_cannot_be_read_is_refused() -> None:
    assert split_quiz(GUIDE) == (GUIDE, ())
    text, quiz = split_quiz(QUIZ + "\n## After\nmore")
    assert len(quiz) == 2
    assert "After" in text
    for broken in (
        "## Quiz\nq\n- [x] a",
        "## Quiz\nq\n- [ ] a\n- [ ] b",
        "## Quiz\n- [x] a\n- [ ] b",
        "## Quiz\nwords",
    ):
        with pytest.raises(ConfigError, match="quiz"):
            split_quiz(broken)
