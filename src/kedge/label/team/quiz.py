"""The quiz at the end of a guideline: what people must know before they begin. Its right answers are in the guideline's
own file, so that both have one version; who labels is shown neither marks nor section.

    ## Quiz
    Of two answers one is longer, the other one is true. Which is better?
    - [ ] the longer one
    - [x] the true one
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kedge.core.errors import ConfigError

TRIES = 2
_HEADING = re.compile(r"^(#{1,6})\s+quiz\s*#*\s*$", re.IGNORECASE)
_ANY_HEADING = re.compile(r"^(#{1,6})\s")
_OPTION = re.compile(r"^\s*[-*]\s+\[([ xX])\]\s+(.+?)\s*$")
_FEWEST_OPTIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    text: str
    options: tuple[str, ...]
    right: int
    """The place of the right option."""


def split_quiz(guideline: str) -> tuple[str, tuple[Question, ...]]:
    r"""The guideline without its quiz, and the quiz; no questions where there is no section `Quiz`.

    >>> text, quiz = split_quiz("Be fair.\n## Quiz\nIs true better?\n- [x] yes\n- [ ] no\n")
    >>> text, quiz[0].options, quiz[0].right
    ('Be fair.\n', ('yes', 'no'), 0)
    """
    kept: list[str] = []
    section: list[tuple[int, str]] = []
    level = 0
    for number, line in enumerate(guideline.splitlines(keepends=True), start=1):
        if heading := _HEADING.match(line):
            level = len(heading[1])
        elif level and (other := _ANY_HEADING.match(line)) and len(other[1]) <= level:
            level = 0
            kept.append(line)
        elif level:
            section.append((number, line))
        else:
            kept.append(line)
    return "".join(kept), _questions(section)


def _questions(section: list[tuple[int, str]]) -> tuple[Question, ...]:
    questions: list[Question] = []
    words: list[str] = []
    options: list[str] = []
    right: list[int] = []

    def finish(number: int) -> None:
        if not words and not options:
            return
        if len(options) < _FEWEST_OPTIONS or len(right) != 1 or not words:
            raise ConfigError(
                f"the guideline's quiz, question before line {number}: found {len(options)} options, {len(right)} of "
                "them marked [x]; a question is a line of text, then two lines or more '- [ ] …', one of them '- [x] …'"
            )
        questions.append(Question(text=" ".join(words), options=tuple(options), right=right[0]))
        words.clear()
        options.clear()
        right.clear()

    number = 0
    for number, line in section:
        if option := _OPTION.match(line):
            if option[1] != " ":
                right.append(len(options))
            options.append(option[2])
        elif line.strip():
            if options:
                finish(number)
            words.append(line.strip())
    finish(number + 1)
    return tuple(questions)
