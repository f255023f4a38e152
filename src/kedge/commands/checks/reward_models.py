"""Reward models before training: of a stage by its settings, of a folder by its files; no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.commands.checks.records import Asked, Outcome, fatal
from kedge.core.errors import KedgeError
from kedge.core.findings import Finding
from kedge.core.stage import PromptUse
from kedge.core.suggest import did_you_mean
from kedge.rewards.settings import ModelSource
from kedge.stages.reward.settings import RewardSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kedge.models.reward.inspect import InspectedReward
    from kedge.recipe.schema import Recipe
    from kedge.recipe.wiring import Link


def check_reward_model(
    leaf: ModelSource,
    link: Link,
    recipe: Recipe,
    asked: Asked,
    use: PromptUse,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Outcome:
    """A reward model: of a stage by its settings, of a folder by its files."""
    longest = None if asked.longest is None else asked.longest + use.max_new_tokens
    if link.stage:
        settings = recipe.stages[link.stage]
        shared = Outcome(what="reward model", subject=link.stage, result=f"what {link.stage} makes")
        if not isinstance(settings, RewardSettings):
            return shared
        findings = [
            *_objective(leaf, settings.objectives),
            *_combine(leaf, settings.members),
            *_length(longest, settings.max_length, settings.too_long),
        ]
        return replace(shared, findings=tuple(findings))
    from kedge.models.reward.inspect import inspect_reward
    from kedge.stages.rl.judge import find_judge

    shared = Outcome(what="reward model", subject=link.value, result="cannot be used")
    try:
        judge = inspect_reward(find_judge(link.source()))
    except KedgeError as error:
        return replace(shared, findings=(fatal("reward.model", str(error)),))
    findings = [
        *_objective(leaf, judge.facts.objectives),
        *_combine(leaf, judge.members),
        *_length(longest, judge.max_length, judge.facts.truncate),
        *(_same_language(judge, tokenizer) if tokenizer is not None else ()),
    ]
    members = f"{judge.members} members, " if judge.members > 1 else ""
    reads = f"reads {judge.max_length:,} tokens" if judge.max_length else "readable"
    return replace(shared, result=members + reads, findings=tuple(findings))


def _objective(leaf: ModelSource, known: Sequence[str]) -> Iterator[Finding]:
    if (leaf.objective is None and len(known) == 1) or leaf.objective in known:
        return
    found = f"found {leaf.objective!r}{did_you_mean(leaf.objective, known)}" if leaf.objective else "none is named"
    yield fatal(
        "reward.objective",
        f"the reward model has the objectives {', '.join(known)}; {found}",
        f"set objective to one of them: {{kind: model, from: {leaf.place}, objective: {known[0]}}}",
    )


def _combine(leaf: ModelSource, members: int) -> Iterator[Finding]:
    if leaf.combine is not None and members == 1:
        yield fatal(
            "reward.combine",
            f"combine: {leaf.combine.kind} was asked for, and {leaf.place} is one reward model",
            "leave `combine` out, or train an ensemble (members: 3)",
        )


def _length(longest: int | None, max_length: int | None, truncate: str) -> Iterator[Finding]:
    """An answer that was cut off is one token longer for the judge, who cannot do without its end."""
    is_refusing = truncate == "refuse"
    if longest is None or max_length is None or longest + is_refusing <= max_length:
        return
    message = f"prompt and answer may have {longest:,} tokens, and the reward model reads {max_length:,}"
    if is_refusing:
        yield fatal("reward.window", f"{message} and refuses longer texts", "allow fewer tokens, or too_long: cut")
    else:
        yield Finding(
            level="warning", code="reward.window", message=f"{message}; longer texts lose their beginning there"
        )


def _same_language(judge: InspectedReward, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Whether the reward model reads tokens as the policy writes them, and the format that it was trained on."""
    from kedge.data.template import template_hash
    from kedge.stages.rl.reward import tokenizer_hash

    try:
        own_template, own_tokens = template_hash(judge.tokenizer), tokenizer_hash(judge.tokenizer)
    except KedgeError as error:
        yield fatal("reward.template", f"{Path(judge.place).name}: {error}")
        return
    if judge.facts.template_hash and own_template != judge.facts.template_hash:
        yield Finding(
            level="warning",
            code="reward.template",
            message="the chat template in the reward model's folder is not the one that it was trained on, so its "
            "scores mean little",
            fix="put back the tokenizer files that were saved with the model, or train it again",
        )
    differing = [
        name
        for name, is_same in (
            ("tokenizer", own_tokens == tokenizer_hash(tokenizer)),
            ("chat template", own_template == template_hash(tokenizer)),
        )
        if not is_same
    ]
    if differing:
        yield Finding(
            level="info",
            code="reward.on_text",
            message=f"the reward model's {' and '.join(differing)} differ{'s' * (len(differing) == 1)} from the "
            "policy's: it reads the answers as text",
        )
