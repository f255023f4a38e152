"""Items, people and decisions that are made up."""

from __future__ import annotations

from kedge.data.examples import Message, Messages
from kedge.label.accounts import Person, add_person
from kedge.label.database import Store
from kedge.label.incoming import Draft, DraftAnswer, Gold
from kedge.label.items import add_items
from kedge.label.projects import Project, Settings, new_project
from kedge.label.questions import Decision

MINUTE = 60_000
PLAIN = Settings(overlap_share=0.0, gold_share=0.0)


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.time = 1_800_000_000_000

    def __call__(self) -> int:
        return self.time

    def advance(self, minutes: float) -> None:
        self.time += round(minutes * MINUTE)


def says(role: str, text: str) -> Messages:
    return (Message("user" if role == "user" else "assistant", text),)


def pair(number: int, **options: object) -> Draft:
    answers = (
        DraftAnswer(text=says("assistant", f"first of {number}"), model="secret-model-a"),
        DraftAnswer(text=says("assistant", f"second of {number}"), model="secret-model-b"),
    )
    return Draft(prompt=says("user", f"question {number}"), answers=answers, **options)  # pyright: ignore


def gold_pair(number: int) -> Draft:
    return pair(number, gold=Gold(expected=-2, tolerance=1, explanation="the first is true"))


def ranked(number: int, count: int = 3) -> Draft:
    answers = tuple(DraftAnswer(text=says("assistant", f"answer {place} of {number}")) for place in range(count))
    return Draft(prompt=says("user", f"question {number}"), answers=answers)


def project_with(
    store: Store,
    drafts: list[Draft],
    *,
    settings: Settings = PLAIN,
    questions: tuple[str, ...] = ("pair", "rank", "thumb", "write", "axes", "edit"),
) -> Project:
    project = new_project(store, "shop", questions, "Prefer what is true.", settings)
    add_items(store, project, drafts)
    return project


def people(store: Store, count: int) -> list[Person]:
    return [add_person(store, f"person{number}@example.org") for number in range(count)]


def step(outcome: int, **options: object) -> Decision:
    return Decision(verdict="step", outcome=outcome, seconds=12.5, **options)  # pyright: ignore
