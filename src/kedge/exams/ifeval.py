"""IFEval (Zhou et al. 2023): prompts with instructions that a rule can check, by prompt and by instruction.

Strict takes the answer as it is. Loose takes it as followed if one of eight variants follows: without stars, without the
first line, the last, or both, each with and without stars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.core.errors import ConfigError
from kedge.core.suggest import did_you_mean
from kedge.exams.instructions import INSTRUCTIONS


def follows(instruction_id: str, kwargs: Mapping[str, Any], prompt: str, answer: str) -> bool:
    """Whether an answer follows one instruction, strictly. An unknown kind or a wrong argument is a ConfigError.

    >>> follows("punctuation:no_comma", {}, "Say hello.", "Hello there")
    True
    """
    if complaint := complaint_about(instruction_id, kwargs):
        raise ConfigError(complaint)
    return bool(answer.strip()) and INSTRUCTIONS[instruction_id].follows(kwargs, prompt, answer)


def variants(answer: str) -> list[str]:
    """The answer, and what is left of it without a line of greeting, a last line, or marks of emphasis.

    >>> variants("Sure!\\n*yes*")
    ['Sure!\\n*yes*', 'Sure!\\nyes', '*yes*', 'yes', 'Sure!', 'Sure!', '', '']
    """
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [text for shorter in cut for text in (shorter, shorter.replace("*", ""))]


def follows_loosely(instruction_id: str, kwargs: Mapping[str, Any], prompt: str, answer: str) -> bool:
    return any(follows(instruction_id, kwargs, prompt, variant) for variant in variants(answer))


def complaint_about(instruction_id: str, kwargs: Mapping[str, Any]) -> str:
    """What is wrong with an instruction as an item gives it; empty where nothing is.

    >>> complaint_about("punctuation:no_coma", {})
    "no instruction named 'punctuation:no_coma' (did you mean 'punctuation:no_comma'?)"
    """
    if instruction_id not in INSTRUCTIONS:
        return f"no instruction named {instruction_id!r}{did_you_mean(instruction_id, INSTRUCTIONS)}"
    return ""
