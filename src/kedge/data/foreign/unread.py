"""Columns that a format leaves unread although they look like a verdict on the answer, or like a second answer.

Such a file would be trained on as something else: disliked answers imitated, pairs taken for bare prompts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from kedge.data.examples import Kind
from kedge.data.messages import is_text_or_messages, shown

_VERDICTS = """
label labels rating ratings score scores reward rewards thumb thumbs feedback vote votes upvote upvotes downvote
downvotes like likes dislike dislikes liked disliked preference preferences preferred winner better worse safe safer
unsafe safety toxic toxicity harmful quality helpfulness harmlessness correctness coherence correct rank ranks ranking
judgement judgment verdict grade stars approved accepted passed desirable sentiment good bad chosen rejected selected
"""
_ABOUT = """
model models source id ids name type kind date time by annotator annotators url version category categories reason
rationale text prompt template judge language hash sha256
"""
_VERDICT_WORDS, _ABOUT_WORDS = frozenset(_VERDICTS.split()), frozenset(_ABOUT.split())
_PAIR_WORDS = frozenset(["chosen", "rejected", "score", "scores", "reward", "rewards", "rating", "ratings"])
"""In the names of columns that say in numbers what a pair says already."""
_MOST_VERDICT_CHARACTERS = 30
_COUNT = "labels"
"""In an export of `kedge label` or of a judge's labels: how many labels an example has."""
_COUNTED_BY = frozenset(["as_of", "judges"])
"""Fields that such an export has too."""

_ANSWER = "(?:response|answer|output|completion|reply|generation|summary|candidate|message|conversation|text)"
_SECOND_ANSWER = re.compile(
    rf"(?:chosen|rejected|completion|response|output|non_?preferred_output|preferred_output"
    rf"|(?:chosen|rejected|good|bad|better|worse|preferred|dispreferred|non_?preferred|accepted|edited|revised"
    rf"|alternative|alt|original|best|worst|winning|losing)_{_ANSWER}s?"
    rf"|{_ANSWER}_?(?:[0-9]|[a-k]|one|two|first|second|good|bad|better|worse|best|worst|chosen|rejected)"
    rf"|(?:generated|model|predicted)_(?:{_ANSWER}|solution)"
    rf"|responses|outputs|completions|generations|candidates|replies|answers)"
)


def refusal(fields: Mapping[str, Any], read: frozenset[str], kind: Kind) -> str:
    """Why a row must not be read as `kind` with only the columns `read`; "" where nothing speaks against it."""
    for name in _suspects(frozenset(fields), read, kind):
        if name == _COUNT and not fields.keys().isdisjoint(_COUNTED_BY):
            continue
        value = fields[name]
        if _is_verdict_name(name) and _is_verdict(value):
            return (
                f"column '{name}' ({shown(value, 40)}) looks like a verdict, and nothing reads it: the file would be "
                f"taken for {kind}. Say what it is: columns: {{label: {name}}} (good or bad), "
                f"columns: {{score: {name}}} (ranks the answers to a prompt); or that it does not count: "
                f"columns: {{ignore: [{name}]}}"
            )
        is_repeated = any(fields.get(other) == value for other in read)
        if _SECOND_ANSWER.fullmatch(_plain(name)) and _is_answer(value) and not is_repeated:
            return (
                f"column '{name}' ({shown(value, 40)}) looks like another answer, and nothing reads it: the file would "
                f"be taken for {kind}. Say what the columns are, as in columns: {{prompt: …, chosen: …, rejected: "
                f"{name}}}; or that it does not count: columns: {{ignore: [{name}]}}"
            )
    return ""


@lru_cache(maxsize=4096)
def is_suspicious(name: str, kind: Kind) -> bool:
    """Whether the name alone says that a column beside examples of `kind` may be a verdict or another answer."""
    if kind == "pairs" and _PAIR_WORDS & set(_words(name)):
        return False
    return _is_verdict_name(name) or _SECOND_ANSWER.fullmatch(_plain(name)) is not None


@lru_cache(maxsize=1024)
def _suspects(names: frozenset[str], read: frozenset[str], kind: Kind) -> tuple[str, ...]:
    """The unread columns whose names alone are suspicious; most files have none, and then no value is looked at."""
    return tuple(sorted(name for name in names - read if is_suspicious(name, kind)))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()).strip("_")


def _words(name: str) -> list[str]:
    return _plain(name).split("_")


def _is_verdict_name(name: str) -> bool:
    words = _words(name)
    return bool(_VERDICT_WORDS & set(words)) and not _ABOUT_WORDS & set(words)


def _is_verdict(value: Any) -> bool:
    if isinstance(value, list):
        items = cast(list[Any], value)[:20]  # what `kedge score` writes is a list of mappings, and reads back
        return bool(items) and all(_is_verdict(item) and not isinstance(item, Mapping) for item in items)
    if isinstance(value, Mapping):
        return bool(value) and all(_is_verdict(item) for item in cast(Mapping[str, Any], value).values())
    if isinstance(value, str):
        return 0 < len(value.strip()) <= _MOST_VERDICT_CHARACTERS
    return isinstance(value, bool | int | float)


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return is_text_or_messages(value) or (isinstance(value, list) and bool(value))
