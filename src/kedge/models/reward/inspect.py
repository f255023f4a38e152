"""What a reward model's folder says of it, without loading its weights: objectives, lengths, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from kedge.core.errors import ModelError
from kedge.models.loading.describe import check_weight_files, window_of
from kedge.models.loading.load import explain
from kedge.models.loading.resolve import resolve
from kedge.models.reward.ensemble import read_record
from kedge.models.reward.reward_files import ENSEMBLE, FACTS, tokenizer_of
from kedge.models.reward.reward_model import RewardFacts, facts_from, unnormalised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedReward:
    """A reward model or an ensemble as its folder describes it."""

    place: str
    members: int
    facts: RewardFacts
    tokenizer: PreTrainedTokenizerBase
    window: int | None

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text that is scored whole; None where nothing says so."""
        return self.facts.max_length or self.window


def inspect_reward(source: str | Path) -> InspectedReward:
    """The facts of the reward model or ensemble at `source`; raises where its files cannot be used."""
    folder = Path(source)
    if not (folder / ENSEMBLE).is_file():
        return _inspected(source)
    record = read_record(folder / ENSEMBLE)
    names: list[str] = record["members"]
    if "base" not in record:
        first, *_ = [_inspected(folder / name) for name in names]
        return InspectedReward(
            place=str(folder), members=len(names), facts=first.facts, tokenizer=first.tokenizer, window=first.window
        )
    for name in names:
        check_weight_files(folder / name)
    facts = [facts_from(read_record(folder / name / FACTS)) for name in names]
    return InspectedReward(
        place=str(folder), members=len(names), facts=facts[0], tokenizer=tokenizer_of(folder), window=None
    )


def _inspected(source: str | Path) -> InspectedReward:
    place = resolve(source)
    try:
        config: Any = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(explain(str(place), error)) from error
    architecture = next(iter(config.architectures or ()), f"model of type {config.model_type}")
    if not architecture.endswith("ForSequenceClassification"):
        raise ModelError(
            f"{place} is not a reward model but a {architecture}: it has no score head. Train one from it with a stage "
            "of kind reward"
        )
    if isinstance(place, Path):
        check_weight_files(place)
    stored = getattr(config, "kedge_reward", None)
    labels = [config.id2label[index] for index in range(len(config.id2label))]
    facts = facts_from(stored) if stored else unnormalised(["reward"] if labels == ["LABEL_0"] else labels)
    return InspectedReward(
        place=str(place),
        members=1,
        facts=facts,
        tokenizer=tokenizer_of(place),
        window=window_of(config.get_text_config()),
    )
