"""What people prefer of given pairs of answers: for win rates of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from kedge.data.examples import Messages
from kedge.label import tables
from kedge.label.audit import last_seq
from kedge.label.beliefs import read_beliefs
from kedge.label.database import Store
from kedge.label.export import read_labelled
from kedge.label.incoming import Draft
from kedge.label.progress import Progress
from kedge.label.projects import Project
from kedge.label.settle import SettleKind

_Pair = tuple[Messages, Messages, Messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """For the first answer of a pair: 1, 0, or ½ where it is a tie or both are bad; and the probability behind it."""

    value: float
    probability: float


def preferences(
    store: Store, project: Project, drafts: Sequence[Draft], progress: Progress, settle: SettleKind
) -> list[Preference | None]:
    """For each pair what people prefer, in the order of its own answers; None where nobody has said."""

    def read(connection: Connection) -> dict[_Pair, Preference]:
        as_of = last_seq(connection, tables.judgment)
        beliefs = read_beliefs(connection, project, as_of, settle)
        preferred: dict[_Pair, Preference] = {}
        for labelled in read_labelled(connection, project, as_of, items=progress.items, is_decided=True):
            settled = beliefs.of_pair(labelled.judgments)
            first, second = labelled.answers
            if settled is None or settled.better is None:
                value, probability = 0.5, 0.5
            else:
                value = 1.0 - settled.better
                probability = settled.certainty if settled.better == 0 else 1 - settled.certainty
            preferred[labelled.prompt, first, second] = Preference(value=value, probability=probability)
            preferred[labelled.prompt, second, first] = Preference(value=1 - value, probability=1 - probability)
        return preferred

    preferred = store.read(read)
    pairs = [(draft.prompt, draft.answers[0].text, draft.answers[1].text) for draft in drafts]
    return [preferred.get(pair) for pair in pairs]
