"""One kind of example as another: what a file serves as without being asked, and what only a conversion makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from kedge.core.errors import DataError
from kedge.data.examples import Demonstration, Example, Kind, Message, Pair, Prompt, Ranking, Thumb, prompt_of

# What reading does without being asked: taking the prompts out of a file invents nothing.
SERVES: Mapping[Kind, tuple[Kind, ...]] = {
    "pairs": ("prompts",),
    "rankings": ("prompts",),
    "thumbs": ("prompts",),
    "demonstrations": ("prompts",),
    "prompts": (),
}
CONVERTS: Mapping[Kind, tuple[Kind, ...]] = {
    "pairs": ("prompts", "demonstrations", "rankings", "thumbs"),
    "rankings": ("prompts", "demonstrations", "pairs"),
    "thumbs": ("prompts", "demonstrations"),
    "demonstrations": ("prompts",),
    "prompts": ("demonstrations",),
}


def kind_of(example: Example) -> Kind:
    match example:
        case Pair():
            return "pairs"
        case Ranking():
            return "rankings"
        case Thumb():
            return "thumbs"
        case Demonstration():
            return "demonstrations"
        case Prompt():
            return "prompts"


def as_kind(example: Example, kind: Kind) -> tuple[Example, ...]:
    """The examples of `kind` that one example holds: one, several (of a ranking), none (a disliked answer, a tie)."""
    if kind_of(example) == kind:
        return (example,)
    match kind, example:
        case "prompts", Demonstration(messages=(Message(role="text"),)):
            raise DataError("plain text has no prompt: it is learnt as a whole")
        case "prompts", _:
            return (Prompt(prompt=prompt_of(example), origin=example.origin, extra=example.extra),)
        case "demonstrations" | "thumbs", Pair(is_tie=True):
            return ()
        case "demonstrations", Pair():
            return _demonstrations(example, example.chosen)
        case "demonstrations", Ranking():
            return _demonstrations(example, example.answers[example.rank.index(min(example.rank))])
        case "demonstrations", Thumb():
            return _demonstrations(example, example.answer) if example.is_good else ()
        case "demonstrations", Prompt():
            return (_solved(example),)
        case "rankings", Pair(prompt=prompt, chosen=chosen, rejected=rejected):
            answers, rank = (chosen, rejected), (1, 1) if example.is_tie else (1, 2)
            return (Ranking(prompt=prompt, answers=answers, rank=rank, origin=example.origin, extra=example.extra),)
        case "thumbs", Pair(prompt=prompt, origin=origin, extra=extra):
            labelled = ((example.chosen, True), (example.rejected, False))
            return tuple(
                Thumb(prompt=prompt, answer=answer, is_good=is_good, origin=origin, extra=extra)
                for answer, is_good in labelled
            )
        case "pairs", Ranking():
            return _pairs(example)
        case _:
            own = kind_of(example)
            raise DataError(f"{own} cannot be turned into {kind}; they can become: {', '.join(CONVERTS[own])}")


def _demonstrations(example: Pair | Ranking | Thumb, answer: tuple[Message, ...]) -> tuple[Demonstration, ...]:
    if answer[-1].role != "assistant":
        raise DataError(f"the answer ends with a {answer[-1].role} message; a demonstration ends with the assistant's")
    return (Demonstration(messages=example.prompt + answer, origin=example.origin, extra=example.extra),)


def _solved(example: Prompt) -> Demonstration:
    """The worked `solution` where the row has one, else the bare answer."""
    solution = example.extra.get("solution")
    text = solution if isinstance(solution, str) else example.answer
    if text is None:
        raise DataError("the prompt has neither a 'solution' nor an 'answer' to demonstrate")
    messages = (*example.prompt, Message("assistant", text))
    extra = dict(example.extra) if example.answer is None else {"answer": example.answer, **example.extra}
    return Demonstration(messages=messages, origin=example.origin, extra=extra)


def _pairs(example: Ranking) -> tuple[Pair, ...]:
    """Every two answers of different place, the better one chosen; ties prefer nothing."""
    placed = sorted(zip(example.rank, example.answers, strict=True), key=lambda item: item[0])
    return tuple(
        Pair(prompt=example.prompt, chosen=better, rejected=worse, origin=example.origin, extra=example.extra)
        for (high, better), (low, worse) in combinations(placed, 2)
        if high != low
    )
