"""The preferences that a recipe gives in files: to learn from, and held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kedge.models.training.preference_methods import KTO
from kedge.stages.preference.preferences import Preference, read_preferences
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.encoding import report_long
from kedge.stages.shared.held_out import hold_out, refuse_shared_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def offline_data(
    context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sequence[Preference], Sequence[Preference]]:
    """The preferences of `data` to learn, and those that are held out; events say how many, and what is left out."""
    data = read_file(context, settings, tokenizer, "data")
    if context.inputs("heldout"):
        held_out = read_file(context, settings, tokenizer, "heldout")
        refuse_shared_prompts(data, held_out)
    else:
        data, held_out = hold_out(data, share=settings.heldout_share, seed=context.seed)
    message = f"{len(data):,} {noun_of(settings)} to learn, {len(held_out):,} held out by prompt"
    context.event("info", "preference.data", message)
    return data, held_out


def read_file(
    context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase, field: str
) -> Sequence[Preference]:
    """The preferences of one input of the stage."""
    wants_thumbs = isinstance(settings.method, KTO)
    preferences = read_preferences(
        context.input(field),
        tokenizer,
        max_length=settings.max_length,
        wants_thumbs=wants_thumbs,
        too_long=settings.too_long,
    )
    what = f"{noun_of(settings)} of `{field}`"
    report_long(
        context,
        "preference.left_out",
        what,
        max_length=settings.max_length,
        dropped=preferences.num_too_long,
        cut=preferences.num_cut,
    )
    if preferences.num_identical:
        message = f"{preferences.num_identical:,} {what} prefer an answer to itself: left out"
        context.event("warning", "preference.left_out", message)
    return preferences.items


def noun_of(settings: PreferenceSettings) -> str:
    """What an item of the data is called."""
    return "answers" if isinstance(settings.method, KTO) else "pairs"
