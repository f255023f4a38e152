"""Pages of the studio: uploads with their audit, curves, chats and what becomes of answers."""

from __future__ import annotations

import csv
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from studio_site import DEMO, StudioSite

from kedge.commands import studio as command
from kedge.core.errors import ConfigError
from kedge.data.examples import Message
from kedge.data.reading import read
from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.web.chat_models import ChatModel
from kedge.web.studio import chats
from kedge.web.studio.chats import Chat, ChatRoom, Place, Serving, Turn

SHOWN = "the-chat"
"""The chat that the page of these tests shows."""


def add_run(site: StudioSite, name: str, losses: list[float]) -> Path:
    folder = site.folder / "runs" / name
    with Run.create(folder, manifest=new_manifest(name=name, kind="sft", seed=1, settings={})) as run:
        for step, loss in enumerate(losses, start=1):
            run.log({"train/loss": loss, "train/lr": 0.1}, step)
        run.finish("done")
    return folder


def test_an_upload_is_kept_and_audited(site: StudioSite) -> None:
    reply = site.upload("mine.jsonl", DEMO.encode()).json()
    assert reply == {"file": "data/mine.jsonl"}
    assert "so few" in site.post("/data/audit", reply).json()["html"]
    assert (site.folder / "data" / "mine.jsonl").read_text() == DEMO
    assert "data/mine.jsonl" in site.get("/data").text
    assert sorted(path.name for path in (site.folder / "data").iterdir()) == ["demos.jsonl", "mine.jsonl"]


def test_an_audit_tells_which_lines_and_no_folder_of_the_machine(site: StudioSite, tmp_path: Path) -> None:
    for name, content in (("cut.jsonl", DEMO + '{"prompt": "x"\n' + DEMO), ("blank.jsonl", "\n")):
        (site.folder / "data" / name).write_text(content)
    site.studio.services = replace(site.studio.services, audit=partial(command._audit, site.project.folder))
    cut = site.post("/data/audit", {"file": "data/cut.jsonl"}).json()["html"]
    assert "data/cut.jsonl:2" in cut
    blank = site.post("/data/audit", {"file": "data/blank.jsonl"}).json()["html"]
    assert "data/blank.jsonl: the file is empty" in blank
    assert str(tmp_path) not in cut + blank


def test_the_limit_of_uploads_is_told_in_words(site: StudioSite) -> None:
    answer = site.upload("large.jsonl", b"x" * 1001)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("larger than 1000 bytes, the most that is taken here")
    assert not (site.folder / "data" / "large.jsonl").exists()


def test_runs_are_drawn_over_one_another(site: StudioSite) -> None:
    add_run(site, "one", [3.0, 2.0, 1.0])
    add_run(site, "two", [4.0, 5.0, 6.0])
    chosen = {"run": ["one", "two"], "metric": "train/loss"}
    assert site.get("/curves/metrics", run=["one", "two"]).json()["metrics"] == ["train/loss", "train/lr"]
    chart = site.get("/curves/chart", **chosen).text
    assert chart.count('class="curve') == 2
    assert 'data-first="1" data-last="3"' in chart
    zoomed = site.get("/curves/chart", **chosen, first=2, last=3).text
    assert 'data-first="2" data-last="3"' in zoomed
    assert "Pick runs" in site.get("/curves/chart", **chosen, first=50, last=60).text
    assert site.get("/curves/chart", run="three").status_code == 400


def test_curves_are_taken_along(site: StudioSite) -> None:
    add_run(site, "one", [3.0, float("nan"), 1.0])
    answer = site.get("/curves/export.csv", run="one", metric="train/loss")
    rows = list(csv.reader(io.StringIO(answer.text)))
    assert rows == [["run", "step", "train/loss"], ["one", "1", "3.0"], ["one", "2", "nan"], ["one", "3", "1.0"]]
    assert answer.headers["content-disposition"] == 'attachment; filename="curves.csv"'
    drawn = site.get("/curves/export.svg", run="one", metric="train/loss").text
    assert drawn.startswith("<svg xmlns")


def test_reports_reach_nothing(site: StudioSite) -> None:
    add_run(site, "one", [1.0])
    policy = site.get("/report", name="one").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "sandbox allow-scripts allow-downloads" in policy
    assert "Healthy." in site.get("/run/doctor", name="one").text
    assert "2 runs" in site.get("/compare", run=["one", "one"]).text


@pytest.fixture
def room(site: StudioSite, monkeypatch: pytest.MonkeyPatch) -> ChatRoom:
    """A chat with two models that answer with their names, and how often they were spoken to."""
    monkeypatch.setattr(
        ChatModel, "answer", lambda self, messages: f"{self.name} hears {len(messages)} and {messages[-1].content}"
    )
    ready = lambda self, name: Serving(name=name, model=ChatModel(name=name, url=""), state="ready")  # noqa: E731
    monkeypatch.setattr(ChatRoom, "_serving", ready)
    room = ChatRoom(site.studio)
    site.project.state.mkdir()
    room._write(Chat(models=("a", "b"), id=SHOWN))
    return room


