"""Checks of the order of roles in an item. They depend on roles only, so their results are cached.

A demonstration that does not end with the assistant, or an answer that does not begin with it, never gets here: the
reader calls it broken.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from kedge.data.examples import Demonstration, Example, Messages, Pair, Prompt, Ranking, Thumb

NamedAnswers = tuple[tuple[str, Messages], ...]
"""Answers, each with the name of its side: chosen, rejected, liked, disliked or answer."""


def prompt_and_answers(example: Example) -> tuple[Messages, NamedAnswers]:
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


def role_problems(example: Example, prompt: Messages, answers: NamedAnswers) -> frozenset[str]:
    """Codes of the rules that the item's roles break."""
    prompt_roles = tuple([message.role for message in prompt])
    if isinstance(example, Demonstration):
        return _order_problems((*prompt_roles, example.messages[-1].role))
    problems = _prompt_problems(prompt_roles)
    for _, answer in answers:
        problems |= _order_problems(tuple([message.role for message in answer])) - {"roles.assistant_first"}
    return problems


@lru_cache(maxsize=4096)
def _order_problems(roles: tuple[str, ...]) -> frozenset[str]:
    turns = [role for role in roles if role not in ("system", "developer")]
    problems = set[str]()
    if turns and turns[0] == "assistant":
        problems.add("roles.assistant_first")
    # Several tool results after one another are how parallel calls look.
    if any(role == following != "tool" for role, following in pairwise(roles)):
        problems.add("roles.repeated")
    return frozenset(problems)


@lru_cache(maxsize=4096)
def _prompt_problems(roles: tuple[str, ...]) -> frozenset[str]:
    is_wrong = bool(roles) and roles[-1] not in ("user", "tool")
    return _order_problems(roles) | ({"roles.prompt_end"} if is_wrong else set())
