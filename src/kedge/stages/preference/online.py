"""Online preference training: a policy, prompts and a reward source in; a model and the pairs of each round out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.core.errors import DataError
from kedge.core.seeds import seed_for
from kedge.data.tokenizer import padding_id
from kedge.models.forward.lora import Module, base_of
from kedge.models.forward.reader import evaluating
from kedge.models.loading.start import save_causal, start_causal
from kedge.models.training.preference_methods import KTO, TDPO
from kedge.models.training.preference_objectives import Reference, reference_for
from kedge.stages.preference.given import DisplacementWatch, given_data, given_heldout
from kedge.stages.preference.learning import Look, PreferenceRound, learn
from kedge.stages.preference.online_pairs import Made, drawn_beside, pairs_of, preferences_of, write_pairs
from kedge.stages.preference.online_settings import OnlineSettings
from kedge.stages.preference.preferences import Preferences, hold_out
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.rl.answers import AnswerSampler
from kedge.stages.rl.rounds import Round, ask, asker_for, finish, look_back, starting_model, taken_up
from kedge.stages.shared import loop as training
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUND = "online/round"
_HINT = (
    "more online.answers or a higher sampling.temperature make them differ, online.finished: false takes answers that "
    "were cut off"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What does not change from round to round. `data` is empty where nothing but the policy's own pairs is learnt."""

    data: Preferences
    held: Preferences

    @property
    def held_keys(self) -> frozenset[int]:
        return frozenset(one.key for one in self.held.items)


def train_online(context: Context, settings: PreferenceSettings, online: OnlineSettings) -> Path:
    """All rounds, from where the run was; then the policy is looked at and saved."""
    torch.manual_seed(context.seed)
    device = training.pick_device(context.device)
    model = start_causal(
        context.input("from"), lora=settings.lora, device=device, seed=context.seed, keeps_dropout=False
    )
    start = starting_model(context, model, device=device, is_asked_often=isinstance(settings.method, TDPO))
    drawing = online.drawing(samples=settings.samples)
    asker = asker_for(context, drawing, model, start, device=device, under="online.")
    if not drawing.measures_kl:
        context.event("info", "preference.kl", "KL is not measured: top_p or top_k cut the distribution")
    done, step = taken_up(context, model, settings.optimiser)
    given = _given(asker, settings, pairs_of(ask(asker, model, 0, name=ROUND).groups, online))
    for number in range(done, online.rounds):
        # Of its own, so that a run that is resumed between two rounds goes on with the same random numbers.
        torch.manual_seed(seed_for(context.seed, "dropout", number))
        drawn = ask(asker, model, number, name=ROUND)
        made = pairs_of(drawn.groups, online)
        data = _data(asker, settings, online, made, given, number)
        facts = {"online/pairs": len(made.sides), "online/without": sum(made.without.values()) / len(drawn.groups)}
        if not data.items:
            drawn.tell(step, lambda facts=facts: facts)
            break
        lesson = PreferenceRound(
            data=data,
            held=given.held,
            reference=_reference(settings, online, model, start),
            file=context.folder / f"reference-{number + 1}.safetensors",
            seed=seed_for(context.seed, "order", number),
            has_adapters=online.reference == "round",
            first_step=step,
        )
        step = _learn(asker, settings, model, lesson, number, partial(_before, drawn, facts, step))
    look_back(asker, model, step, name=ROUND)
    return save_causal(model, asker.tokenizer, context.folder / "model")


def _learn(
    asker: AnswerSampler,
    settings: PreferenceSettings,
    model: Module,
    lesson: PreferenceRound,
    number: int,
    before: Callable[[Look], None],
) -> int:
    """One round's lesson; it is kept when it is done. Chosen answers of a file may be displaced: that is watched."""
    context = asker.context
    watched = replace(context, tracker=DisplacementWatch(context)) if settings.data else context
    learner, step = learn(watched, settings, model, lesson, pad=padding_id(asker.tokenizer), before=before)
    finish(context, learner, number, step=step)
    return step


def _before(drawn: Round, facts: Mapping[str, float], step: int, look: Look) -> None:
    drawn.tell(step, lambda: {**look(), **facts})


def _given(asker: AnswerSampler, settings: PreferenceSettings, first: Made) -> _Given:
    """What is in files; where nothing is held out in a file, a share of the first round's prompts is."""
    context = asker.context
    if settings.data is not None:
        data, held = given_data(context, settings, asker.tokenizer)
        return _Given(data=data, held=held)
    nothing = Preferences(items=())
    if settings.heldout is not None:
        return _Given(data=nothing, held=given_heldout(context, settings, asker.tokenizer))
    own = preferences_of(first, asker.book, as_thumbs=isinstance(settings.method, KTO))
    if not own:
        raise DataError(f"no pair can be made of the first answers: {_why(first)}; {_HINT}")
    _, held = hold_out(Preferences(items=own), share=settings.heldout_share, seed=context.seed)
    return _Given(data=nothing, held=held)


def _data(
    asker: AnswerSampler, settings: PreferenceSettings, online: OnlineSettings, made: Made, given: _Given, number: int
) -> Preferences:
    """The pairs of a round, but for those to held-out prompts, and given ones beside them. All are written and told."""
    context, book = asker.context, asker.book
    write_pairs(made, book, context.folder / f"pairs-{number + 1}.jsonl", held_out=given.held_keys)
    found = preferences_of(made, book, as_thumbs=isinstance(settings.method, KTO))
    own = [one for one in found if one.key not in given.held_keys]
    noun = "answers" if isinstance(settings.method, KTO) else "pairs"
    parts = [f"round {number + 1}: {len(own):,} {noun} to learn"]
    if len(found) > len(own):
        parts.append(f"{len(found) - len(own):,} to held-out prompts")
    beside = drawn_beside(given.data, round(online.offline * len(own)), seed=context.seed, number=number)
    if beside:
        parts.append(f"{len(beside):,} of `data` beside them")
    told = "; ".join(filter(None, (", ".join(parts), _why(made))))
    if not own and number == 0:
        raise DataError(f"{told}: there is nothing to learn from; {_HINT}")
    if own:
        context.event("info", "preference.pairs", told)
    else:
        context.event("warning", "preference.no_pairs", f"{told}: training ends here")
    return Preferences(items=[*own, *beside])


def _why(made: Made) -> str:
    """What makes no pair."""
    prompts = [f"{count:,} prompts {why}" for why, count in made.without.items()]
    return ", ".join([*prompts, *(f"{count:,} {what} left out" for what, count in made.left_out.items())])


def _reference(settings: PreferenceSettings, online: OnlineSettings, model: Module, start: Reference) -> Reference:
    """What holds the policy in a round that begins now."""
    if online.reference == "start":
        return start
    return reference_for(model) if isinstance(settings.method, TDPO) else partial(_as_it_is, model)


@contextmanager
def _as_it_is(model: Module) -> Generator[PreTrainedModel]:
    """The policy with its adapters and without dropout."""
    with evaluating(model):
        yield base_of(model)