def say(room: ChatRoom, text: str) -> Chat:
    """The next message of the page that shows the newest state."""
    return room.say(text, chat_id=SHOWN, turns=len(room._there().turns))


def place(turn: int, side: int) -> Place:
    return Place(chat=SHOWN, turn=turn, side=side)


def at(turn: int, side: int) -> dict[str, Any]:
    """The same place as a page sends it."""
    return {"chat": SHOWN, "turn": turn, "side": side}


def test_two_models_answer_and_each_goes_on_with_its_own(site: StudioSite, room: ChatRoom) -> None:
    say(room, "hello")
    chat = say(room, "again")
    assert chat.turns[1].answers == ("a hears 3 and again", "b hears 3 and again")
    assert chat.messages(1)[1] == Message("assistant", "b hears 1 and hello")
    assert ChatRoom(site.studio).chat() == chat  # another tab, another server
    html = site.get("/chat").text
    assert html.count("b hears 3 and again") == 1


def test_answers_become_data(site: StudioSite, room: ChatRoom) -> None:
    say(room, "hello")
    room.thumb(place(0, 0), is_good=True)
    room.thumb(place(0, 1), is_good=False)
    room.thumb(place(0, 1), is_good=False)  # twice is once
    chat = room.prefer(place(0, 1))
    assert len(chat.turns[0].sent) == 3
    thumbs = [json.loads(line) for line in (site.folder / chats.THUMBS).read_text().splitlines()]
    assert [row["label"] for row in thumbs] == [True, False]
    assert len(list(read(str(site.folder / chats.THUMBS), kind="thumbs"))) == 2
    (pair,) = read(str(site.folder / chats.PAIRS), kind="pairs")
    assert pair.chosen[-1].content == "b hears 1 and hello"


def test_a_changed_mind_takes_the_place_of_the_verdict_before(site: StudioSite, room: ChatRoom) -> None:
    (site.folder / chats.THUMBS).write_text('{"cut by a kill')
    say(room, "hello")
    room.thumb(place(0, 0), is_good=True)
    room.prefer(place(0, 1))
    room.thumb(place(0, 0), is_good=False)
    chat = room.prefer(place(0, 0))
    assert chat.turns[0].sent == ("disliked a → data/chat-thumbs.jsonl", "a is better → data/chat-pairs.jsonl")
    cut, thumb = (site.folder / chats.THUMBS).read_text().splitlines()
    assert (cut, json.loads(thumb)["label"]) == ('{"cut by a kill', False)
    (pair,) = map(json.loads, (site.folder / chats.PAIRS).read_text().splitlines())
    assert (pair["chosen"], pair["rejected"]) == chat.turns[0].answers


def test_a_verdict_pressed_twice_at_once_is_one_line(
    site: StudioSite, room: ChatRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(room, "hello")
    remember = ChatRoom._sent

    def slowly(self: ChatRoom, *arguments: Any, **options: Any) -> Chat:
        time.sleep(0.1)
        return remember(self, *arguments, **options)

    monkeypatch.setattr(ChatRoom, "_sent", slowly)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: room.thumb(place(0, 0), is_good=True), range(2)))
    assert len((site.folder / chats.THUMBS).read_text().splitlines()) == 1


def test_an_empty_answer_is_no_data(site: StudioSite, room: ChatRoom) -> None:
    room._write(Chat(models=("a", "b"), id=SHOWN, turns=(Turn(text="x", answers=("", "yes")),)))
    assert "is empty" in site.post("/chat/thumb", at(0, 0) | {"is_good": True}).json()["error"]
    assert "is empty" in site.post("/chat/prefer", at(0, 1)).json()["error"]
    assert not (site.folder / chats.THUMBS).exists()


def test_a_tab_that_shows_another_chat_says_nothing_of_this_one(site: StudioSite, room: ChatRoom) -> None:
    say(room, "hello")
    room._write(Chat(models=("c",), id="another", turns=(Turn(text="bye", answers=("c hears bye",)),)))
    for path, body in (
        ("thumb", at(0, 0) | {"is_good": True}),
        ("prefer", at(0, 0)),
        ("ask", at(0, 0)),
        ("badcase", at(0, 0) | {"why": "rude", "check": "lacks", "value": "x"}),
        ("say", {"chat": SHOWN, "turns": 1, "text": "and?"}),
        ("say", {"chat": "another", "turns": 0, "text": "and?"}),  # a turn came from another tab
    ):
        answer = site.post(f"/chat/{path}", body)
        assert (answer.status_code, "another tab" in answer.json()["error"]) == (409, True), path
    assert not (site.folder / chats.THUMBS).exists()


