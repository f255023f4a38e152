"""Two rounds in, figures out: `figures.json`, which the rules of the rounds are applied to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.core.files import write_json
from kedge.core.seeds import seed_for
from kedge.data.examples import Prompt
from kedge.data.template import template_hash
from kedge.evaluate.answers import ModelAnswer
from kedge.evaluate.evaluation import ModelSummary, compare, summarise
from kedge.exams.refusal import classify
from kedge.models.forward.heads import language_model
from kedge.models.loading.load import load_causal
from kedge.rewards.failures import refuse_unscored
from kedge.rewards.rollouts import PromptRecord
from kedge.stages.drift.reward_models import reward_figures
from kedge.stages.drift.settings import DriftStageSettings
from kedge.stages.rl.answering import Answered
from kedge.stages.rl.candidates import candidate_answers, fitting_prompts, read_prompts_once
from kedge.stages.rl.divergence import log_ratios
from kedge.stages.rl.prompts import fields_of
from kedge.stages.rl.reward import open_reward, report_unscored, tokenizer_hash
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.tokenizer import tokenizer_for

FILE = "figures.json"
"""Below the folder of the stage."""
_GOLD, _NEW, _OLD = "gold", "reward", "previous_reward"


def run(context: Context, settings: DriftStageSettings) -> Mapping[str, Path]:
    """Measure what there is to measure; returns the file of figures."""
    policy, shift = _policy_figures(context, settings) if settings.policy else ({}, {})
    reward = {**reward_figures(context, settings), **shift} if settings.reward else {}
    figures = {"round": context.round, "policy": policy, "reward": reward}
    context.once(lambda: write_json(context.folder / FILE, figures))
    return {"figures": context.folder / FILE}


def _policy_figures(context: Context, settings: DriftStageSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the policy beside the one before: how far it went, how it answers, who likes it; and of its reward model, how
    far the scores of the old answers moved."""
    prompts = _prompts(context, settings)
    answered = {
        name: candidate_answers(
            context, settings, prompts, name=name, model=context.input(name), seed=settings.answer_seed
        ).answered
        for name in ("policy", "previous")
        if context.inputs(name)
    }
    scores = {name: _scores(context, settings, own, prompts) for name, own in answered.items()}
    answers = {name: _records(name, own, scores[name]) for name, own in answered.items()}
    seed = seed_for(settings.answer_seed, "bootstrap")
    sources = [source for source in (_GOLD, _NEW) if source in scores["policy"]]
    summaries = {name: summarise(own, sources, seed=seed) for name, own in answers.items()}
    figures: dict[str, Any] = {
        "answers": len(answers["policy"]),
        "kl_previous": _kl(context, settings, answered["policy"], "previous"),
        "kl_first": _kl(context, settings, answered["policy"], "first"),
    }
    for name, prefix in (("policy", ""), ("previous", "previous_")):
        if name in summaries:
            figures |= {f"{prefix}{field}": value for field, value in _of(summaries[name], answers[name]).items()}
    for source in sources if "previous" in answers else ():
        comparison = compare(answers["policy"], answers["previous"], source, tie=settings.tie, seed=seed)
        if comparison is not None:
            rate, names = comparison.win_rate, ("win_rate", "gain") if source == _GOLD else ("proxy_rate", "proxy_gain")
            figures[names[0]] = {"value": rate.rate, "low": rate.low, "high": rate.high, "by": source}
            figures[names[1]] = asdict(comparison.gain)
    return figures, _shift(scores.get("previous", {}))


def _prompts(context: Context, settings: DriftStageSettings) -> list[Prompt]:
    prompts = read_prompts_once(context, code="drift.broken")[: settings.number]
    models = [model for name in ("policy", "previous", "first") for model in context.inputs(name)]
    return fitting_prompts(context, settings, prompts, models)


def _scores(
    context: Context, settings: DriftStageSettings, answered: Answered, prompts: Sequence[Prompt]
) -> dict[str, list[float]]:
    """By source, the scores of all answers: the truth, the new and the old reward model."""
    cases = [
        PromptRecord(
            prompt=tuple((message.role, message.content) for message in prompt.prompt),
            solution=prompt.answer,
            extra=prompt.extra,
        )
        for prompt in prompts
    ]
    sources = {_GOLD: settings.gold, _NEW: settings.reward, _OLD: settings.previous_reward}
    scores: dict[str, list[float]] = {}
    for field, source in sources.items():
        if source is None:
            continue
        reward = open_reward(
            context,
            source,
            field=field,
            tokenizer=answered.tokenizer,
            cases=cases.__getitem__,
            fields=fields_of(prompts),
            failures=settings.failures,
            device=context.device,
            max_tokens=answered.rollouts.tokens_BT.shape[1],
        )
        scores[field] = reward.score(answered.rollouts).tolist()
        report_unscored(context, reward.failure_counters, code="drift.unscored")
        refuse_unscored(scores[field], reward.failure_counters)
    return scores


def _records(name: str, answered: Answered, scores: Mapping[str, Sequence[float]]) -> list[ModelAnswer]:
    rollouts = answered.rollouts
    rows = zip(answered.tokens(), answered.texts(), rollouts.finished_B.tolist(), strict=True)
    return [
        ModelAnswer(
            model=name,
            prompt=row,
            number=0,
            tokens=tokens,
            text=text,
            is_finished=is_finished,
            scores={source: values[row] for source, values in scores.items()},
        )
        for row, (tokens, text, is_finished) in enumerate(rows)
    ]


def _of(summary: ModelSummary, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
    means = {source: own.mean for source, own in summary.scores.items() if own.mean is not None}
    return {
        "length": summary.length.mean if summary.length else None,
        "distinct": summary.distinct,
        "refusals": fmean(classify(one.text) != "none" for one in answers),
        "gold": asdict(means[_GOLD]) if _GOLD in means else None,
        "proxy": asdict(means[_NEW]) if _NEW in means else None,
    }


def _kl(context: Context, settings: DriftStageSettings, answered: Answered, other: str) -> float | None:
    """KL of the policy to another model, in nats a sequence; None where it cannot be measured, which is told."""
    if not context.inputs(other):
        return None
    if settings.top_p < 1 or settings.top_k is not None:
        context.event("info", "drift.kl", "KL is not measured: top_p or top_k cut the distribution")
        return None
    place = context.input(other)
    tokenizer = tokenizer_for(place, context.chat_template)
    own = answered.tokenizer
    if (tokenizer_hash(tokenizer), template_hash(tokenizer)) != (tokenizer_hash(own), template_hash(own)):
        context.event("info", "drift.kl", f"KL to {place} is not measured: it reads other tokens than the policy")
        return None
    model = language_model(load_causal(place, dtype=settings.dtype, device=pick_device(context.device)))
    with model.active():
        ratios_B = log_ratios(model, answered.rollouts, temperature=settings.temperature, world=context.world)
    return float(ratios_B.mean())


def _shift(scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """How far the scores of the old policy's answers moved from the old reward model to the new one, in standard
    deviations of the old scores: by so much would a baseline from the old scores lie."""
    if _NEW not in scores or _OLD not in scores:
        return {}
    old, new = scores[_OLD], scores[_NEW]
    spread = (sum((score - fmean(old)) ** 2 for score in old) / len(old)) ** 0.5
    return {"shift": (fmean(new) - fmean(old)) / max(spread, 1e-6)}
