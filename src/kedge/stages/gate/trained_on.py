"""Which badcases a model has been trained on: those show that it has learnt them by heart, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kedge.core.errors import KedgeError
from kedge.data.auditing.ngrams import GramCollector, Overlap
from kedge.data.auditing.role_order import prompt_and_answers
from kedge.data.examples import Messages
from kedge.data.reading import read


def trained_on(texts: Sequence[str], files: Iterable[Path], *, note: Callable[[str], None]) -> set[int]:
    """The places of the texts that occur in these files: 13 words in a row, or the whole of a shorter one.

    Files that cannot be read are noted: nothing is known of them.
    """
    # Each text once: words that many of them share are taken for boilerplate.
    distinct = list(dict.fromkeys(texts))
    collector = GramCollector()
    for number, text in enumerate(distinct):
        collector.add(number, text, ())
    grams = collector.index()
    numbers: set[int] = set()
    for file in files:
        overlap = Overlap(grams)
        try:
            for row, example in enumerate(read(file, is_strict=False)):
                prompt, answers = prompt_and_answers(example)
                overlap.add(row, _text(prompt), [_text(answer) for _, answer in answers])
        except (KedgeError, OSError) as error:
            note(f"{file} cannot be looked into for badcases: {error}")
            continue
        overlap.items()
        numbers.update(grams.prompts_with(overlap.is_hit).tolist())
    known = {distinct[number] for number in numbers}
    return {place for place, text in enumerate(texts) if text in known}


def _text(messages: Messages) -> str:
    return "\n".join(message.content for message in messages if message.role != "system")
