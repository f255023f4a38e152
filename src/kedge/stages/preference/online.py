"""Online preference training: a policy, prompts and a reward source in; a model and the pairs of each round out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.core.errors import DataError
from kedge.core.seeds import seed_for
from kedge.data.tokenizer import padding_id
from kedge.models.training.preference_methods import KTO, TDPO
from kedge.models.training.preference_objectives import Reference, as_it_is, reference_for
from kedge.stages.preference.data import noun_of, offline_data, read_file
from kedge.stages.preference.displacement import warn_of_displacement
from kedge.stages.preference.online_pairs import RoundPairs, drawn_beside, pairs_of, preferences_of, write_pairs
from kedge.stages.preference.online_settings import OnlineSettings
from kedge.stages.preference.preferences import Preference
from kedge.stages.preference.round import PreferenceRound, prepare_round
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.rl.answers import AnswerSampler
from kedge.stages.rl.rounds import (
    Round,
    draw_round,
    log_round,
    log_trained_policy,
    open_sampler,
    resume_rounds,
    save_round,
    starting_model,
)
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.held_out import hold_out
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.loop import TrainLoop, passes_for, steps_left, stop_if_asked
from kedge.stages.shared.policy import save_policy, start_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUND = "online/round"
_HINT = (
    "more online.answers or a higher sampling.temperature make them differ, online.finished: false takes answers that "
    "were cut off"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offline:
    """What is the same in every round. `data` is empty where nothing but the policy's own pairs is learnt."""

    data: Sequence[Preference]
    held_out: Sequence[Preference]

    @property
    def held_out_keys(self) -> frozenset[int]:
        return frozenset(preference.prompt_key for preference in self.held_out)


def train_online(context: Context, settings: PreferenceSettings, online: OnlineSettings) -> Path:
    """All rounds, from where the run was; then the trained policy answers once more, and is saved."""
    torch.manual_seed(context.seed)
    device = pick_device(context.device)
    model, trained, policy = start_policy(context, settings.lora, settings.memory, keeps_dropout=False)
    start = starting_model(context, model, device=device, is_asked_often=isinstance(settings.method, TDPO))
    round_settings = online.round_settings(samples=settings.samples)
    sampler = open_sampler(context, round_settings, model, start, device=device, round_metric=ROUND, under="online.")
    if not round_settings.measures_kl:
        context.event("info", "preference.kl", "KL is not measured: top_p or top_k cut the distribution")
    passes = passes_for(context, settings.micro_batch)
    done, step = resume_rounds(context, trained, passes)
    offline = _offline(sampler, settings, pairs_of(draw_round(sampler, 0).groups, online))
    with interruptible(context.stop, context.say):
        for number in range(done, online.rounds):
            stop_if_asked(context, step)
            if (left := steps_left(settings.max_steps, step)) == 0:
                break
            # Of its own, so that a run that is resumed between two rounds goes on with the same random numbers.
            torch.manual_seed(seed_for(context.seed, "dropout", number))
            drawn = draw_round(sampler, number)
            pairs = pairs_of(drawn.groups, online)
            data = _data(sampler, settings, online, pairs, offline, number)
            if not data:
                log_round(sampler, drawn, step, _pair_metrics(pairs, drawn))
                break
            training = prepare_round(
                context,
                settings,
                trained,
                policy,
                train=data,
                held_out=offline.held_out,
                reference=_reference(settings, online, model, start),
                file=context.folder / f"reference-{number + 1}.safetensors",
                pad=padding_id(sampler.tokenizer),
                passes=passes,
                max_steps=left,
                has_adapters=online.reference == "round",
            )
            step = _learn(sampler, settings, training, drawn, pairs, first_step=step)
            save_round(context, training.learner, number, step=step)
    log_trained_policy(sampler, step)
    dtype = settings.memory.save_dtype
    return save_policy(context, model, sampler.tokenizer, weights=trained.weights(), dtype=dtype)


