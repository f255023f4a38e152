"""Reward models: preferences in, a model folder and a report out.

Members of an ensemble are trained one after the other; each one that is finished is kept aside, so that a resumed run
goes on with the member it was at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kedge.core.batches import Comparisons
from kedge.core.errors import ConfigError, ContractStop
from kedge.core.files import write_json, write_text
from kedge.core.seeds import seed_for
from kedge.core.world import World
from kedge.data.batching import comparison_batches, num_steps, step_rows
from kedge.data.encoding.store import LazyRows, lazy_map
from kedge.data.examples import Demonstration
from kedge.data.reading import read
from kedge.data.template import template_hash
from kedge.data.tokenizer import padding_id
from kedge.models.forward.sharding import is_sharded
from kedge.models.loading.load import dtype_for
from kedge.models.loading.start import freeze_lowest, prepare_layers
from kedge.models.reward.ensemble import Ensemble, lora_members, save_ensemble
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import Normaliser, RewardModel, fit_normaliser, scores
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import preference
from kedge.models.training.passes import Cut, Passes
from kedge.models.training.train_step import TrainedWeights, trained_weights
from kedge.report.reward import render_html
from kedge.runs.state import load_entry, load_state
from kedge.stages.reward.comparisons import (
    EncodedComparison,
    fold,
    group_of_place,
    length_controlled,
    read_comparisons,
)
from kedge.stages.reward.scoring import report_on, report_out_of_fold
from kedge.stages.reward.settings import RewardSettings, wrong_number_of_files
from kedge.stages.rl.scoring import score_sequences
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import CostMeter, pick_device
from kedge.stages.shared.encoding import Encoder, report_long, truncation
from kedge.stages.shared.held_out import hold_out, refuse_shared_prompts
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.loop import TrainLoop, held_out_metrics, passes_for, save_finished, stop_if_asked
from kedge.stages.shared.policy import shard, tell_offload, tell_rounding
from kedge.stages.shared.tokenizer import tokenizer_for

MOST_DEMONSTRATIONS = 1000
"""Answers that fix the zero of the scores: the mean of so many is known to 3 % of a standard deviation."""


def train(context: Context, settings: RewardSettings) -> Mapping[str, Path]:
    """Train every member, save the model, and report how good it is on held-out preferences."""
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    encoder = Encoder(tokenizer=tokenizer, max_length=settings.max_length, truncate=truncation(settings.too_long))
    data, held_out = _data(context, settings, encoder)
    groups = group_of_place(context.inputs("heldout") or context.inputs("data"), held_out, settings.groups)
    meter = CostMeter(pick_device(context.device))
    tell_offload(context, settings.memory)
    members = _members(context, settings, str(tokenizer.chat_template))
    trained = [_trained_weights(context, settings, member) for member in members]
    members = [replace(member) for member in members]  # the backbones anew, for weights in the type of computation
    passes = passes_for(context, settings.micro_batch)
    with interruptible(context.stop, context.say):
        for index, member in enumerate(members):
            unfolded = fold(data, member=index, members=settings.members, seed=context.seed)
            _train_member(context, settings, member, trained[index], unfolded, held_out, index, passes)
    cost = meter.read(context.run.read_metrics())
    demonstrations = _demonstrations(context, encoder, data)
    about = {
        "template_hash": template_hash(tokenizer),
        "max_length": settings.max_length,
        "truncate": truncation(settings.too_long),
    }
    others = [list(answer) for item in data[:MOST_DEMONSTRATIONS] for answer in item.ranked.answers]
    members = [_normalised(member, demonstrations, others, about, context.world) for member in members]
    folder = context.folder / "model"
    weights, dtype = [weights_of_member.weights() for weights_of_member in trained], settings.memory.save_dtype
    for member, weights_of_member in zip(members, weights, strict=True):
        member.activate()
        tell_rounding(context, member.model, weights_of_member, dtype)
    _save(members, folder, weights, settings, context.world)
    _report(context, settings, members, data, held_out, groups, cost)
    return {"model": folder}


def _save(
    members: Sequence[RewardModel],
    folder: Path,
    weights: Sequence[Mapping[str, Tensor]],
    settings: RewardSettings,
    world: World,
) -> None:
    dtype = settings.memory.save_dtype
    if len(members) == 1:
        save(members[0], folder, weights=weights[0], dtype=dtype, world=world)
        return
    ensemble = Ensemble(members=tuple(members), combine=settings.combine)
    save_ensemble(ensemble, folder, weights=weights, dtype=dtype, world=world)


def _data(
    context: Context, settings: RewardSettings, encoder: Encoder
) -> tuple[LazyRows[EncodedComparison], LazyRows[EncodedComparison]]:
    """Comparisons to learn, under length control, and held-out ones."""
    loss = settings.loss
    data = _read(context, settings, encoder, "data")
    if context.inputs("heldout"):
        held_out = _read(context, settings, encoder, "heldout")
        refuse_shared_prompts(data, held_out)
    else:
        data, held_out = hold_out(data, share=settings.heldout_share, seed=context.seed)
    context.event("info", "reward.data", f"{len(data):,} comparisons to learn, {len(held_out):,} held out by prompt")
    return length_controlled(data, loss.length_control, strength=loss.length_strength), held_out


def _read(context: Context, settings: RewardSettings, encoder: Encoder, field: str) -> LazyRows[EncodedComparison]:
    def report(count: int) -> None:
        dropped, cut = (0, count) if settings.too_long == "cut" else (count, 0)
        what = f"comparisons of `{field}`"
        report_long(context, "reward.too_long", what, max_length=settings.max_length, dropped=dropped, cut=cut)

    def report_ties(count: int) -> None:
        if count:
            context.event("info", "reward.ties", f"{count:,} comparisons of `{field}` prefer nothing: left out")

    sources = context.inputs(field)
    wrong = wrong_number_of_files(field, len(sources), settings.objectives)
    if wrong:
        raise ConfigError(
            f"stages.{context.name}.{field}: {wrong}; give one file for each objective, in the same order"
        )
    return read_comparisons(
        sources,
        encoder,
        use_margin=settings.loss.margin,
        objectives=len(settings.objectives),
        labels=settings.labels,
        ties=settings.ties,
        weights=settings.weights if field == "data" else None,
        too_long=settings.too_long,
        report=report,
        report_ties=report_ties,
    )


def _members(context: Context, settings: RewardSettings, chat_template: str) -> list[RewardModel]:
    if settings.lora is None:
        return [_built(context, settings, chat_template, index) for index in range(settings.members)]
    base = _built(context, settings, chat_template, 0)
    return list(lora_members(base, settings.lora, count=settings.members, seed=context.seed))


def _built(context: Context, settings: RewardSettings, chat_template: str, index: int) -> RewardModel:
    """The model to start from with a new score head; float32 where its own weights learn."""
    dtype, bits = ("float32", 16) if settings.lora is None else (settings.memory.dtype, settings.lora.base_bits)
    reward_model = build(
        context.input("from"),
        objectives=settings.objectives,
        seed=seed_for(context.seed, "head", index),
        dtype=dtype,
        device=pick_device(context.device),
        bits=bits,
        unread=context.world.mesh is not None,
    )
    freeze_lowest(reward_model.model, settings.frozen_layers)
    prepare_layers(
        reward_model.model,
        compiled=settings.memory.compiles_on(pick_device(context.device)),
        recomputes=settings.memory.recompute,
    )
    reward_model.tokenizer.chat_template = chat_template
    return reward_model


def _trained_weights(context: Context, settings: RewardSettings, member: RewardModel) -> TrainedWeights:
    """The weights of a member that learn; heads, also those of other members on the same base, stay in float32."""
    member.activate()
    device, score = pick_device(context.device), cast(Any, member.model).score
    dtype = dtype_for(settings.memory.dtype, device)
    if not is_sharded(member.model):
        compiled = settings.memory.compiles_on(device)
        shard(context, member.model, dtype, compiled=compiled, whole=list(score.parameters()))
    on_host = "optimiser" in settings.memory.offloads_on(device)
    return trained_weights(member.model, dtype=dtype, head=score, on_host=on_host)


def _train_member(
    context: Context,
    settings: RewardSettings,
    member: RewardModel,
    trained: TrainedWeights,
    data: Sequence[EncodedComparison],
    held_out: Sequence[EncodedComparison],
    index: int,
    passes: Passes,
) -> None:
    """Train one member, or take up where it was; a finished one is read back from `finished/`."""
    member.activate()
    # Of its own, so that a run that is resumed between two members goes on with the same random numbers.
    torch.manual_seed(seed_for(context.seed, "dropout", index))
    total = num_steps(len(data), epochs=settings.epochs, batch=settings.batch, max_steps=settings.max_steps)
    objective = preference(partial(scores, member), ranking=settings.loss.ranking, centre=settings.loss.centre)
    learner = Learner(trained, member.backbone, objective, settings.optimiser, total_steps=total, passes=passes)
    finished = context.folder / "finished" / f"member-{index}"
    if context.once(finished.is_dir):
        state = load_state(finished, like={"weights": trained.weights()})
        trained.load(state["weights"])
        passes.load(state["passes"])
        return

    # Process 0 has written it.
    first_step = context.world.same(0 if context.world.rank else _steps_before(context.folder / "finished", index))
    stop_if_asked(context, first_step)
    loop = TrainLoop(
        context, learner, checkpoints=settings.checkpoints, evaluation=settings.eval, first_step=first_step
    )
    pad, seed = padding_id(member.tokenizer), seed_for(context.seed, "member", index)
    order = step_rows(
        len(data),
        epochs=settings.epochs,
        batch=settings.batch,
        seed=seed,
        start=learner.step,
        max_steps=settings.max_steps,
    )
    for rows in loop.steps(order):
        metrics = loop.update(_batches([data[row] for row in rows], pad))
        if metrics is None:
            continue
        if settings.members > 1:
            metrics |= {"train/member": float(index + 1), "train/member_step": float(learner.step)}
        if held_out and loop.is_evaluation_due:
            metrics |= held_out_metrics(learner, _batches(held_out, pad))
        loop.finish(metrics)
    loop.take_best()
    save_finished(context, finished, {"weights": trained.weights(), "last_step": loop.step, "passes": passes.state()})


def _batches(items: Sequence[EncodedComparison], pad: int) -> Cut[Comparisons]:
    ranked = lazy_map(lambda item: item.ranked, items)
    return lambda size: comparison_batches(ranked, rows=size.rows, tokens=size.tokens, shares=size.shares, pad=pad)


def _steps_before(finished: Path, index: int) -> int:
    """The step of the run at which the member before this one ended; early stopping makes them unequal."""
    return int(load_entry(finished / f"member-{index - 1}", "last_step")) if index else 0


def _demonstrations(context: Context, encoder: Encoder, data: Sequence[EncodedComparison]) -> list[list[int]]:
    """Answers that shall score 0 on average: given ones, or the best answer of each training comparison."""
    if context.inputs("demonstrations"):
        examples = islice(read(context.input("demonstrations"), kind="demonstrations"), MOST_DEMONSTRATIONS)
        conversations = [cast(Demonstration, example).messages for example in examples]
        return [encoder.tokens(messages[:-1], messages[-1:]) for messages in conversations]
    ranked = [item.ranked for item in data[:MOST_DEMONSTRATIONS]]
    return [list(answers.answers[list(answers.rank).index(min(answers.rank))]) for answers in ranked]


def _normalised(
    member: RewardModel,
    demonstrations: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    about: Mapping[str, Any],
    world: World,
) -> RewardModel:
    """Demonstrations average 0. The scale stays: a score difference is a log-odds, and calibration is about that.

    The range of the scores of `others`, which were trained on, is where scores can be trusted.
    """
    mean = fit_normaliser(score_sequences([member], demonstrations, normalised=False, world=world)[0]).mean
    normaliser = Normaliser(mean=mean, std=(1.0,) * len(mean))
    scores_NK = normaliser(score_sequences([member], others, normalised=False, world=world)[0])
    score_ranges = tuple(zip(scores_NK.amin(dim=0).tolist(), scores_NK.amax(dim=0).tolist(), strict=True))
    return replace(member, facts=replace(member.facts, normaliser=normaliser, score_ranges=score_ranges, **about))


def _report(
    context: Context,
    settings: RewardSettings,
    members: Sequence[RewardModel],
    data: LazyRows[EncodedComparison],
    held_out: LazyRows[EncodedComparison],
    groups: Mapping[str, Mapping[str, str]],
    cost: Mapping[str, str],
) -> None:
    """Write the report, say its verdict, and stop the run where it says that the model is unfit."""
    facts = {"trained on": f"{len(data):,} comparisons", "objectives": ", ".join(settings.objectives), **cost}
    if len(members) > 1:
        facts["out of fold"] = _out_of_fold(context, members, data)
    report = report_on(
        members, held_out, trained=data, combine=settings.combine, facts=facts, groups=groups, world=context.world
    )
    context.once(lambda: write_json(context.folder / "reward-report.json", report.as_dict()))
    context.once(lambda: write_text(context.folder / "reward-report.html", render_html(report)))
    for finding in report.findings:
        context.event(finding.level, finding.code, finding.message, fix=finding.fix)
    if not report.is_fit and settings.if_unfit == "stop":
        raise ContractStop(
            f"{report.verdict} The model and its report are saved in {context.folder}. To go on all the same: --resume "
            f"--set stages.{context.name}.if_unfit=go_on"
        )


def _out_of_fold(context: Context, members: Sequence[RewardModel], data: LazyRows[EncodedComparison]) -> str:
    """Many more comparisons than are held out, for a narrower interval; kept as a report of its own."""
    report = report_out_of_fold(members, data, seed=context.seed, world=context.world)
    context.once(lambda: write_json(context.folder / "out-of-fold.json", report.as_dict()))
    accuracy = report.accuracy
    interval = f"95 % interval {100 * accuracy.low:.1f} to {100 * accuracy.high:.1f} %"
    right = f"{100 * accuracy.value:.1f} % right ({interval})"
    return f"{right} of {accuracy.n:,} training pairs, each scored by the member that never saw its prompt"
