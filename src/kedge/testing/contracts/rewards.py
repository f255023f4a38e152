"""What every reward source promises: one score a row, in the order of the rows, whatever they hold.

NaN instead of an exception where a row cannot be scored; the same score when it is asked again; nothing of one row in
the score of another. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.testing import assert_close

from kedge.core.answers import Answer, TextSource
from kedge.core.protocols import RewardSource
from kedge.core.records import Rollouts, take

_TEXTS = (
    "42",
    "",
    "  ",
    "żółć 日本語 🙂 \u202e",
    "x" * 5000,
    '{"a": 1}',
    "a = 42",
    "null\x00byte",
    "\ud800 lone",
    "42.",
    "42",
    "41",
    "42",
    "a = 42",
)


class TextSourceContract:
    """Sources that read answers as text (`kedge.core.answers.TextSource`): what a plugin of `kedge.rewards` makes."""

    def make(self) -> TextSource:
        raise NotImplementedError("say how your source is made: def make(self) -> TextSource")

    def answers(self) -> list[Answer]:
        """Answers that are hard to read: empty, long, not ASCII, cut off, without a prompt. Every other one has a known
        solution and tests; add what your source needs, so that it gives at least two different scores."""
        return [
            Answer(
                prompt=(("user", "¿qué?"),) if index else (),
                text=text,
                is_finished=index != 4,
                solution="42" if index % 2 else None,
                extra={"tests": ["assert a == 42"]} if index % 2 else {},
            )
            for index, text in enumerate(_TEXTS)
        ]

    def test_no_answers_have_no_scores(self) -> None:
        scores = self.make().score([])
        assert list(scores) == [], f"no answers were given, and the scores are {scores}"

    def test_every_row_has_one_score_that_is_a_float_and_never_infinite(self) -> None:
        answers = self.answers()
        scores = self.make().score(answers)
        assert len(scores) == len(answers), f"{len(scores)} scores for {len(answers)} answers"
        kinds = {type(score).__name__ for score in scores}
        assert kinds == {"float"}, f"a score is a float (NaN where there is none), found {sorted(kinds)}"
        assert not any(math.isinf(score) for score in scores), f"a row without a score has NaN, found {scores}"

    def test_scores_differ(self) -> None:
        scores = self.make().score(self.answers())
        assert len({str(score) for score in scores}) > 1, f"all answers score {scores[0]}: nothing to learn from"

    def test_scores_follow_their_rows(self) -> None:
        source, answers = self.make(), self.answers()
        scores = source.score(answers)
        _assert_same(source.score(answers[::-1]), scores[::-1], "the same rows in reverse order")
        _assert_same(source.score(answers[3:6]), scores[3:6], "rows 3 to 5 alone")

    def test_the_same_answers_have_the_same_scores(self) -> None:
        source = self.make()
        _assert_same(source.score(self.answers()), source.score(self.answers()), "the same rows a second time")

    def test_any_sequence_of_answers_will_do(self) -> None:
        source = self.make()
        _assert_same(source.score(tuple(self.answers())), source.score(self.answers()), "a tuple instead of a list")


class RewardSourceContract:
    """Sources that score rollouts (`kedge.core.protocols.RewardSource`)."""

    def make(self) -> RewardSource:
        raise NotImplementedError("say how your source is made: def make(self) -> RewardSource")

    def rollouts(self) -> Rollouts:
        """Two answers to each of two prompts, padded on the right; one was cut off. Give others where your source needs
        tokens of its own; it must score at least two of them differently."""
        tokens_BT = torch.tensor([[5, 7, 8, 2, 0], [5, 9, 2, 0, 0], [6, 6, 8, 9, 7], [6, 6, 2, 0, 0]])
        length_B = torch.tensor([4, 3, 5, 3])
        prompt_B = torch.tensor([1, 1, 2, 2])
        index_T = torch.arange(5)
        attention_mask_BT = index_T < length_B[:, None]
        return Rollouts(
            tokens_BT=tokens_BT,
            attention_mask_BT=attention_mask_BT,
            response_mask_BT=attention_mask_BT & (index_T >= prompt_B[:, None]),
            behaviour_logp_BT=torch.zeros(4, 5),
            group_B=torch.tensor([10, 10, 11, 11]),
            finished_B=torch.tensor([True, True, False, True]),
            version=3,
        )

    def test_every_row_has_one_score_and_none_is_infinite(self) -> None:
        rollouts = self.rollouts()
        scores_B = self.make().score(rollouts)
        assert scores_B.shape == rollouts.group_B.shape, f"scores {tuple(scores_B.shape)}, expected one a row"
        assert scores_B.dtype == torch.float32, f"scores are {scores_B.dtype}, expected torch.float32"
        assert scores_B.device == rollouts.tokens_BT.device, f"scores on {scores_B.device}, not where the rollouts are"
        assert not scores_B.isinf().any(), f"a row without a score has NaN, found {scores_B.tolist()}"
        assert len({str(score) for score in scores_B.tolist()}) > 1, f"all rows score {scores_B[0].item()}"

    def test_scores_follow_their_rows(self) -> None:
        source, rollouts = self.make(), self.rollouts()
        scores_B = source.score(rollouts)
        backwards_B = torch.arange(len(scores_B) - 1, -1, -1)
        _assert_close(source.score(take(rollouts, backwards_B)), scores_B[backwards_B], "the rows in reverse order")
        for group in rollouts.group_B.unique().tolist():
            own_B = rollouts.group_B == group
            _assert_close(source.score(take(rollouts, own_B)), scores_B[own_B], f"the answers of group {group} alone")

    def test_the_same_rollouts_have_the_same_scores_and_are_not_changed(self) -> None:
        source, rollouts, expected = self.make(), self.rollouts(), self.rollouts()
        scores_B = source.score(rollouts)
        _assert_close(source.score(rollouts), scores_B, "the same rows a second time")
        for name in (
            "tokens_BT",
            "attention_mask_BT",
            "response_mask_BT",
            "behaviour_logp_BT",
            "group_B",
            "finished_B",
        ):
            is_same = torch.equal(getattr(rollouts, name), getattr(expected, name))
            assert is_same, f"scoring changed {name} of the rollouts"


def _assert_same(scores: Sequence[float], expected: Sequence[float], what: str) -> None:
    is_same = len(scores) == len(expected) and all(map(_equal, scores, expected))
    assert is_same, f"{what}: {list(scores)}, expected {list(expected)}"


def _equal(score: float, expected: float) -> bool:
    return score == expected or (math.isnan(score) and math.isnan(expected))


def _assert_close(scores_B: Any, expected_B: Any, what: str) -> None:
    """Batches of other rows may be rounded otherwise, and no more."""
    assert_close(scores_B, expected_B, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda found: f"{what}: {found}")