def test_answers_go_into_no_chat_that_began_meanwhile(
    site: StudioSite, room: ChatRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(room, "hello")
    newer = Chat(models=("c",), id="another")

    def answer(self: ChatModel, messages: object) -> str:
        if self.name == "a":
            room._write(newer)
        return "late"

    monkeypatch.setattr(ChatModel, "answer", answer)
    assert site.post("/chat/say", {"chat": SHOWN, "turns": 1, "text": "and?"}).status_code == 409
    assert room.chat() == newer


def test_what_is_no_pair_is_refused(site: StudioSite, room: ChatRoom) -> None:
    turns = (Turn(text="x", answers=("1", "2")), Turn(text="y", answers=("3", "4")))
    room._write(Chat(models=("a", "b"), id=SHOWN, turns=turns))
    assert "different things" in site.post("/chat/prefer", at(1, 0)).json()["error"]
    assert "no such answer" in site.post("/chat/prefer", at(7, 0)).json()["error"]
    assert "no such answer" in site.post("/chat/thumb", at(0, -1) | {"is_good": True}).json()["error"]


def test_an_answer_becomes_a_badcase(site: StudioSite, room: ChatRoom) -> None:
    say(room, "hello")
    body = at(0, 1) | {"why": "rude", "check": "lacks", "value": "hears"}
    assert "case-1" in site.post("/chat/badcase", body).json()["html"]
    assert site.post("/chat/badcase", body | {"why": ""}).status_code == 422


@pytest.mark.slow
def test_the_badcase_is_one_that_a_gate_replays(tmp_path: Path) -> None:
    from kedge.gate.badcases import read_badcases
    from kedge.web.studio.services import BadAnswer

    (tmp_path / ".kedge-studio").mkdir()
    bad = BadAnswer(
        prompt=[{"role": "user", "content": "hi"}], answer="no!", model="m", why="rude", check="lacks", value="no!"
    )
    identity = command._add_badcase(tmp_path, bad)
    (case,) = read_badcases(tmp_path / "badcases")
    assert (case.id, case.bad, case.why) == (identity, "no!", "rude")


def test_answers_are_kept_nowhere_outside_of_the_project(site: StudioSite, room: ChatRoom, tmp_path: Path) -> None:
    say(room, "hello")
    for name, path, body in (
        ("badcases", "badcase", {"why": "rude", "check": "lacks", "value": "hears"}),
        ("labels.db", "ask", {}),
        (chats.THUMBS, "thumb", {"is_good": True}),
        (chats.PAIRS, "prefer", {}),
    ):
        (tmp_path / Path(name).name).touch()
        (site.folder / name).symlink_to(tmp_path / Path(name).name)
        assert "leads out" in site.post(f"/chat/{path}", at(0, 0) | body).json()["error"], name
        assert not (tmp_path / Path(name).name).read_bytes()


def test_people_are_asked_about_a_pair_or_else_about_one_answer(site: StudioSite, room: ChatRoom) -> None:
    say(room, "hello")
    say(room, "again")  # each model goes on with its own answer: these two are no pair
    html = site.post("/chat/ask", at(0, 1)).json()["html"]
    assert "which answer is better: project asked-2" in html
    html = site.post("/chat/ask", at(1, 1)).json()["html"]
    assert "whether the answer of b is good: project asked-1" in html
    assert "no such answer" in site.post("/chat/ask", at(2, 0)).json()["error"]


def test_what_people_are_asked_is_in_the_store_of_the_folder(tmp_path: Path) -> None:
    from kedge.label.database import open_store
    from kedge.label.projects import find_project
    from kedge.label.status import status
    from kedge.web.studio.services import Question

    prompt = [{"role": "user", "content": "hi"}]
    for answers in ({"a": "hello", "b": "no"}, {"b": "no", "a": "hello"}, {"a": "hello"}):
        assert command._ask_people(tmp_path, Question(prompt=prompt, answers=answers)) == "studio"
    store = open_store(str(tmp_path / "labels.db"))
    project = find_project(store, "studio")
    assert set(project.questions) == {"pair", "thumb"}
    assert status(store, project).items == 2  # the pair was put twice
    store.close()


def test_the_address_stays_the_same(tmp_path: Path) -> None:
    token, port = command.kept_address(tmp_path / "state")
    assert port == 0
    (tmp_path / "state" / "address.json").write_text(json.dumps({"token": token, "port": 4321}))
    assert command.kept_address(tmp_path / "state") == (token, 4321)
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    (tmp_path / "state" / "address.json").write_text(json.dumps({"token": "short", "port": 4321}))
    assert command.kept_address(tmp_path / "state")[0] not in (token, "short")


def test_a_home_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, words in ((tmp_path, "a folder of its own"), (Path("/"), "a folder of its own")):
        with pytest.raises(ConfigError, match=words):
            command.project_folder(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="this is a file"):
        command.project_folder(tmp_path / "file")
    assert command.project_folder(tmp_path / "new").is_dir()


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from kedge.core.errors import PluginError

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(PluginError, match=r"pip install 'kedge\[studio\]'"):
        command.serve_studio(command.StudioSettings(folder=tmp_path), say=print)
