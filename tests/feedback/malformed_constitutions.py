"""Constitutions that are wrong or of another project's form, and what the error has to say."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from kedge.core.errors import ConfigError
from kedge.feedback.constitution import read_constitution

GOOD = """\
principles:
  - id: rude
    critique: Is the answer rude?
    revision: Make it polite.
    choice: Which answer is more polite?
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    name: str
    content: str
    expected: tuple[str, ...]


def _case(name: str, content: str, *expected: str) -> Malformed:
    return Malformed(name=name, content=content, expected=expected)


CASES = (
    _case("empty", "", "the file is empty", "`principles:`, a list"),
    _case("no principle", "principles: []\n", "line 1: principles", "at least 1"),
    _case("a principle without a choice", GOOD.replace("    choice: Which answer is more polite?\n", ""),
          "line 2: principles.0.choice: is required and missing"),
    _case("an empty critique", GOOD.replace("Is the answer rude?", "' '"), "line 3: principles.0.critique", "empty"),
    _case("a typo", GOOD.replace("critique:", "critque:"), "line 3: principles.0.critque", "did you mean 'critique'"),
    _case("a weight of nothing", f"{GOOD}    weight: 0\n", "line 6: principles.0.weight", "greater than 0, found 0"),
    _case("an endless weight", f"{GOOD}    weight: .inf\n", "line 6: principles.0.weight", "found inf"),
    _case("an id with a blank", GOOD.replace("id: rude", "id: very rude"), "line 2: principles.0.id", "very rude"),
    _case("the same id twice", GOOD + GOOD.partition("\n")[2], "line 6: principles.1.id: 'rude' stands twice"),
    _case("a number as request", GOOD.replace("Make it polite.", "7"), "line 4: principles.0.revision: must be text"),
    _case("text for a list", "principles: be nice\n", "line 1: principles: must be a list, found 'be nice'"),
    _case("not YAML", "principles: [\n", "not valid YAML"),
    _case("Anthropic's critiques and revisions",
          '{"harmful0": {"prompt": "What is wrong?", "edit_request": "Mend it."}}',
          "1 entries stand below their names", "'prompt' is called `critique` here",
          "'edit_request' is called `revision`", "no entry has a `choice`", "a constitution of Kedge is"),
    _case("a list of questions, as for comparisons", '["Which is less harmful?", "Which is kinder?"]',
          "found a list at the top", "a constitution of Kedge is `principles:`"),
    _case("a list of critics", '{"constitutions": [{"critic": "What is wrong?", "revision": "Mend it."}]}',
          "in the list 'constitutions'", "'critic' is called `critique` here", "no entry has a `choice`"),
    _case("principles of people in prose", "We are kind.\n", "found 'We are kind.' at the top", "of Kedge is"),
)  # fmt: skip


def attempt(case: Malformed) -> str | None:
    """None where the file is refused in the expected words, else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rules.yaml"
        file.write_text(case.content, encoding="utf-8")
        try:
            read_constitution(file)
        except ConfigError as error:
            absent = [part for part in (str(file), *case.expected) if part not in str(error)]
            return f"{absent} not in: {error}" if absent else None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "it was read"
