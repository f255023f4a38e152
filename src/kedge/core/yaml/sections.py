"""A YAML file as one section of settings: all that is wrong with it at once, each with its line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kedge.core.errors import ConfigError
from kedge.core.settings import Section
from kedge.core.yaml import problems
from kedge.core.yaml.source import Tree, read_tree

SectionT = TypeVar("SectionT", bound=Section)
MAX_LISTED = 20
"""Problems that a message lists; the others are counted."""


def read_section(file: Path, section: type[SectionT], *, noun: str, start: str) -> tuple[SectionT, Tree]:
    """The settings in a file, and where each was written. Messages call the file a `noun`; `start` says what to begin
    with where it is empty."""
    tree = read_tree(file, noun=noun, start=start)
    try:
        return section.model_validate(tree.values), tree
    except ValidationError as error:
        raise problems_of(file, problems.placed_lines(error, section, tree)) from None


def problems_of(file: Path, noted: list[tuple[int, str]]) -> ConfigError:
    """One error with all problems of a file, by line."""
    ordered = sorted(dict.fromkeys(noted), key=lambda problem: problem[0])
    listed = "\n".join(f"  {text}" for _, text in ordered[:MAX_LISTED])
    if len(ordered) > MAX_LISTED:
        listed += f"\n  … and {len(ordered) - MAX_LISTED:,} more"
    return ConfigError(f"{file}: {len(ordered):,} problem(s)\n{listed}")
