"""A constitution: the principles by which a model criticises, revises and compares answers (Bai et al. 2022).

It is a YAML file of the user's own, trusted as a recipe is. `recipes/rules/constitution.yaml` has twenty principles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, ValidationError

from kedge.core.errors import ConfigError
from kedge.core.files import hash_json
from kedge.core.seeds import seed_for
from kedge.core.settings import Section
from kedge.core.yaml import problems
from kedge.core.yaml.sections import problems_of
from kedge.core.yaml.source import Tree, read_tree

FORM = (
    "a constitution of Kedge is `principles:`, a list whose entries have an `id`, a `critique` (asks what is wrong "
    "with an answer), a `revision` (asks for a better one) and a `choice` (asks which of two answers is better), and "
    "may have a `weight` and an `axis`; recipes/rules/constitution.yaml is one"
)
FOREIGN_NAMES: Mapping[str, str] = {
    "prompt": "critique",
    "critic": "critique",
    "critique_request": "critique",
    "edit_request": "revision",
    "revision_request": "revision",
    "question": "choice",
    "comparison": "choice",
    "name": "id",
}
"""What other projects call the parts of a principle, and what they are called here."""
_TEXTS = ("critique", "revision", "choice")
_NAME = r"^[a-z0-9][a-z0-9_-]*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principle:
    """One principle. `weight` is how often it is drawn beside others, `axis` what reports put together."""

    id: str
    critique: str
    revision: str
    choice: str
    weight: float = 1.0
    axis: str = "overall"


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return " ".join(text.split())


RequestText = Annotated[str, Field(max_length=2000), AfterValidator(_filled)]


class PrincipleSettings(Section):
    """A principle, as it is written."""

    id: str = Field(pattern=_NAME, max_length=60)
    """What results call it."""
    critique: RequestText
    """Asks what is wrong with an answer."""
    revision: RequestText
    """Asks for an answer without that."""
    choice: RequestText
    """Asks which of two answers is better."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """How often it is drawn, beside the weights of the others."""
    axis: str = Field(default="overall", pattern=_NAME, max_length=60)
    """Which principles belong together in reports."""


class ConstitutionSettings(Section):
    """A file of principles."""

    principles: list[PrincipleSettings] = Field(min_length=1, max_length=1000)


def read_constitution(path: Path | str) -> tuple[Principle, ...]:
    """The principles of a file. All that is wrong is said at once, each with its line and field; of a file in the form
    of another project, what it lacks."""
    file = Path(path)
    try:
        tree = read_tree(file, noun="constitution", start=FORM)
    except ConfigError as error:
        raise ConfigError(f"{error}; {FORM}" if str(error).endswith("at the top") else str(error)) from None
    if foreign := _foreign_entries(tree.values):
        raise ConfigError(f"{file}: {_what_it_lacks(*foreign)}; {FORM}")
    try:
        settings = ConstitutionSettings.model_validate(tree.values)
    except ValidationError as error:
        raise problems_of(file, problems.lines(error, ConstitutionSettings, tree)) from None
    if repeated := _repeated(settings.principles, tree):
        raise problems_of(file, repeated)
    return tuple(Principle(**principle.model_dump()) for principle in settings.principles)


def draw(principles: Sequence[Principle], *, seed: int, key: str) -> Principle:
    """One of them, by their weights; the same for the same seed and key, whatever else is drawn.

    >>> rude = Principle(id="rude", critique="Is it rude?", revision="Make it polite.", choice="Which is polite?")
    >>> wrong = Principle(id="wrong", critique="Is it wrong?", revision="Mend it.", choice="Which is right?", weight=3)
    >>> ids = [draw([rude, wrong], seed=7, key=f"prompt {number}").id for number in range(1000)]
    >>> 700 < ids.count("wrong") < 800 and ids[5] == draw([rude, wrong], seed=7, key="prompt 5").id
    True
    """
    if not principles:
        raise ConfigError("there is no principle to draw from")
    bounds = list(accumulate(principle.weight for principle in principles))
    place = Random(seed_for(seed, f"principle {key}")).random() * bounds[-1]
    return next(principle for principle, bound in zip(principles, bounds, strict=True) if place < bound)


def fingerprint(principles: Sequence[Principle]) -> str:
    """A hash of all principles: other words are another constitution, comments and line breaks are not."""
    return hash_json([asdict(principle) for principle in principles])


def _repeated(principles: Sequence[PrincipleSettings], tree: Tree) -> list[tuple[int, str]]:
    ids = [principle.id for principle in principles]
    return [
        tree.problem(("principles", place, "id"), f"{name!r} stands twice: results are told apart by it")
        for place, name in enumerate(ids)
        if name in ids[:place]
    ]


def _foreign_entries(values: Mapping[str, Any]) -> tuple[str, list[Mapping[str, Any]]] | None:
    """The entries of a file that has principles in another form, and where they stand; None where it is one of ours."""
    if "principles" in values:
        return None
    for key, value in values.items():
        if isinstance(value, list) and (entries := _mappings(cast("list[Any]", value))):
            return f"in the list {key!r}", entries
    entries = _mappings(list(values.values()))
    return ("below their names", entries) if entries and len(entries) == len(values) else None


def _mappings(values: Sequence[Any]) -> list[Mapping[str, Any]]:
    return [cast("Mapping[str, Any]", value) for value in values if isinstance(value, Mapping)]


def _what_it_lacks(where: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """
    >>> _what_it_lacks("below their names", [{"prompt": "What is wrong?", "edit_request": "Mend it."}])
    "1 entries stand below their names, and not in `principles`: 'prompt' is called `critique` here, 'edit_request' is \
called `revision`; no entry has a `choice`"
    """
    fields = list(dict.fromkeys(str(field) for entry in entries for field in entry))
    renamed = [f"{field!r} is called `{FOREIGN_NAMES[field]}`" for field in fields if field in FOREIGN_NAMES]
    if renamed:
        renamed[0] += " here"
    present = {FOREIGN_NAMES.get(field, field) for field in fields}
    lacking = [f"`{text}`" for text in _TEXTS if text not in present]
    parts = [", ".join(renamed)] if renamed else []
    parts += [f"no entry has a {' nor a '.join(lacking)}"] if lacking else []
    return f"{len(entries):,} entries stand {where}, and not in `principles`: {'; '.join(parts) or 'move them there'}"
