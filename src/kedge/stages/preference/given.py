"""Preferences that are given in files, read and held out for a stage; and a watch over displaced answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kedge.core.errors import DataError
from kedge.core.protocols import Metrics
from kedge.models.training.preference_methods import KTO
from kedge.stages.preference.preferences import Preferences, hold_out, read_preferences
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISPLACEMENT: Final = 0.1
"""How far the log-prob of held-out chosen answers may fall, as a share of where it began, before it is a warning."""


class DisplacementWatch:
    """The tracker of a run, with one warning when the chosen answers themselves become unlikely.

    A preference loss only asks that the rejected answer becomes less likely than the chosen one. Both may fall, and
    what rises then is neither (likelihood displacement; Razin et al. 2024).
    """

    CODE: Final = "preference.displacement"

    def __init__(self, context: Context) -> None:
        self._context = context

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._context.tracker.log(metrics, step=step)
        if "heldout/chosen_logp" in metrics:
            self._judge(metrics["heldout/chosen_logp"], step)

    def event(self, event: Mapping[str, Any]) -> None:
        self._context.tracker.event(event)

    def close(self) -> None:
        self._context.tracker.close()

    def _judge(self, now: float, step: int) -> None:
        run = self._context.run
        seen = (one.get("heldout/chosen_logp") for one in run.read_metrics() if one["step"] == 0)
        start = next(value for value in seen if value is not None)
        is_told = any(one["code"] == self.CODE for one in run.read_events())
        if is_told or now >= start - DISPLACEMENT * abs(start):
            return
        message = (
            f"held-out chosen answers have become less likely: from {start:.1f} to {now:.1f} nats an answer. "
            "Probability goes to answers that are in no pair; a higher sft_weight or beta or a lower rate holds it back"
        )
        evidence = {"start": start, "now": now, "allowed_fall": DISPLACEMENT}
        self.event({"level": "warning", "code": self.CODE, "message": message, "step": step, "evidence": evidence})
        self._context.say(f"  {message}")


def given_data(
    context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[Preferences, Preferences]:
    """The preferences of `data` to learn, and those that are held out; what is left out is said."""
    data = _read(context, settings, tokenizer, "data")
    if context.inputs("heldout"):
        held = _read(context, settings, tokenizer, "heldout")
        if shared := {one.key for one in data.items} & {one.key for one in held.items}:
            raise DataError(f"`heldout` shares {len(shared)} prompt(s) with `data`: split them with kedge data split")
    else:
        data, held = hold_out(data, share=settings.heldout_share, seed=context.seed)
    told = f"{len(data.items):,} {_noun(settings)} to learn, {len(held.items):,} held out by prompt"
    context.event("info", "preference.data", told)
    return data, held


def given_heldout(context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase) -> Preferences:
    """The preferences of `heldout`, where nothing else is given."""
    return _read(context, settings, tokenizer, "heldout")


def _read(
    context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase, field: str
) -> Preferences:
    wants_thumbs = isinstance(settings.method, KTO)
    found = read_preferences(context.input(field), tokenizer, max_length=settings.max_length, wants_thumbs=wants_thumbs)
    for number, why in (
        (found.num_too_long, f"are longer than {settings.max_length} tokens"),
        (found.num_identical, "prefer an answer to itself"),
    ):
        if number:
            told = f"{number:,} {_noun(settings)} of `{field}` {why}: left out"
            context.event("warning", "preference.left_out", told)
    return found


def _noun(settings: PreferenceSettings) -> str:
    return "answers" if isinstance(settings.method, KTO) else "pairs"
