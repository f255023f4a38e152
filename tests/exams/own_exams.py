"""Exams of one's own that are wrong: what is written, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kedge.core.errors import KedgeError
from kedge.exams.catalogue import open_exam

SOUND = "kedge_exam: 1\nname: mine\nkind: open\nitems: mine.jsonl\n"
ITEM = '{"id": "1", "question": "2 + 2?", "answer": "4"}\n'


@dataclass(frozen=True)
class Case:
    name: str
    words: str
    exam: str = SOUND
    items: str = ITEM


CASES = (
    Case("unknown key", "line 5: chek: there is no such setting (did you mean 'check'?)", SOUND + "chek: number\n"),
    Case("unknown kind", "line 3: kind: Input should be 'choice', 'open' or 'instructions', found 'x'",
         SOUND.replace("open", "x")),
    Case("no name", "name: Field required", SOUND.replace("name: mine\n", "")),
    Case("name with a blank", "line 2: name:", SOUND.replace("mine\n", "my own\n", 1)),
    Case("not YAML", "mine.yaml:3: not valid YAML", "kedge_exam: 1\nname: [\n"),
    Case("a list", "an exam is a mapping of settings", "- a\n"),
    Case("no items file", "other.jsonl: cannot be read", SOUND.replace("mine.jsonl", "other.jsonl")),
    Case("empty items", "mine.jsonl: no items in it", items="\n"),
    Case("broken line", "mine.jsonl:2: not JSON", items=ITEM + "{\n"),
    Case("no such instruction", "mine.jsonl:1: no instruction named 'punctuation:no_coma' (did you mean",
         SOUND.replace("open", "instructions"),
         items='{"prompt": "Hi", "instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}\n'),
    Case("no question", "mine.jsonl:1: the field `question` is missing", items='{"answer": "4"}\n'),
    Case("no answer", "mine.jsonl:1: the field `answer` is missing", items='{"question": "4"}\n'),
    Case("no such check", "mine.jsonl:1: check: expected one of", items=ITEM.replace("}", ', "check": "guess"}')),
    Case("no number", "answer: expected a number, to be checked by number", SOUND + "check: number\n",
         items=ITEM.replace('"4"', '"four"')),
    Case("broken regex", "answer: expected a regular expression", SOUND + "check: regex\n",
         items=ITEM.replace('"4"', '"("')),
    Case("twice the same id", "mine.jsonl:2: id: '1' is also the id of", items=ITEM * 2),
    Case("no group", "mine.jsonl:1: the field `subject` is missing", SOUND + "groups: [subject]\n"),
    Case("answer is no choice", "answer: expected the number of a choice", SOUND.replace("open", "choice"),
         items='{"question": "?", "choices": ["a", "b"], "answer": 2}\n'),
)  # fmt: skip


def attempt(case: Case) -> str | None:
    """None where the exam is refused with these words."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "mine.yaml"
        file.write_text(case.exam)
        (Path(folder) / "mine.jsonl").write_text(case.items)
        try:
            open_exam(str(file))
        except KedgeError as error:
            return None if case.words in str(error) else f"said instead: {error}"
    return "taken as it is"
