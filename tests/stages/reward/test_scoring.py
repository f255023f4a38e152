"""Which member of an ensemble is asked about which training comparison."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.models.loading.tiny import tiny_tokenizer
from kedge.models.reward.reward_model import RewardFacts, unnormalised
from kedge.stages.reward.comparisons import EncodedComparison, fold, read_comparisons
from kedge.stages.reward.scoring import report_out_of_fold
from kedge.stages.shared.encoding import Encoder

Write = Callable[[str, str], Path]


@dataclass(frozen=True)
class Knows:
    """A member that has learnt some texts by heart, and is wrong on them: others score their length."""

    seen: frozenset[tuple[int, ...]]
    tokenizer: PreTrainedTokenizerBase
    facts: RewardFacts

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def objectives(self) -> tuple[str, ...]:
        return self.facts.objectives

    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        rows = [tuple(row[mask].tolist()) for row, mask in zip(tokens_BT, attention_mask_BT.bool(), strict=True)]
        return torch.tensor([[-float(len(row)) if row in self.seen else float(len(row))] for row in rows])


def texts(items: Sequence[EncodedComparison]) -> frozenset[tuple[int, ...]]:
    return frozenset(tuple(answer) for one in items for answer in one.ranked.answers)


def test_each_comparison_is_scored_by_the_member_that_never_saw_its_prompt(write: Write) -> None:
    # The longer answer is chosen in 57 of 60: who has not seen a pair is right about these, who has is wrong.
    rows = [
        {"prompt": f"question {i % 20}", "chosen": "a" * (9 + i), "rejected": "b" * (3 if i > 2 else 90)}
        for i in range(60)
    ]
    file = write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny_tokenizer()
    items = read_comparisons(
        [str(file)], Encoder(tokenizer=tokenizer, max_length=200, truncate="left"), use_margin=False
    )
    members = [
        Knows(texts(fold(items, member=i, members=3, seed=5)), tokenizer, unnormalised(["reward"])) for i in range(3)
    ]
    report = report_out_of_fold(members, items, seed=5)
    assert (report.pairs, report.prompts, report.members) == (60, 20, 1)
    assert report.accuracy.value == 57 / 60
