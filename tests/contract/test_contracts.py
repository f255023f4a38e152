"""The contracts themselves: each promise is broken once, and the test that guards it must fail."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.answers import Answer, TextSource
from kedge.core.protocols import Generator, RewardSource
from kedge.core.records import Prompts, Rollouts
from kedge.models.loading.tiny import tiny_model
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.testing.contracts import BatchInvariantGeneratorContract, RewardSourceContract, TextSourceContract

STOP, NEW = frozenset({258, *range(0, 256, 16)}), 14


def broken_promises(contract: object) -> set[str]:
    """The tests of a contract that fail."""
    broken = set[str]()
    for name in dir(contract):
        if name.startswith("test_"):
            try:
                getattr(contract, name)()
            except AssertionError:
                broken.add(name)
    return broken


class Scores(TextSourceContract):
    """A source whose scores are what a function makes of the answers."""

    def __init__(self, score: Callable[[Sequence[Answer]], list[float]]) -> None:
        self.score = score

    def make(self) -> TextSource:
        return self


def by_length(answers: Sequence[Answer]) -> list[float]:
    return [float(len(answer.text)) if answer.text else math.nan for answer in answers]


def growing() -> Callable[[Sequence[Answer]], list[float]]:
    calls = list[int]()

    def score(answers: Sequence[Answer]) -> list[float]:
        calls.append(1)
        return [length + len(calls) for length in by_length(answers)]

    return score


def test_a_sound_text_source_keeps_every_promise() -> None:
    assert broken_promises(Scores(by_length)) == set()


@pytest.mark.parametrize(
    ("score", "broken"),
    [
        (lambda answers: by_length(answers) or [0.0], "no_answers_have_no_scores"),
        (lambda answers: by_length(answers)[:-1], "every_row_has_one_score_that_is_a_float_and_never_infinite"),
        (lambda answers: [len(a.text) for a in answers], "every_row_has_one_score_that_is_a_float_and_never_infinite"),
        (
            lambda answers: [math.inf if math.isnan(score) else score for score in by_length(answers)],
            "every_row_has_one_score_that_is_a_float_and_never_infinite",
        ),
        (lambda answers: [1.0] * len(answers), "scores_differ"),
        (lambda answers: sorted(by_length(answers)), "scores_follow_their_rows"),
        (lambda answers: [score + len(answers) for score in by_length(answers)], "scores_follow_their_rows"),
        (growing(), "the_same_answers_have_the_same_scores"),
        (
            lambda answers: [score + isinstance(answers, tuple) for score in by_length(answers)],
            "any_sequence_of_answers_will_do",
        ),
    ],
)
def test_a_text_source_that_breaks_a_promise_is_caught(
    score: Callable[[Sequence[Answer]], list[float]], broken: str
) -> None:
    assert f"test_{broken}" in broken_promises(Scores(score))


class RolloutScores(RewardSourceContract):
    def __init__(self, score: Callable[[Rollouts], Tensor]) -> None:
        self.score = score

    def make(self) -> RewardSource:
        return self


def token_sum(rollouts: Rollouts) -> Tensor:
    return (rollouts.tokens_BT * rollouts.attention_mask_BT).sum(dim=1).float()


def overwriting(rollouts: Rollouts) -> Tensor:
    scores_B = token_sum(rollouts)
    rollouts.behaviour_logp_BT.add_(1.0)
    return scores_B


ONE_SCORE, IN_ORDER = "test_every_row_has_one_score_and_none_is_infinite", "test_scores_follow_their_rows"
UNCHANGED = "test_the_same_rollouts_have_the_same_scores_and_are_not_changed"


def test_a_sound_reward_source_keeps_every_promise() -> None:
    assert broken_promises(RolloutScores(token_sum)) == set()


@pytest.mark.parametrize(
    ("score", "broken"),
    [
        (lambda rollouts: token_sum(rollouts)[:, None], ONE_SCORE),
        (lambda rollouts: token_sum(rollouts).double(), ONE_SCORE),
        (lambda rollouts: token_sum(rollouts) / 0, ONE_SCORE),
        (lambda rollouts: torch.ones(len(rollouts.group_B)), ONE_SCORE),
        (lambda rollouts: token_sum(rollouts).sort().values, IN_ORDER),
        (lambda rollouts: token_sum(rollouts) - token_sum(rollouts).mean(), IN_ORDER),
        (overwriting, UNCHANGED),
    ],
)
def test_a_reward_source_that_breaks_a_promise_is_caught(score: Callable[[Rollouts], Tensor], broken: str) -> None:
    assert broken in broken_promises(RolloutScores(score))


class Sound:
    """The local engine over a copy of the weights, which faults below are made from."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.calls = model, 0
        self.engine = LocalGenerator(
            model, SamplingSettings(max_new_tokens=NEW), stop_ids=STOP, pad=256, max_rows=32, version=2
        )

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        self.calls += 1
        future = Future[Rollouts]()
        future.set_result(
            self.altered_rollouts(self.engine.generate(self.altered_prompts(prompts), self.altered_seed(seed)))
        )
        return future

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.model.load_state_dict(dict(weights), strict=False)
        self.engine.load_weights({}, version)

    def altered_prompts(self, prompts: Prompts) -> Prompts:
        return prompts

    def altered_seed(self, seed: int) -> int:
        return seed

    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        return rollouts


