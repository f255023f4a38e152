"""Chats: names stay hidden until the end, judgments become labels, and nobody sees another's chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from team_site import GUIDE, PLAIN, Clock, TeamSite, make_site, new_shop

from kedge.core.errors import ConfigError, DataError
from kedge.data.examples import Messages
from kedge.label.database import Store
from kedge.label.export import export_labels
from kedge.label.projects import Project, new_project
from kedge.web.app import Extras
from kedge.web.chatting import ChatModel, parse_chat_model

NAMES = ("policy-seven", "policy-eight")


@pytest.fixture
def talking(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[TeamSite, list[Messages]]:
    """A site with two models that repeat what they are asked, each in its way, and what they were asked."""
    asked: list[Messages] = []

    def answer(self: ChatModel, messages: Messages) -> str:
        asked.append(messages)
        return f"{'loud' if self.name == NAMES[0] else 'soft'} <b>{messages[-1].content}</b>"

    monkeypatch.setattr(ChatModel, "answer", answer)
    models = [ChatModel(name=name, url="http://127.0.0.1:1/v1") for name in NAMES]
    return make_site(store, clock, extras=Extras(chat_models=models)), asked


def export(store: Store, project: Project, folder: Path, kind: str) -> list[dict]:
    export_labels(store, project, folder / "out.jsonl", kind=kind, force=True)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_an_arena_hides_names_until_the_end_and_votes_are_pairs(talking, tmp_path: Path) -> None:
    site, asked = talking
    project = new_shop(site.store)
    ann = site.person("annotator", projects=[project])
    assert "Talk with a model" in ann.get("/chat").text
    replies = []
    for number in range(3):
        answers = ann.post("/chat/say", {"text": f"question {number}"}).json()["html"]
        assert answers.count("&lt;b&gt;question") == 4 + 2 * number  # as text and as Markdown, and those before
        assert ann.post("/chat/say", {"text": "too early"}).json()["error"] == "judge the answers first"
        loud_is_left = answers.rindex("loud") < answers.rindex("soft")
        body = {"step": "-2" if loud_is_left else "2", "reason": "louder"}
        replies += [answers, ann.post("/chat/vote", body).text]
        assert ann.post("/chat/vote", body).status_code == 400
    for text in (*replies, ann.get("/chat").text):
        assert not any(name in text for name in NAMES)
    ended = ann.post("/chat/end").json()["html"]
    assert all(name in ended for name in NAMES)
    assert "3 preferred</span><b>policy-seven" in ended
    assert ann.post("/chat/say", {"text": "again"}).json()["html"].count("again") == 6
    assert not any(name in ann.get("/chat").text for name in NAMES)
    # Both saw the same history: the answers that were better.
    assert [message.content for message in asked[4]] == [
        "question 0", "loud <b>question 0</b>", "question 1", "loud <b>question 1</b>", "question 2",
    ]  # fmt: skip
    pairs = export(site.store, project, tmp_path, "pairs")
    assert len(pairs) == 3
    assert {(row["chosen_model"], row["rejected_model"]) for row in pairs} == {NAMES}
    assert {row["margin"] for row in pairs} == {2 / 3}
    assert [len(row["prompt"]) for row in pairs] == [1, 3, 5]


def test_sides_are_drawn_for_every_turn(talking) -> None:
    site, _ = talking
    ann = site.person("annotator", projects=[new_shop(site.store)])
    left = set()
    for number in range(10):
        html = ann.post("/chat/say", {"text": f"question {number}"}).json()["html"]
        left.add(html.rindex("loud") < html.rindex("soft"))
        ann.post("/chat/vote", {"step": "0"})
    assert left == {True, False}


def test_nobody_sees_anothers_chat(talking) -> None:
    site, _ = talking
    project = new_shop(site.store)
    ann, bob = (site.person("annotator", f"{name}@example.org", [project]) for name in ("ann", "bob"))
    ann.post("/chat/say", {"text": "my secret"})
    assert "my secret" not in bob.get("/chat").text
    for path, body in (("vote", {"step": "1"}), ("thumb", {"thumb": "1"}), ("end", {})):
        assert bob.post(f"/chat/{path}", body).status_code == 400
    assert ann.post("/chat/end").status_code == 400  # a name needs a vote first


def test_one_model_gets_thumbs_reasons_and_better_answers(talking, tmp_path: Path) -> None:
    site, asked = talking
    project = new_shop(site.store, questions=("thumb", "edit"))
    ann = site.person("annotator", projects=[project])
    html = ann.post("/chat/say", {"text": "hello"}).json()["html"]
    assert "Is this a good answer?" in html
    body = {"thumb": "-1", "reason": "rude", "edit": "Good morning."}
    assert ann.post("/chat/vote", {"step": "1"}).status_code == 400
    assert ann.post("/chat/thumb", body).status_code == 200
    ann.post("/chat/say", {"text": "and now?"})
    assert [message.content for message in asked[-1]] == ["hello", "Good morning.", "and now?"]
    (thumb,) = export(site.store, project, tmp_path, "thumbs")
    assert "rude" not in str(thumb)
    (written,) = export(site.store, project, tmp_path, "demonstrations")
    assert "Good morning." in str(written)


def test_both_bad_makes_no_pair_and_equal_answers_make_none(talking, monkeypatch, tmp_path: Path) -> None:
    site, _ = talking
    project = new_shop(site.store)
    ann = site.person("annotator", projects=[project])
    ann.post("/chat/say", {"text": "x"})
    assert ann.post("/chat/vote", {"step": "both_bad"}).status_code == 200
    monkeypatch.setattr(ChatModel, "answer", lambda *_: "the same")
    ann.post("/chat/say", {"text": "y"})
    assert ann.post("/chat/vote", {"step": "0"}).status_code == 200
    assert export(site.store, project, tmp_path, "pairs") == []


@pytest.mark.parametrize(("name", "step"), [("ties", "0"), ("both_bad", "both_bad")])
def test_a_vote_that_the_project_refuses_is_not_offered(talking, name: str, step: str) -> None:
    site, _ = talking
    offers: dict[bool, str] = {}
    for accepts in (True, False):
        project = new_project(site.store, f"shop-{accepts}", {"pair": {name: accepts}}, GUIDE, PLAIN)
        ann = site.person("annotator", f"ann-{accepts}@example.org", [project])
        offers[accepts] = ann.post("/chat/say", {"text": "x"}).json()["html"]
        assert ann.post("/chat/vote", {"step": step}).status_code == (200 if accepts else 400)
    button = f'<input type="radio" name="step" value="{step}">'
    assert button in offers[True]
    assert button not in offers[False]
    assert '<input type="radio" name="step" value="1">' in offers[False]


def test_a_model_that_does_not_answer_is_not_named(store: Store, clock: Clock, monkeypatch) -> None:
    models = [ChatModel(name=name, url="http://127.0.0.1:9/v1") for name in NAMES]
    site = make_site(store, clock, extras=Extras(chat_models=models))
    project = new_shop(store)
    ann = site.person("annotator", projects=[project])
    answer = ann.post("/chat/say", {"text": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"] == "a model does not answer now; try again in a moment"
    monkeypatch.setattr(ChatModel, "answer", lambda *_: "fine")
    assert ann.post("/chat/say", {"text": "x"}).status_code == 200


@pytest.mark.parametrize("words", ["policy", "=http://127.0.0.1/v1", "a=ftp://x", "a=http://example.org/v1", "a="])
def test_a_chat_model_is_a_name_with_a_safe_address(words: str) -> None:
    with pytest.raises(ConfigError, match="--chat"):
        parse_chat_model(words, None)


def test_a_reply_is_read_as_openai_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx2

    from kedge.data.examples import Message

    sent: dict = {}

    def post(url: str, **options: object) -> httpx2.Response:
        sent.update(url=url, **options)
        body = {"choices": [{"message": {"content": "hi"}}]} if "good" in url else {"choices": []}
        return httpx2.Response(200, json=body, request=httpx2.Request("POST", url))

    monkeypatch.setattr(httpx2, "post", post)
    asked = (Message("user", "hello"),)
    assert ChatModel(name="m", url="https://good/v1", key="k").answer(asked) == "hi"
    assert sent["url"] == "https://good/v1/chat/completions"
    assert sent["headers"] == {"Authorization": "Bearer k"}
    assert sent["json"]["messages"] == [{"role": "user", "content": "hello"}]
    with pytest.raises(DataError, match="does not answer"):
        ChatModel(name="m", url="https://bad/v1").answer(asked)
