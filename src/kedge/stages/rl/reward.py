"""From a recipe's `reward` to a source that scores rollouts: stages and folders resolved, reward models opened.

A reward model reads the sampled tokens themselves where its tokenizer and chat template are the policy's, and the
answer as text, rendered in its own template, elsewhere. Both ways it reads what it was trained on: a text that ends in
an end-of-turn token and is no longer than the longest of its training. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, ModelError
from kedge.core.files import hash_json
from kedge.core.protocols import RewardSource
from kedge.core.records import Rollouts
from kedge.core.world import ALONE, World
from kedge.data.examples import Message, Role
from kedge.data.template import encode_conversation, encode_prompt, stop_ids, template_hash
from kedge.models.reward.ensemble import Ensemble, Scorer, combined, disagreement
from kedge.rewards.build import Wiring, build
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import CountedSource, FailureCounter, Reward
from kedge.rewards.model import OnTokens, objective_index, on_text
from kedge.rewards.rollouts import FromText, PromptRecord, answers_of
from kedge.rewards.settings import FailureSettings, MixSource, ModelSource, RewardSourceSettings
from kedge.stages.rl.judge import Judge, LoadJudge, combining, is_cut, load_standing, sharded, template_findings
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PROBE = (Message("user", "Hi"), Message("assistant", "Yo"))


def open_reward(
    context: Context,
    settings: RewardSourceSettings | str,
    *,
    field: str,
    tokenizer: PreTrainedTokenizerBase,
    cases: Callable[[int], PromptRecord],
    failures: FailureSettings,
    device: str,
    fields: frozenset[str] | None = None,
    max_tokens: int | None = None,
    load: LoadJudge | None = None,
) -> Reward:
    """The source that the settings at `field` ask for; a plain string is a reward model, by stage or folder.

    `tokenizer` is the policy's, `cases` knows the prompt of each group, and `fields` are those of the prompts' records
    (`fields_of`), from which the parameters of a function are filled. `max_tokens`, where it is known, is the most that
    prompt and answer can have, and a reward model that cannot read so many is refused or warned of. `load` opens the
    judge of a place where that is not a matter of reading a folder: it may share weights with the policy.
    """
    read = partial(answers_of, prompt_of=cases, decode=partial(decoded, tokenizer))

    open_judge = load or partial(load_standing, device=device)

    def open_model(source: ModelSource, counter: FailureCounter) -> RewardSource:
        unread = context.world.mesh is not None
        judge = combining(open_judge(source.place, unread=unread), source.combine)
        _check_window(context, judge, counter.source, max_tokens)
        for finding in template_findings(judge):
            context.event("warning", "reward.template", f"{counter.source}: {finding.message}", **finding.evidence)
        obstacle = _obstacle(judge, tokenizer, max_tokens)
        if obstacle is None:
            judge = judge if context.world.mesh is None else sharded(judge, context.world.mesh)
            return ModelOnTokens(judge, source, counter, ends=stop_ids(tokenizer), world=context.world)
        _refuse_cut(judge, counter.source, obstacle)
        if unread:  # each process holds all of a judge of texts
            judge = combining(open_judge(source.place, unread=False), source.combine)
        context.event(
            "info", "reward.on_text", f"{counter.source}: {judge.place} reads the answers as text: {obstacle}"
        )
        on_texts = on_text(scorer_of(judge), source, partial(encoded_answer, judge), turn=judge.turn)
        return FromText(CountedSource(on_texts, counter, world=context.world), read)

    wiring = Wiring(
        context=RewardContext(
            folder=context.recipe_folder,
            seed=context.seed,
            fields=fields,
            note=lambda code, words: context.event("info", code, f"{field}: {words}"),
            calls=context.folder / "calls" / f"{field}-{context.world.rank}",
            share=1 / context.world.size,
        ),
        read=read,
        open_model=open_model,
        failures=failures,
        announce=partial(context.event, "warning", "reward.first_unscored"),
        world=context.world,
    )
    return build(_placed(settings, field, context), wiring, name=field)


def _refuse_cut(judge: Judge, source: str, obstacle: str) -> None:
    """A judge whose weights are those of a sharded policy cannot read texts."""
    if is_cut(judge):
        raise ConfigError(
            f"{source}: {judge.place} shares the weights of the policy, and cannot read its tokens as they are "
            f"({obstacle}): with placement.weights: shard, use roles: separate, or weights: replicate"
        )


def report_unscored(
    context: Context,
    counters: Iterable[FailureCounter],
    *,
    reported: Mapping[str, int] | None = None,
    code: str = "reward.unscored",
    step: int | None = None,
) -> dict[str, int]:
    """Warn of each source with more answers without a score than were `reported` before; gives their new numbers."""
    counts = dict(reported or {})
    for counter in counters:
        report = counter.report(top=3)
        if report.failed <= counts.get(report.source, 0):
            continue
        counts[report.source] = report.failed
        reasons = "; ".join(f"{reason} ({count}x)" for reason, count in report.reasons.items())
        message = f"{report.source}: {report.failed:,} of {report.rows:,} answers have no score so far: {reasons}"
        context.event("warning", code, message, step=step)
    return counts


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Text exactly as it was sampled, control tokens included."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def scorer_of(judge: Judge) -> Scorer:
    one, *others = judge.members
    return Ensemble(members=judge.members, combine=judge.combine) if others else one


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that cut every text into the same ids. What rows are padded with does not count."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("this tokenizer has no tokenizer.json, by which it could be compared with another")
    described: dict[str, Any] = json.loads(backend.to_str())
    return hash_json({name: value for name, value in described.items() if name not in ("padding", "truncation")})


@runtime_checkable
class TrustedSource(Protocol):
    """A source that knows whether its scores can be trusted."""

    def trust_metrics(self, scores_B: Tensor) -> dict[str, float]: ...


class ModelOnTokens:
    """A reward model on the sampled tokens. An answer that was cut off gets an end-of-turn token to be scored at, as in
    text; what is longer than the model reads loses its beginning, as in its training.

    `disagreement_B` is how far the members of an ensemble were apart on the rows scored last; None without members.
    """

    def __init__(
        self,
        judge: Judge,
        settings: ModelSource,
        counter: FailureCounter,
        *,
        ends: frozenset[int],
        world: World = ALONE,
    ) -> None:
        self.disagreement_B: Tensor | None = None
        one, *others = judge.members
        scorer = _Members(judge) if others else one
        self._source, self._turn = OnTokens(scorer, settings, counter, world=world), judge.turn
        self._objective = objective_index(scorer, settings)
        self._spread = len(scorer.objectives) + self._objective if others else None
        self._ends, self._end, self._longest = sorted(ends), end_of_turn(one.tokenizer), judge.max_length
        ranges = [member.facts.score_ranges[self._objective] for member in judge.members if member.facts.score_ranges]
        self._seen = (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None

    def score(self, rollouts: Rollouts) -> Tensor:
        with self._turn():
            scores_BC = self._source.all_scores(
                last_tokens(closed(rollouts, ends=self._ends, end=self._end), self._longest)
            )
        if self._spread is not None:
            self.disagreement_B = scores_BC[:, self._spread]
        return self._source.counted(scores_BC)

    def trust_metrics(self, scores_B: Tensor) -> dict[str, float]:
        """Whether its scores can be trusted: disagreement of the members, and scores outside the range of training."""
        facts: dict[str, float] = {}
        if self.disagreement_B is not None:
            facts["reward/disagreement"] = torch.nanmean(self.disagreement_B).item()
        if self._seen is not None:
            low, high = self._seen
            facts["reward/out_of_range"] = ((scores_B < low) | (scores_B > high)).float().mean().item()
        return facts


class _Members:
    """The members of an ensemble as one scorer, which gives the combined score of each objective, then how far the
    members were apart on each."""

    def __init__(self, judge: Judge) -> None:
        self._ensemble = Ensemble(members=judge.members, combine=judge.combine)

    @property
    def objectives(self) -> tuple[str, ...]:
        return self._ensemble.objectives

    @property
    def device(self) -> torch.device:
        return self._ensemble.device

    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        scores_MBK = self._ensemble.member_scores(tokens_BT, attention_mask_BT, normalised=normalised)
        return torch.cat([combined(scores_MBK, self._ensemble.combine), disagreement(scores_MBK)], dim=1)


def closed(rollouts: Rollouts, *, ends: Sequence[int], end: int) -> Rollouts:
    """The same rows, all ending in the token `end`: it takes the place of another one of `ends`, or stands behind."""
    length_B = rollouts.attention_mask_BT.sum(dim=1)
    last_B = rollouts.tokens_BT.gather(1, length_B[:, None] - 1)[:, 0]
    if (last_B == end).all():
        return rollouts
    ends_there_B = torch.isin(last_B, torch.tensor(ends, device=last_B.device))
    index_T = torch.arange(rollouts.tokens_BT.shape[1] + 1, device=last_B.device)
    ending_BT = index_T == (length_B - ends_there_B.long())[:, None]
    return replace(
        rollouts,
        tokens_BT=pad(rollouts.tokens_BT, (0, 1)).masked_fill(ending_BT, end),
        attention_mask_BT=pad(rollouts.attention_mask_BT, (0, 1)) | ending_BT,
        response_mask_BT=pad(rollouts.response_mask_BT, (0, 1)),
        behaviour_logp_BT=pad(rollouts.behaviour_logp_BT, (0, 1)),
    )


def last_tokens(rollouts: Rollouts, count: int) -> Rollouts:
    """The same rows, each without its beginning where it has more than `count` tokens."""
    length_B1 = rollouts.attention_mask_BT.sum(dim=1, keepdim=True)
    if rollouts.tokens_BT.shape[1] <= count or int(length_B1.max()) <= count:
        return rollouts
    width = rollouts.tokens_BT.shape[1]
    first_B1 = (length_B1 - count).clamp(min=0)
    source_BT = first_B1 + torch.arange(count, device=first_B1.device)
    is_there_BT, source_BT = source_BT < length_B1, source_BT.clamp(max=width - 1)
    return replace(
        rollouts,
        tokens_BT=rollouts.tokens_BT.gather(1, source_BT),
        attention_mask_BT=rollouts.attention_mask_BT.gather(1, source_BT) & is_there_BT,
        response_mask_BT=rollouts.response_mask_BT.gather(1, source_BT) & is_there_BT,
        behaviour_logp_BT=rollouts.behaviour_logp_BT.gather(1, source_BT),
    )


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that the template writes after an answer: where a reward model reads its score."""
    probe = encode_conversation(tokenizer, _PROBE)
    ends = stop_ids(tokenizer)
    return next(token for token in reversed(probe.tokens) if token in ends)