class OtherGroups(Sound):
    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        return replace(rollouts, group_B=rollouts.group_B + 1)


class RowsInReverse(Sound):
    def altered_prompts(self, prompts: Prompts) -> Prompts:
        return Prompts(tokens=prompts.tokens[::-1], group=prompts.group[::-1], answer=prompts.answer[::-1])

    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        return replace(rollouts, group_B=rollouts.group_B.flip(0))


class PromptsCount(Sound):
    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        return replace(rollouts, response_mask_BT=rollouts.attention_mask_BT)


class LeftPadded(Sound):
    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        masks = {"attention_mask_BT": rollouts.attention_mask_BT, "response_mask_BT": rollouts.response_mask_BT}
        return replace(
            rollouts, tokens_BT=rollouts.tokens_BT.flip(1), **{name: mask.flip(1) for name, mask in masks.items()}
        )


class TooLong(Sound):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        settings = SamplingSettings(max_new_tokens=NEW + 1)
        self.engine = LocalGenerator(model, settings, stop_ids=STOP, pad=256, max_rows=32, version=2)


class Negated(Sound):
    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        return replace(rollouts, behaviour_logp_BT=-rollouts.behaviour_logp_BT)


class NotANumber(Sound):
    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        missing_BT = rollouts.behaviour_logp_BT.masked_fill(~rollouts.response_mask_BT, torch.nan)
        return replace(rollouts, behaviour_logp_BT=missing_BT)


class NoLogProbs(Sound):
    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        return replace(rollouts, behaviour_logp_BT=torch.zeros_like(rollouts.behaviour_logp_BT))


class AllFinished(Sound):
    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        return replace(rollouts, finished_B=torch.ones_like(rollouts.finished_B))


class SeedIgnored(Sound):
    def altered_seed(self, seed: int) -> int:
        return 0


class AnotherSeedEachCall(Sound):
    def altered_seed(self, seed: int) -> int:
        return seed + self.calls


class SameAnswerForAll(Sound):
    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        """The first answer to each prompt stands for the others."""
        rollouts = super().submit(prompts, seed).result()
        first = {group: row for row, group in reversed(list(enumerate(prompts.group)))}
        source = torch.tensor([first[group] for group in prompts.group])
        names = ("tokens_BT", "attention_mask_BT", "response_mask_BT", "behaviour_logp_BT", "finished_B")
        future = Future[Rollouts]()
        future.set_result(replace(rollouts, **{name: getattr(rollouts, name)[source] for name in names}))
        return future