def _learn(
    sampler: AnswerSampler,
    settings: PreferenceSettings,
    training: PreferenceRound,
    drawn: Round,
    pairs: RoundPairs,
    *,
    first_step: int,
) -> int:
    """Log and learn one round; gives the step at which it ended."""
    context, learner = sampler.context, training.learner
    loop = TrainLoop(
        context, learner, checkpoints=settings.checkpoints, evaluation=settings.eval, first_step=first_step
    )
    if not loop.is_resumed:
        log_round(sampler, drawn, first_step, training.held_out_metrics() | _pair_metrics(pairs, drawn))
    for rows in loop.steps(training.order(seed_for(context.seed, "order", drawn.number))):
        metrics = loop.update(training.batches(rows))
        if metrics is None:
            continue
        if loop.is_evaluation_due:
            metrics |= training.held_out_metrics()
            if settings.data:  # chosen answers of a file may be displaced
                warn_of_displacement(context, metrics["heldout/chosen_logp"], step=loop.step)
        loop.finish(metrics)
    loop.take_best()
    return loop.step


def _pair_metrics(pairs: RoundPairs, drawn: Round) -> dict[str, float]:
    without = sum(pairs.without.values()) / len(drawn.groups)
    return {"online/pairs": len(pairs.pairs), "online/without": without}


def _offline(sampler: AnswerSampler, settings: PreferenceSettings, first: RoundPairs) -> _Offline:
    """What is in files; where nothing is held out in a file, a share of the first round's prompts is."""
    context = sampler.context
    if settings.data is not None:
        data, held_out = offline_data(context, settings, sampler.tokenizer)
        return _Offline(data=data, held_out=held_out)
    if settings.heldout is not None:
        return _Offline(data=(), held_out=read_file(context, settings, sampler.tokenizer, "heldout"))
    own = preferences_of(first.pairs, sampler.dataset, as_thumbs=isinstance(settings.method, KTO))
    if not own:
        raise DataError(f"no pair can be made of the first answers: {first.why_not()}; {_HINT}")
    _, held_out = hold_out(own, share=settings.heldout_share, seed=context.seed)
    return _Offline(data=(), held_out=held_out)


def _data(
    sampler: AnswerSampler,
    settings: PreferenceSettings,
    online: OnlineSettings,
    pairs: RoundPairs,
    offline: _Offline,
    number: int,
) -> list[Preference]:
    """The pairs of a round but for those to held-out prompts, and offline ones beside them.

    All pairs of the round are written to a file, and an event says how many are learnt.
    """
    context, dataset = sampler.context, sampler.dataset
    file = context.folder / f"pairs-{number + 1}.jsonl"
    context.once(lambda: write_pairs(pairs.pairs, dataset, file, held_out=offline.held_out_keys))
    preferences = preferences_of(pairs.pairs, dataset, as_thumbs=isinstance(settings.method, KTO))
    own = [preference for preference in preferences if preference.prompt_key not in offline.held_out_keys]
    beside = drawn_beside(offline.data, round(online.offline * len(own)), seed=context.seed, number=number)
    parts = [f"round {number + 1}: {len(own):,} {noun_of(settings)} to learn"]
    if len(preferences) > len(own):
        parts.append(f"{len(preferences) - len(own):,} to held-out prompts")
    if beside:
        parts.append(f"{len(beside):,} of `data` beside them")
    message = "; ".join(filter(None, (", ".join(parts), pairs.why_not())))
    if not own and number == 0:
        raise DataError(f"{message}: there is nothing to learn from; {_HINT}")
    if own:
        context.event("info", "preference.pairs", message)
    else:
        context.event("warning", "preference.no_pairs", f"{message}: training ends here")
    return [*own, *beside]


def _reference(
    settings: PreferenceSettings, online: OnlineSettings, model: PreTrainedModel, start: Reference
) -> Reference:
    """The reference of a round that begins now."""
    if online.reference == "start":
        return start
    return reference_for(model) if isinstance(settings.method, TDPO) else as_it_is(model)
