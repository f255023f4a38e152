"""`kedge chat`: turns, commands and verdicts, piped in; answers that are stopped; verdicts that stages read."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from kedge.cli.chat import app
from kedge.commands.chat.open import ChatRequest, open_chat
from kedge.commands.chat.session import Session
from kedge.core.errors import ConfigError
from kedge.data.examples import Pair, Thumb
from kedge.data.reading import read
from kedge.models.loading.tiny import make_tiny

Kedge = Callable[..., Any]
SHORT = ("--max-new-tokens", "8", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    make_tiny(tmp_path / "one", seed=5, hidden=32)
    make_tiny(tmp_path / "two", seed=6, hidden=32)


@pytest.fixture
def talk(kedge: Kedge, monkeypatch: pytest.MonkeyPatch) -> Kedge:
    """The command with these lines piped in."""

    def run(lines: list[str], *arguments: str) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return kedge("chat", *arguments, *SHORT)

    return run


def test_a_chat_with_one_model_and_its_thumbs(talk: Kedge, tmp_path: Path) -> None:
    lines = ["Hello", "/good", "/bad", "And now?", "/bad", "/save talk.jsonl", "/quit", "never read"]
    done = talk(lines, "./one", "--system", "Be kind.")
    assert done.code == 0
    assert done.out.count("written to chat-thumbs.jsonl") == 2
    assert done.err.count("error:") == 1
    assert "has its verdict already" in done.err
    first, second = list(read(str(tmp_path / "chat-thumbs.jsonl")))
    assert isinstance(first, Thumb)
    assert isinstance(second, Thumb)
    assert (first.is_good, second.is_good) == (True, False)
    assert [message.role for message in first.prompt] == ["system", "user"]
    assert [message.role for message in second.prompt] == ["system", "user", "assistant", "user"]
    assert second.prompt[2] == first.answer[0]
    (saved,) = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [message["role"] for message in saved["messages"]] == ["system", *["user", "assistant"] * 2]


def test_two_models_and_pairs_that_go_on_with_the_better_answer(talk: Kedge, tmp_path: Path) -> None:
    done = talk(["Hello", "/right", "More?", "/left", "Once more", "/tie", "/good"], "./one", "./two")
    assert "verdicts are /left, /right, /tie" in done.err
    assert [line.partition(":")[0] for line in done.out.splitlines() if line.startswith("./")].count("./two") == 3
    right, left, tie = list(read(str(tmp_path / "chat-pairs.jsonl")))
    assert isinstance(right, Pair)
    assert isinstance(left, Pair)
    assert isinstance(tie, Pair)
    assert (right.extra["models"], left.extra["models"]) == (["./two", "./one"], ["./one", "./two"])
    assert left.prompt == (*right.prompt, *right.chosen, left.prompt[-1])
    assert tie.prompt[-2] == left.chosen[0]
    assert (right.is_tie, tie.is_tie) == (False, True)


def test_the_file_of_a_chat_passes_the_audit(kedge: Kedge, talk: Kedge) -> None:
    talk(["Hello", "/right", "More?", "/left"], "./one", "./two")
    done = kedge("data", "check", "chat-pairs.jsonl")
    assert done.code == 0, done.out
    assert "chat-pairs.jsonl: pairs, read as pairs (prompt, chosen, rejected)" in done.out


def test_commands(talk: Kedge) -> None:
    lines = ["/temperature 0", "Hi", "/again", "/reset", "Hi", "/system Be brief.", "/temperature hot", "/god", "/help"]
    done = talk(lines, "./one")
    answers = [line for line in done.out.splitlines() if line.endswith("(cut off)")]
    assert len({*answers}) == 1  # at temperature 0 the same question has the same answer
    assert "a new conversation with this system message" in done.out
    assert "temperature: found 'hot', expected a number from 0 up" in done.err
    assert "/god: no command of a chat" in done.err
    assert "/good" in done.err
    assert "/temperature X" in done.out


@pytest.mark.parametrize("models", [("./one",), ("./one", "./two")])
def test_on_a_terminal_answers_are_streamed(
    models: tuple[str, ...], talk: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(app, "out", lambda: Console(file=screen, force_terminal=True, width=90, highlight=False))
    assert talk(["/temperature 0", "Hi", "/save talk.jsonl"], *models).code == 0
    answer = json.loads((tmp_path / "talk.jsonl").read_text())["messages"][-1]["content"]
    shown = Text.from_ansi(screen.getvalue()).plain
    assert "(cut off)" in shown
    if len(models) == 1:
        assert answer in screen.getvalue()
    else:
        assert all(model in shown for model in models)
        assert screen.getvalue().count("./two") > 2  # drawn anew while it grows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("./one", "./two", "./one"), "takes one model, or two to compare; found 3"),
        (("./one", "--feedback", "said.csv"), "the name must end in .jsonl"),
        (("./one", "--feedback", "pairs.jsonl"), "holds pairs, and this chat writes thumbs"),
        (("./nowhere",), "no model folder at"),
    ],
)
def test_what_is_refused(talk: Kedge, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    done = talk(["Hi"], *arguments)
    assert (done.code, words in done.err) == (2, True), done.err


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.chdir(tmp_path)
    request = ChatRequest(models=["./one"], temperature=0.0, max_new_tokens=200, device="cpu", dtype="float32")
    return open_chat(request)


def test_an_answer_comes_piece_by_piece(session: Session) -> None:
    shown: list[str] = []
    turn = session.ask("Hi", lambda number, text: shown.append(text), Event())
    assert len(shown) > 50
    assert all(turn.replies[0].text.startswith(text) for text in shown)
    assert shown[-1] == turn.replies[0].text


def test_ctrl_c_stops_the_answer_and_not_the_chat(session: Session) -> None:
    pieces, stop = 0, Event()

    def show(number: int, text: str) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 3:
            os.kill(os.getpid(), signal.SIGINT)
            stop.wait(60)  # the main thread takes the signal when it comes to it, which may be after 200 tokens

    reply = session.ask("Hi", show, stop).replies[0]
    assert reply.is_stopped
    assert 3 <= reply.tokens < 200
    with pytest.raises(ConfigError, match="half an answer is not judged"):
        session.command("/good")
    whole = session.again(lambda number, text: None, Event()).replies[0]
    assert (whole.is_stopped, whole.tokens) == (False, 200)
    assert whole.text.startswith(reply.text)
    assert len(session.turns) == 1


def test_a_line_that_a_kill_has_cut_stays_alone(session: Session, tmp_path: Path) -> None:
    (tmp_path / "chat-thumbs.jsonl").write_bytes(b'{"prompt": "a", "compl')
    session.verdicts.add({"prompt": "b", "completion": "c", "label": True})
    assert (tmp_path / "chat-thumbs.jsonl").read_text().splitlines()[1].startswith('{"prompt": "b"')


def test_a_conversation_that_fills_the_window(session: Session) -> None:
    from kedge.core.errors import DataError

    with pytest.raises(DataError, match=r"fills the window of 1,024; /reset begins a new one"):
        session.ask("a" * 1100, lambda number, text: None, Event())
    assert session.turns == []
