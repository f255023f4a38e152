"""The order of roles in an item, and what is wrong with it. Depends on roles only, so answers are remembered.

A demonstration that does not end with the assistant, or an answer that does not begin with it, never gets here: the
reader calls it broken.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from kedge.data.examples import Demonstration, Example, Messages, Pair, Prompt, Ranking, Thumb

Answers = tuple[tuple[str, Messages], ...]


def parts(example: Example) -> tuple[Messages, Answers]:
    """The prompt, and every answer with the name of its side."""
    match example:
        case Pair():
            return example.prompt, (("chosen", example.chosen), ("rejected", example.rejected))
        case Demonstration():
            return example.messages[:-1], (("answer", example.messages[-1:]),)
        case Thumb():
            return example.prompt, (("liked" if example.is_good else "disliked", example.answer),)
        case Ranking():
            return example.prompt, tuple(("answer", answer) for answer in example.answers)
        case Prompt():
            return example.prompt, ()


def role_problems(example: Example, prompt: Messages, answers: Answers) -> frozenset[str]:
    """Codes of the rules that the item's roles offend."""
    given = tuple([message.role for message in prompt])
    if isinstance(example, Demonstration):
        return _order_problems((*given, example.messages[-1].role))
    found = _prompt_problems(given)
    for _, answer in answers:
        found |= _order_problems(tuple([message.role for message in answer])) - {"roles.assistant_first"}
    return found


@lru_cache(maxsize=4096)
def _order_problems(roles: tuple[str, ...]) -> frozenset[str]:
    spoken = [role for role in roles if role != "system"]
    found = set[str]()
    if spoken and spoken[0] == "assistant":
        found.add("roles.assistant_first")
    # Several tool results after one another are how parallel calls look.
    if any(one == other != "tool" for one, other in pairwise(roles)):
        found.add("roles.repeated")
    return frozenset(found)


@lru_cache(maxsize=4096)
def _prompt_problems(roles: tuple[str, ...]) -> frozenset[str]:
    is_wrong = bool(roles) and roles[-1] not in ("user", "tool")
    return _order_problems(roles) | ({"roles.prompt_end"} if is_wrong else set())
