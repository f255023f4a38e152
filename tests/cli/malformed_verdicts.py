"""Files of people's and stored verdicts that are wrong, and what the message must say: `attempt(case)` is None where it
does, before the judge is asked anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kedge.commands.judge.reading import read_judge, read_people, read_stored
from kedge.core.errors import KedgeError

GOOD: dict[str, Any] = {
    "id": 1,
    "prompt": "Why?",
    "first": "Because.",
    "second": "So.",
    "verdicts": {"ann": "first", "ben": "tie"},
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    text: str
    words: tuple[str, ...]
    """All of them are in the message."""
    kind: str = "people"
    """`people`, `stored` or `judge`: which file it is."""


def row(**changed: Any) -> str:
    """A good row before one that is changed: the second line is wrong."""
    other = {name: value for name, value in {**GOOD, "id": 2, **changed}.items() if value is not ...}
    return f"{json.dumps(GOOD)}\n{json.dumps(other)}\n"


CASES: tuple[Case, ...] = (
    Case("no prompt", row(prompt=...), (":2: prompt: missing", "prompt, first, second, verdicts")),
    Case("a misspelt field", row(verdicts=..., verdict={"ann": "tie"}), (":2: verdicts: missing", "'verdict'")),
    Case("a misspelt verdict", row(verdicts={"ann": "frist"}), (":2: verdicts.ann:", "'frist'", "'first'")),
    Case("a verdict in capitals", row(verdicts={"ann": "FIRST"}), ("verdicts.ann: expected first, second or tie",)),
    Case("a number as verdict", row(verdicts={"ann": 1}), ("verdicts.ann: expected first, second or tie; found 1",)),
    Case("null as verdict", row(verdicts={"ann": None}), ("verdicts.ann: expected first, second or tie",)),
    Case("nobody", row(verdicts={}), (":2: verdicts: expected",)),
    Case("a list of verdicts", row(verdicts=["first"]), (":2: verdicts: expected",)),
    Case("an empty prompt", row(prompt="  "), (":2: prompt: expected text, or messages",)),
    Case("a number as prompt", row(prompt=3), (":2: prompt: expected text, or messages",)),
    Case("messages without a role", row(prompt=[{"content": "Why?"}]), (":2: prompt: expected text",)),
    Case("no messages", row(prompt=[]), (":2: prompt: expected text",)),
    Case("an answer that is none", row(first=True), (":2: first: expected the text of an answer, found True",)),
    Case("no second answer", row(second=None), (":2: second: expected the text of an answer",)),
    Case("three models", row(models=["a", "b", "c"]), (":2: models: expected the names of the two models",)),
    Case("an id that is none", row(id=[1]), (":2: id: expected text or a whole number",)),
    Case("not JSON", json.dumps(GOOD) + "\n{oops\n", (":2:",)),
    Case("an array in a row", json.dumps(GOOD) + "\n[1, 2]\n", (":2:",)),
    Case("empty", "", ("empty",)),
    Case("two problems", row(first=1) + row(second=2), ("2 problem(s)", ":2: first", ":4: second")),
    Case("stored: no id", '{"verdict": "tie"}\n', (":1: id: missing",), "stored"),
    Case("stored: an id of nobody", '{"id": 7, "verdict": "tie"}\n', (":1: id: '7' is in no row of",), "stored"),
    Case("stored: twice", '{"id": 1, "verdict": "tie"}\n' * 2, (":2: id: '1' was there before",), "stored"),
    Case("stored: no verdict", '{"id": 1, "better": "first"}\n', (":1: verdict: missing",), "stored"),
    Case("stored: letters", '{"id": 1, "verdict": "A"}\n', (":1: verdict: expected first, second or tie",), "stored"),
    Case("stored: p of 2", '{"id": 1, "verdict": "tie", "probability": 2}\n', (":1: probability:",), "stored"),
    Case("stored: p is text", '{"id": 1, "verdict": "tie", "probability": "1"}\n', (":1: probability:",), "stored"),
    Case("judge: no model", "url: http://localhost/v1\n", ("model",), "judge"),
    Case("judge: misspelt", "url: http://localhost/v1\nmodel: m\ntemprature: 1\n", ("line 3", "temperature"), "judge"),
    Case("judge: no url", "url: localhost\nmodel: m\n", ("line 1", "url"), "judge"),
    Case("judge: another kind", "kind: people\nurl: http://localhost/v1\nmodel: m\n", ("line 1", "kind"), "judge"),
    Case("judge: a list", "- url: http://localhost/v1\n", ("mapping",), "judge"),
    Case("judge: empty", "", ("empty", "url and model"), "judge"),
)  # fmt: skip


def attempt(case: Case) -> str | None:
    with TemporaryDirectory() as folder:
        people, file = Path(folder) / "human.jsonl", Path(folder) / "given.jsonl"
        people.write_text(json.dumps(GOOD) + "\n")
        file.write_text(case.text)
        try:
            if case.kind == "people":
                read_people(file)
            elif case.kind == "stored":
                read_stored(file, read_people(people), people)
            else:
                read_judge(file)
        except KedgeError as error:
            missing = [words for words in (str(file), *case.words) if words not in str(error)]
            if error.exit_code != 2:
                return f"ended with exit code {error.exit_code}"
            return f"the message lacks {missing}: {error}" if missing else None
        except Exception as error:  # anything else is a fault of ours
            return f"raised {error!r}"
        return "was taken as it is"