def _placed(settings: RewardSourceSettings | str, field: str, context: Context) -> RewardSourceSettings:
    """The same settings with the folder of every reward model in the place of what the recipe calls it."""
    match settings:
        case str():
            return ModelSource.model_validate({"kind": "model", "from": context.input(field)})
        case ModelSource():
            return settings.model_copy(update={"place": context.input(f"{field}.from")})
        case MixSource():
            parts = {name: _placed(part, f"{field}.parts.{name}", context) for name, part in settings.parts.items()}
            return settings.model_copy(update={"parts": parts})
        case _:
            return settings


def _obstacle(judge: Judge, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None) -> str | None:
    """Why the judge cannot read the policy's tokens as they are; None where it can."""
    own = judge.members[0].tokenizer
    if tokenizer_hash(own) != tokenizer_hash(tokenizer):
        return "its tokenizer is not that of the model"
    if (judge.facts.template_hash or template_hash(own)) != template_hash(tokenizer):
        return "its chat template is not that of the model"
    opening = encode_prompt(own, _PROBE[:1])
    if encode_conversation(own, _PROBE).tokens[: len(opening)] != opening:
        return "its chat template opens an answer otherwise than it writes one that is there"
    if judge.facts.truncate == "refuse" and max_tokens is None:
        return f"it refuses more than {judge.max_length:,} tokens, and each answer has to be measured"
    return None


def _check_window(context: Context, judge: Judge, name: str, max_tokens: int | None) -> None:
    """An answer that was cut off is one token longer for the judge, who cannot do without its end."""
    if max_tokens is None or max_tokens + (judge.facts.truncate == "refuse") <= judge.max_length:
        return
    found = f"{name}: prompt and answer may have {max_tokens:,} tokens, and {judge.place} reads {judge.max_length:,}"
    if judge.facts.truncate == "refuse":
        raise ConfigError(
            f"{found}, their end-of-turn token included, and refuses longer texts; allow fewer tokens, or train the "
            "reward model with a larger max_length or too_long: cut"
        )
    context.event("warning", "reward.window", f"{found}; longer texts lose their beginning, as in its training")


def encoded_answer(judge: Judge, answer: Answer) -> list[int]:
    """Prompt and answer as the judge reads them."""
    prompt = tuple(Message(cast(Role, role), content) for role, content in answer.prompt)
    return judge.encoder.tokens(prompt, (Message("assistant", answer.text),))