class DependsOnTheBatch(Sound):
    def altered_prompts(self, prompts: Prompts) -> Prompts:
        return replace(prompts, answer=tuple(range(len(prompts.answer))))


class InAGraph(Sound):
    def altered_rollouts(self, rollouts: Rollouts) -> Rollouts:
        return replace(rollouts, behaviour_logp_BT=rollouts.behaviour_logp_BT.clone().requires_grad_())


class OldVersion(Sound):
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        super().load_weights(weights, self.engine.version)


class StaleWeights(Sound):
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        super().load_weights({}, version)


class Lazy(Sound):
    """Samples only when the result is asked for, with whatever weights there are by then."""

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        generate = super().submit

        class Later(Future[Rollouts]):
            def result(self, timeout: float | None = None) -> Rollouts:
                return generate(prompts, seed).result()

        return Later()


class Overtaking(Sound):
    """Hands out the answers to the batch before."""

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        previous = getattr(self, "previous", None)
        self.previous = super().submit(prompts, seed)
        return previous or self.previous


class OfModel(BatchInvariantGeneratorContract):
    vocabulary, stop_ids, max_new_tokens = 256, STOP, NEW

    def __init__(self, kind: type[Sound]) -> None:
        self.kind, self.start = kind, tiny_model(seed=3, hidden=32)
        with torch.no_grad():
            for weight in self.start.parameters():
                weight.mul_(4.0 if weight.ndim == 2 else 1.0)

    def make(self) -> Generator:
        return self.kind(copy.deepcopy(self.start))

    def new_weights(self) -> Mapping[str, Tensor]:
        return {name: -weight for name, weight in self.start.state_dict().items() if "down_proj" in name}


ROWS = "test_rows_are_the_prompts_in_their_order_followed_by_an_answer"
LOG_PROBS, FINISHED = (
    "test_log_probs_are_finite_and_never_above_0",
    "test_an_answer_is_finished_where_a_stop_token_ended_it",
)
SEEDS = "test_the_same_seed_samples_the_same_answers_and_another_seed_others"
NEW_WEIGHTS = "test_new_weights_and_their_version_hold_for_what_is_submitted_after_them"
UNDER_WAY = "test_a_batch_that_was_submitted_before_new_weights_is_sampled_with_the_old_ones"


def test_a_sound_generator_keeps_every_promise() -> None:
    assert broken_promises(OfModel(Sound)) == set()


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (OtherGroups, ROWS),
        (RowsInReverse, ROWS),
        (PromptsCount, ROWS),
        (LeftPadded, ROWS),
        (TooLong, "test_answers_have_at_least_one_token_and_at_most_the_limit"),
        (Negated, LOG_PROBS),
        (NotANumber, LOG_PROBS),
        (NoLogProbs, LOG_PROBS),
        (AllFinished, FINISHED),
        (SeedIgnored, SEEDS),
        (AnotherSeedEachCall, SEEDS),
        (SameAnswerForAll, "test_answers_to_one_prompt_are_drawn_independently"),
        (DependsOnTheBatch, "test_a_row_has_the_same_answer_in_any_batch"),
        (InAGraph, "test_rollouts_can_be_trained_on"),
        (OldVersion, NEW_WEIGHTS),
        (StaleWeights, NEW_WEIGHTS),
        (Lazy, UNDER_WAY),
        (Overtaking, "test_batches_come_in_the_order_in_which_they_were_submitted"),
    ],
)
def test_a_generator_that_breaks_a_promise_is_caught(kind: type[Sound], broken: str) -> None:
    contract = OfModel(kind)
    with pytest.raises(AssertionError):
        getattr(contract, broken)()


def test_contracts_are_imported_without_pytest() -> None:
    code = "import sys, kedge.testing.contracts; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
